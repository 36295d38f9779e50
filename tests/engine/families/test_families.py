"""The matrix of families, and the particular features of some of them."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, GROUPS, naive_ffn
from family_matrix import (
    COLUMNS,
    NOTES,
    REFUSED,
    ROWS,
    TOKENS,
    Made,
    decoder_of,
    evenly,
    full,
    loaded,
    logits_of,
    own_logits,
    refusals,
    worst,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from compress.plans.apply import apply
from compress.plans.plan import SHARED_EXPERT, Plan, concatenation_plan, kept_expert, narrowed_expert, pruning_plan
from engine.checkpoint import remote_code
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder import lightning_attention
from engine.decoder.kv_cache import KeyValueCache, state_bytes
from engine.decoder.latent_attention import Queries
from engine.decoder.routing import NO_EXPERT, GroupedTopK, SigmoidTopK
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.families.plain_config import PlainConfig
from engine.families.resolve import decoder_config
from engine.families.results import loading_note
from engine.families.table import ARCHITECTURES
from engine.families.tensor_shapes import expected_tensors
from engine.generation.generate import Engine
from engine.inspect import inspect

pytestmark = pytest.mark.usefixtures("modules_cache")
ROOT = Path(__file__).resolve().parents[3]
QUICK_COLUMNS = ("as it is", "pruned, non-uniform")
QUICK_ROWS = ("mixtral", "deepseek_v3", "gpt_oss", "llama_moe")
"""Columns and rows of the matrix that `make test` checks. `make test-all` checks every cell."""


@pytest.fixture(name="made_of", scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tiny model of each family, made on first use."""
    return cache(lambda family: Made(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize(
    ("family", "column"),
    [
        pytest.param(family, column, marks=() if column in QUICK_COLUMNS or family in QUICK_ROWS else pytest.mark.slow)
        for column in COLUMNS
        for family in ROWS
    ],
)
def test_what_a_family_can_become(family: str, column: str, made_of: Any, matrix: Any) -> None:
    if (reason := REFUSED.get((family, column))) is not None:
        with pytest.raises(UnsupportedError, match=reason):
            COLUMNS[column](made_of(family))
    else:
        matrix(family, "", column, COLUMNS[column](made_of(family)))


def test_every_family_is_tested() -> None:
    """Each family is tested under a name. A config with its authors' keys has a test of its own."""
    tested = {name: row for name, row in ARCHITECTURES.items() if not row.words.renames}
    assert set(FAMILIES | FURTHER_FAMILIES) == set(tested)
    assert set(ROWS) == {name for name, row in tested.items() if row.has_experts}


def test_the_stored_result_has_every_cell() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text())["figures"]
    assert figures["columns"] == list(COLUMNS) and list(figures["families"]) == list(ROWS.values())
    for family, name in ROWS.items():
        found = figures["families"][name]
        assert set(found) == {column for column in COLUMNS if (family, column) not in REFUSED}
        assert all(difference <= 1e-4 for difference in found.values())
    assert "\n".join(figures["notes"]) == f"{NOTES}\n{refusals()}"


# Variants of configs

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v3", "queries without a latent vector", {"q_lora_rank": None}),
    ("deepseek_v3", "biases, halves rotated", {"attention_bias": True, "rope_interleave": False}),
    ("deepseek_v3", "yarn, mscale", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    ("deepseek_v3", "yarn", {"rope_parameters": YARN}),
    ("deepseek_v3", "top-k as it is", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    ("deepseek_v2", "greedy", {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    ("deepseek_v2", "yarn, mscale", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("glm4_moe", "neither norms nor biases", {"use_qk_norm": False, "attention_bias": False}),
    (
        "glm4_moe_lite",
        "a dense layer between, halves rotated",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rope_interleave": False} | GROUPS,
    ),
    ("glm4_moe", "groups, yarn", {"n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    ("deepseek", "top-k renormalized", {"norm_topk_prob": True, "n_shared_experts": None}),
    ("granitemoeshared", "without a shared expert", {"shared_intermediate_size": 0, "attention_bias": True}),
    ("ernie4_5_moe", "some layers", {"moe_layer_end_index": 3, "moe_layer_interval": 2, "num_hidden_layers": 5}),
    ("ernie4_5_moe", "no shared expert, tied", {"moe_num_shared_experts": 0, "tie_word_embeddings": True}),
    ("llama4_text", "top-1, no norms", {"num_experts_per_tok": 1, "use_qk_norm": False, "attention_bias": True}),
    ("llama4_text", "all sparse", {"interleave_moe_layer_step": 1, "rope_parameters": LLAMA3, "num_hidden_layers": 3}),
    ("llama4_text", "no chunks", {"attention_chunk_size": 64, "no_rope_layers": [1, 0, 0, 1], "moe_layers": [0, 1, 3]}),
    ("minimax_m2", "yarn", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    (
        "qwen3_next",
        "every third layer full, no key heads repeated",
        {"layer_types": None, "full_attention_interval": 3, "linear_num_key_heads": 4, "attention_bias": True},
    ),
    (
        "qwen3_next",
        "every second layer with experts, heads rotated whole",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    ),
    ("qwen3_next", "a short filter, top-k as it is", {"linear_conv_kernel_dim": 2, "norm_topk_prob": False}),
    (
        "lfm2_moe",
        "a long filter, top-k as it is",
        {"conv_L_cache": 5, "norm_topk_prob": False, "tie_word_embeddings": False},
    ),
    ("deepseek", "every second layer", {"moe_layer_freq": 2, "first_k_dense_replace": 0, "num_hidden_layers": 4}),
]


@pytest.mark.parametrize(("family", "variant", "changes"), VARIANTS, ids=[f"{f}-{v}" for f, v, _ in VARIANTS])
def test_what_configs_ask_for(family: str, variant: str, changes: dict[str, Any], tmp_path: Path, matrix: Any) -> None:
    matrix(family, variant, "as it is", full(Made(family, tmp_path, changes)))


def test_both_ways_of_latent_attention_are_one_function(made_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One position follows others, some of which are padding; in float64, and in bfloat16 that is only emulated."""
    decoder = decoder_of(made_of("deepseek_v3").checkpoint, torch.float64)
    attention = decoder.layers[1].attention
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries = Queries(normal(2, 4, 1, 6), normal(2, 4, 1, 4))
    latent, key, mask = normal(2, 1, 9, 12), normal(2, 1, 9, 4), torch.arange(9) >= torch.tensor([[0], [3]])
    for allowed in (None, mask[:, None, None]):
        one, other = (way(queries, latent, key, allowed) for way in (attention.absorbed, attention.expanded))
        assert one.shape == (2, 4, 1, 10) and float((one - other).abs().max()) < 1e-13
        monkeypatch.setattr("engine.decoder.latent_attention.is_emulated", lambda tensor: tensor.dtype == torch.bfloat16)
        half = attention.absorbed(
            Queries(*(each.bfloat16() for each in queries)), latent.bfloat16(), key.bfloat16(), allowed
        )
        assert half.dtype == torch.bfloat16 and float((half - one).abs().max()) < 0.02 * float(one.abs().max())


@pytest.mark.parametrize("sigmoid", [False, True])
def test_groups_of_any_size(sigmoid: bool) -> None:
    """The rule is written out for one token: groups of 3, 1 and 4 experts, of which two are taken, and top-5 of those."""
    groups, bias = ((0, 1, 2), (3,), (4, 5, 6, 7)), torch.tensor([0.4, -0.2, 0.1, 0.9, -0.3, 0.2, 0.0, -0.1])
    logits = 2.0 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    rule = SigmoidTopK(5, True, bias, 2.5, groups, 2) if sigmoid else GroupedTopK(5, groups, 2, 2.5)
    found = rule(logits)
    empty = 0
    for row, experts, weights in zip(logits.tolist(), *(each.tolist() for each in found), strict=True):
        total = sum(math.exp(z) for z in row)
        scores = [1 / (1 + math.exp(-z)) if sigmoid else math.exp(z) / total for z in row]
        choice = [s + float(b) for s, b in zip(scores, bias, strict=True)] if sigmoid else scores
        judged = {group: sum(sorted(choice[e] for e in group)[::-1][: 2 if sigmoid else 1]) for group in groups}
        allowed = [e for group in sorted(groups, key=judged.__getitem__)[-2:] for e in group]
        best = sorted(allowed, key=lambda e: -choice[e])[:5]
        whole = sum(scores[e] for e in best) if sigmoid else 1.0
        assert {e: w for e, w in zip(experts, weights, strict=True) if e != NO_EXPERT} == pytest.approx(
            {e: 2.5 * scores[e] / whole for e in best}
        )
        empty += experts.count(NO_EXPERT)
    assert empty > 0, "a group of one and one of three hold fewer than five"


def test_what_a_router_scales_is_what_experts_are_given(made_of: Any) -> None:
    """The expected outputs are written out. Both paths are tested, and the gradient in the router."""
    block = decoder_of(made_of("llama4_text").checkpoint, torch.float64).layers[1].feed_forward
    x_TD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        logits = x_TD @ block.router_ND.T
        expected = torch.stack([block.shared(x[None])[0] for x in x_TD])
        for row, x in enumerate(x_TD):
            for expert in logits[row].topk(2).indices.tolist():
                parts = [each.detach() for each in block.experts[expert].projections]
                expected[row] += naive_ffn(parts, None, x * logits[row, expert].sigmoid())
        assert worst(block(x_TD), expected) < 1e-12, "one token after the other"
        assert worst(torch.stack(list(block.outputs(x_TD)))[:, 0], naive_outputs(block, x_TD[0], logits[0])) < 1e-12
    block.router_ND.requires_grad_()
    y_TD = block(x_TD)
    assert worst(y_TD.detach(), expected) < 1e-12, "one expert after the other"
    (gradient,) = torch.autograd.grad(y_TD.square().sum(), block.router_ND)
    with torch.no_grad():
        place, step = divmod(int(gradient.abs().argmax()), 32), 1e-6
        values = []
        for sign in (1.0, -1.0):
            block.router_ND[place] += sign * step
            values.append(float(block(x_TD).square().sum()))
            block.router_ND[place] -= sign * step
    assert float(gradient[place]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def naive_outputs(block: Any, x: Tensor, logits: Tensor) -> Tensor:
    """Return the output of every expert for one token."""
    parts = [[each.detach() for each in expert.projections] for expert in block.experts]
    return torch.stack([naive_ffn(own, None, x * z.sigmoid()) for own, z in zip(parts, logits, strict=True)])


def test_queries_that_are_not_rotated_grow_with_their_position(tmp_path: Path) -> None:
    """Results equal transformers' without padding. With padding each sequence equals itself alone; there it does not."""
    made = Made("llama4_text", tmp_path, {"floor_scale": 3, "attn_scale": 0.9})
    decoder = decoder_of(made.checkpoint)
    with torch.no_grad():
        assert worst(decoder(TOKENS), made.logits) <= 1e-4
        flat = Made("llama4_text", tmp_path / "flat", {"attn_temperature_tuning": False})
        assert worst(flat.logits, made.logits) > 1e-2
        real = torch.ones(2, 16, dtype=torch.bool)
        real[1, :6] = False
        cache = KeyValueCache(decoder.config, 2, 16, torch.float32)
        steps = [decoder(TOKENS[:, :9], real[:, :9], cache)]
        steps += [decoder(TOKENS[:, i : i + 1], real[:, : i + 1], cache) for i in range(9, 16)]
        together = torch.cat(steps, 1)
        assert worst(together[1, 6:], decoder(TOKENS[1:, 6:])[0]) <= 1e-5
        assert worst(together[:1], made.logits[:1]) <= 1e-4


# A language model beside other parts


def pruned_like_its_language_model(made: Any, whole: Path) -> Path:
    """Check that a model of images has the logits of its language model, and that both have the same tensors when pruned,
    except for layers for multi-token prediction.

    whole: the model of images. Returns the directory of its result.
    """
    assert worst(own_logits(Checkpoint(whole)), made.logits) <= 1e-4
    plan = pruning_plan({layer: evenly(made.moe(layer)) for layer in made.layers})
    pruned, expected = whole.parent / "pruned", whole.parent / "expected"
    for source, output in ((whole, pruned), (made.path / "full", expected)):
        output.mkdir()
        apply(plan, Checkpoint(source), output)
    ours, theirs = (load_file(path / "model.safetensors") for path in (pruned, expected))
    ours = {name: tensor for name, tensor in ours.items() if not name.startswith("mtp.")}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return pruned


def test_the_language_model_within_a_model_of_images(made_of: Any, tmp_path: Path) -> None:
    """The files are as in published Llama 4: a nested config, a name prefix, and other tensors for images."""
    made = made_of("llama4_text")
    whole = tmp_path / "whole"
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28}
    vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=made.checkpoint.raw_config, vision_config=vision)
    model = Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(made.reference.state_dict())
    model.save_pretrained(whole)
    found = inspect(str(whole), checksums=False, progress=lambda names, _: names)
    assert found["parts_not_read"] == ["vision_model", "multi_modal_projector"]
    assert (found["architecture"], found["parameters"]) == ("llama4_text", made.checkpoint.parameters)
    pruned = pruned_like_its_language_model(made, whole)
    assert Checkpoint(pruned).raw_config["architectures"] == ["Llama4ForCausalLM"]
    raw = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != "text_config"}))
    with pytest.raises(CheckpointError, match="text_config is missing"):
        Checkpoint(whole)


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Qwen3.5-MoE with stacked experts, and a tensor of its layer for multi-token prediction."""
    stored = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    blocks = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        gate, up, down = (
            torch.stack([tensors[f"{block}.experts.{expert}.{part}_proj.weight"] for expert in range(6)])
            for part in ("gate", "up", "down")
        )
        stored |= {f"{block}.experts.gate_up_proj": torch.cat((gate, up), dim=1), f"{block}.experts.down_proj": down}
    return stored | {"mtp.layers.0.mlp.gate.weight": torch.ones(6, 32)}


def test_the_language_model_of_qwen3_5(made_of: Any, tmp_path: Path) -> None:
    """The files are as published: a nested config, another prefix, tensors for images, stacked experts."""
    made = made_of("qwen3_5_moe_text")
    whole = tmp_path / "whole"
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5MoeConfig(text_config=made.checkpoint.raw_config, vision_config=vision)
    model = Qwen3_5MoeForConditionalGeneration(config)
    model.model.language_model.load_state_dict(made.reference.model.state_dict())
    model.lm_head.load_state_dict(made.reference.lm_head.state_dict())
    model.save_pretrained(whole)
    save_file(as_published(load_file(whole / "model.safetensors")), whole / "model.safetensors", {"format": "pt"})
    raw = json.loads((whole / "config.json").read_text())
    raw["text_config"] |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []}
    raw["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (whole / "config.json").write_text(json.dumps(raw))
    found = inspect(str(whole), checksums=False, progress=lambda names, _: names)
    assert found["parts_not_read"] == ["model.visual"] and found["prediction_layers_not_read"] == 1
    assert (found["architecture"], found["parameters"]) == ("qwen3_5_moe_text", made.checkpoint.parameters)
    pruned = pruned_like_its_language_model(made, whole)
    assert Checkpoint(pruned).raw_config["mtp_num_hidden_layers"] == 1
    assert load_file(pruned / "model.safetensors")["mtp.layers.0.mlp.gate.weight"].shape == (4, 32)
    raw["text_config"]["attn_output_gate"] = False
    (whole / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match="attn_output_gate=False"):
        Checkpoint(whole)


# Lightning attention


def by_recurrence(query: Tensor, key: Tensor, value: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Compute s_t = λ s_{t-1} + k_t v_tᵀ and o_t = s_tᵀ q_t, one position after another."""
    state, given = torch.zeros(*key.shape[:2], key.shape[-1], value.shape[-1], dtype=key.dtype), []
    for place in range(key.shape[2]):
        state = torch.exp(-rates)[:, None, None] * state + key[:, :, place, :, None] * value[:, :, place, None]
        given.append((query[:, :, place, :, None] * state).sum(2))
    return torch.stack(given, dim=2), state


def test_blocks_of_lightning_attention_are_its_recurrence() -> None:
    """The test uses several blocks, the last one short, at once and from a state, in the first and last layer."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 2 * lightning_attention.BLOCK + 7, 5, generator=generator, dtype=torch.float64)
    for layer in (0, 2):
        rates = lightning_attention.decay_rates(4, layer, 3)
        expected, state = by_recurrence(query, key, value, rates.double())
        found, last = lightning_attention.attend(query, key, value, rates)
        assert torch.allclose(found, expected, atol=1e-9) and torch.allclose(last, state, atol=1e-9)
        before, middle = lightning_attention.attend(query[:, :, :70], key[:, :, :70], value[:, :, :70], rates)
        after, last = lightning_attention.attend(query[:, :, 70:], key[:, :, 70:], value[:, :, 70:], rates, middle)
        assert torch.allclose(torch.cat([before, after], dim=2), expected, atol=1e-9)
        assert torch.allclose(last, state, atol=1e-9)
    slopes = [2.0 ** -(2.0 * head) * (1 - 1 / (2 + 1e-5) + 1e-5) for head in (1, 2, 3, 4)]
    assert lightning_attention.decay_rates(4, 1, 3).tolist() == pytest.approx(slopes)


AUTHORS_WORDS = {
    "model_type": "minimax_m1",
    "architectures": ["MiniMaxM1ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m1.MiniMaxM1ForCausalLM"},
    "attn_type_list": [0, 1, 0],
    "postnorm": True,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "rotary_dim": 8,
} | {
    f"layernorm_{kind}_{factor}": value
    for kind, values in (("full_attention", (1.3, 0.8)), ("linear_attention", (1.1, 0.9)), ("mlp", (1.2, 0.7)))
    for factor, value in zip(("alpha", "beta"), values, strict=True)
}


@pytest.mark.parametrize("name", ["minimax_m1", "minimax_text_01"])
def test_a_config_in_its_authors_words(name: str, made_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each head is rotated, which the authors' config says and transformers' class does not know."""
    from transformers.models.minimax import modeling_minimax
    from transformers.models.minimax_m2.modeling_minimax_m2 import apply_rotary_pos_emb

    made = made_of("minimax")
    rotated_whole = made.logits
    shutil.copytree(made.path / "full", tmp_path / "full")
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    renamed = ("layer_types", "block_size")
    common = {key: value for key, value in config.items() if not key.endswith("_factor") and key not in renamed}
    theirs = common | AUTHORS_WORDS | {"model_type": name}
    (tmp_path / "full" / "config.json").write_text(json.dumps(theirs))
    checkpoint = Checkpoint(tmp_path / "full")
    rotary = made.reference.model.rotary_emb
    theta = config["rope_parameters"]["rope_theta"]
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    monkeypatch.setitem(rotary._buffers, "inv_freq", 1.0 / theta ** (torch.arange(0, 8, 2) / 8))
    expected = logits_of(made.reference)
    assert worst(own_logits(checkpoint), expected) < 1e-4 < 1e-2 < worst(expected, rotated_whole)
    (tmp_path / "pruned").mkdir()
    apply(pruning_plan({layer: [0, 2, 3, 5] for layer in made.layers}), checkpoint, tmp_path / "pruned")
    written = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert written["model_type"] == "minimax" and written["architectures"] == ["MiniMaxForCausalLM"]
    assert not {"auto_map", "attn_type_list"} & written.keys() and written["layer_types"] == config["layer_types"]
    assert "all of a head's 16 dimensions, and this model 8" in str(loading_note(written)) and loading_note(config) is None
    with pytest.raises(OptionError, match="use our own engine"):
        remote_code.check_loadable(tmp_path / "pruned", written)
    refusals = {
        "postnorm=False": {"postnorm": False},
        "postnorm=None": {"postnorm": None},
        "rotary_dim is 7": {"rotary_dim": 7},
    }
    refusals |= {"sliding_attention": {"attn_type_list": [0, 1, "sliding_attention"]}}
    for message, changed in refusals.items():
        with pytest.raises(CompressError, match=message):
            decoder_config(theirs | changed)


def test_decays_beside_the_weights_are_copied_and_an_outline_has_them_too(made_of: Any, tmp_path: Path) -> None:
    checkpoint = made_of("minimax").checkpoint
    (weights,) = checkpoint.directory.glob("*.safetensors")
    assert Checkpoint(checkpoint.directory, frozenset([weights.name])).derived == checkpoint.derived
    apply(pruning_plan({layer: [0, 2, 3] for layer in checkpoint.config.moe_layers}), checkpoint, tmp_path)
    tensors, own = (load_file(*path.glob("*.safetensors")) for path in (tmp_path, checkpoint.directory))
    assert len(checkpoint.derived) == 8 and all(torch.equal(tensors[name], own[name]) for name in checkpoint.derived)


@pytest.mark.parametrize("family", ["minimax", "qwen3_next", "lfm2_moe", "nemotron_h"])
def test_a_state_goes_with_its_sequence_and_takes_nothing_back(family: str, made_of: Any) -> None:
    checkpoint = made_of(family).checkpoint
    cache = KeyValueCache(checkpoint.config, 2, 16, torch.float32)
    decoder = decoder_of(checkpoint)
    with torch.no_grad():
        decoder.hidden_states(TOKENS[:, :9], None, cache)
        chosen = cache.of_rows(torch.tensor([1]))
        one = decoder(TOKENS[1:, 9:10], None, chosen)
        cache.extend(20)
        both = decoder(TOKENS[:, 9:10], None, cache)
    assert worst(one, both[1:]) < 1e-5
    assert len(cache.states) == len(checkpoint.config.linear_layers) == 2 and len(cache.stored.keys) == 1, (
        "positions of the one layer that keeps them"
    )
    with pytest.raises(OptionError, match="cannot undo tokens"):
        Engine.open(checkpoint.directory, draft=checkpoint.directory)


# The gated delta rule


def test_the_published_qwen3_5_has_35_billion_parameters() -> None:
    """The keys are those of the language model of Qwen3.5-35B-A3B."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2}
    sizes |= {"head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "full_attention_interval": 4}
    sizes |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1}
    sizes |= {"shared_expert_intermediate_size": 512, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    rope |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    config = decoder_config({"model_type": "qwen3_5_moe_text", "rope_parameters": rope} | sizes)
    assert isinstance(config.transformers_config, PlainConfig), "transformers is not imported for it"
    assert len(config.linear_layers) == 30 and (config.rotary_dimension, config.prediction_layers) == (64, 1)
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == 34.7


def test_the_published_qwen3_next_has_80_billion_parameters() -> None:
    """The keys are those of Qwen3-Next-80B-A3B, which has no `layer_types`."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
    sizes |= {"head_dim": 256, "vocab_size": 151936, "intermediate_size": 5120, "max_position_embeddings": 262144}
    experts = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    experts |= {"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": []}
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    delta |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}
    rotary = {"rope_theta": 10000000, "rope_scaling": None, "partial_rotary_factor": 0.25, "use_sliding_window": False}
    raw = {"model_type": "qwen3_next", "attention_bias": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    config = decoder_config(raw | sizes | experts | delta | rotary)
    assert isinstance(config.transformers_config, PlainConfig), "transformers is not imported for it"
    assert config.caching_layers == tuple(range(3, 48, 4)) and config.rotary_dimension == 64
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == 79.7
    assert state_bytes(config, torch.bfloat16) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    with pytest.raises(CheckpointError, match="32 linear value heads cannot share 24 linear key heads"):
        decoder_config(raw | sizes | experts | delta | rotary | {"linear_num_key_heads": 24})


# Short convolutions


def test_the_published_lfm2_moe_has_8_billion_parameters() -> None:
    """The keys are those of LFM2-8B-A1B."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"vocab_size": 65536, "intermediate_size": 7168, "max_position_embeddings": 128000, "norm_eps": 1e-5}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2}
    experts |= {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    kinds = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
    raw = {"model_type": "lfm2_moe", "conv_bias": False, "conv_L_cache": 3, "layer_types": kinds, "rope_theta": 1000000.0}
    config = decoder_config(raw | sizes | experts)
    assert isinstance(config.transformers_config, PlainConfig), "transformers is not imported for it"
    assert config.caching_layers == (2, 6, 10, 14, 18, 21) and config.head_dimension == 64 and config.tied_embeddings
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == 8.3
    assert state_bytes(config, torch.bfloat16) == 18 * 4 * 2 * 2048
    assert not decoder_config(raw | sizes | experts | {"tie_embedding": False}).tied_embeddings


# Mamba-2, experts without a gate, and layers of a single block


def test_the_published_nemotron_3_nano_has_32_billion_parameters() -> None:
    """The keys are those of Nemotron-3-Nano-30B-A3B, whose layers are letters."""
    sizes = {"hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2}
    sizes |= {"head_dim": 128, "vocab_size": 131072, "intermediate_size": 1856, "max_position_embeddings": 262144}
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1}
    experts |= {"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    mamba |= {
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
    }
    rest = {
        "mlp_hidden_act": "relu2",
        "rope_theta": 10000,
        "partial_rotary_factor": 1.0,
        "norm_eps": 1e-5,
        "use_bias": False,
    }
    kinds = {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
    raw = {"model_type": "nemotron_h", "mlp_bias": False, "attention_bias": False} | sizes | experts | mamba | rest
    config = decoder_config(raw | kinds)
    assert config.caching_layers == (5, 12, 19, 26, 33, 42) and len(config.linear_layers) == len(config.moe_layers) == 23
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == 31.6
    assert state_bytes(config, torch.bfloat16) == 23 * 4 * (64 * 128 * 64 + 3 * 6144)
    with pytest.raises(CheckpointError, match="64 Mamba heads are not 5 groups"):
        decoder_config(raw | kinds | {"n_groups": 5})


def test_layers_without_experts_are_letters_and_a_list_in_a_dense_result(made_of: Any, tmp_path: Path) -> None:
    checkpoint = made_of("nemotron_h").checkpoint
    plan = concatenation_plan({layer: [(1, 0.75), (4, 0.5)] for layer in checkpoint.config.moe_layers})
    apply(plan, checkpoint, tmp_path)
    raw = Checkpoint(tmp_path).raw_config
    assert raw["hybrid_override_pattern"] == "M-*-M-" and "moe" not in raw["layers_block_type"]


# Latent attention under other names


def test_the_published_glm_4_7_flash_has_30_billion_parameters() -> None:
    """The keys are those of GLM-4.7-Flash, which has `first_k_dense_replace` in the place of `mlp_layer_types`."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20}
    sizes |= {"vocab_size": 154880, "intermediate_size": 10240, "max_position_embeddings": 202752}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1}
    experts |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"}
    latent = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    rotary = {"rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 1.0}
    raw = {"model_type": "glm4_moe_lite", "num_nextn_predict_layers": 1, "hidden_act": "silu", "attention_bias": False}
    raw |= sizes | experts | latent | rotary
    config = decoder_config(raw)
    assert isinstance(config.transformers_config, PlainConfig), "transformers is not imported for it"
    assert config.moe_layers == tuple(range(1, 47)) and config.cached == (1, 512, 64) and config.prediction_layers == 1
    assert round(sum(map(math.prod, expected_tensors(config).values())) / 1e9, 1) == 29.9
    kinds = ["sparse", "dense"] * 23 + ["sparse"]
    assert decoder_config(raw | {"mlp_layer_types": kinds}).moe_layers == tuple(range(0, 47, 2))
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        decoder_config(raw | {"mlp_layer_types": ["sparse"] * 46 + ["none"]})
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor=0\.5"):
        decoder_config(raw | {"partial_rotary_factor": 0.5})


# Layers for multi-token prediction


def with_prediction_layer(made: Made, path: Path, layer: int) -> Path:
    """Return a copy of the model with one more layer in its files."""
    shutil.copytree(made.path / "full", path)
    tensors = load_file(path / "model.safetensors")
    more = {f"model.layers.{layer}.{name}": torch.ones(32, 64) for name in ("eh_proj.weight", "mlp.gate_proj.weight")}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_not_read(family: str, made_of: Any, tmp_path: Path) -> None:
    made = made_of(family)
    path = with_prediction_layer(made, tmp_path / "more", 3)
    found = inspect(str(path), checksums=False, progress=lambda names, _: names)
    assert found["prediction_layers_not_read"] == 1 and found["valid"] and found["parameters"] == made.checkpoint.parameters
    assert torch.equal(own_logits(Checkpoint(path)), own_logits(made.checkpoint))
    for name, plan in (
        ("pruned", pruning_plan({layer: evenly(made.moe(layer)) for layer in made.layers})),
        ("dense", concatenation_plan({layer: [(0, 1.0), (SHARED_EXPERT, 1.0)] for layer in made.layers})),
    ):
        (tmp_path / name).mkdir()
        apply(plan, Checkpoint(path), tmp_path / name)
        assert Checkpoint(tmp_path / name).raw_config["num_nextn_predict_layers"] == (name == "pruned")
        names = load_file(tmp_path / name / "model.safetensors")
        assert sum("layers.3" in key for key in names) == 2 * (name == "pruned")
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.\S+ is not part of this"):
        Checkpoint(with_prediction_layer(made, tmp_path / "too many", 4))


PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "ernie4_5_moe": (
        {"use_rmsnorm": True, "moe_gate": "topk", "moe_use_aux_free": True, "moe_capacity": [6, 6, 6]}
        | {"num_nextn_predict_layers": 1, "is_quantized": False},
        "model.mtp_block.0.self_attn.q_proj.weight",
    ),
    "qwen3_next": (
        {"full_attention_interval": 4, "use_sliding_window": False, "rope_scaling": None, "rope_theta": 10000.0},
        "mtp.layers.0.mlp.shared_expert_gate.weight",
    ),
    "deepseek_v32": (
        {"ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}
        | {"topk_method": "noaux_tc", "rope_theta": 10000, "pretraining_tp": 1},
        "model.layers.3.eh_proj.weight",
    ),
    "glm4_moe_lite": (
        {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0},
        "model.layers.3.eh_proj.weight",
    ),
    "minimax_m2": (
        {"attn_type_list": [1, 1, 1], "scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_layer"}
        | {"shared_intermediate_size": 0, "rotary_dim": 8, "use_mtp": True, "num_mtp_modules": 1},
        "model.layers.3.eh_proj.weight",
    ),
}
"""Further keys in configs of published models, and a tensor of their layers for multi-token prediction."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_published_configs_say_besides(family: str, made_of: Any, tmp_path: Path) -> None:
    made, (keys, name) = made_of(family), PUBLISHED[family]
    shutil.copytree(made.path / "full", tmp_path / "full")
    raw = made.checkpoint.raw_config
    (tmp_path / "full" / "config.json").write_text(json.dumps(raw | keys))
    weights = tmp_path / "full" / "model.safetensors"
    save_file(load_file(weights) | {name: torch.ones(4, 4)}, weights, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path / "full")
    assert checkpoint.prediction_layers == 1
    assert worst(own_logits(checkpoint), made.logits) <= 1e-4
    for key, value in (
        ("moe_gate", "top2"),
        ("use_rmsnorm", False),
        ("scoring_func", "softmax"),
        ("attn_type_list", [1, 0]),
    ):
        if key in keys:
            (tmp_path / "full" / "config.json").write_text(json.dumps(raw | keys | {key: value}))
            with pytest.raises(UnsupportedError, match=key):
                Checkpoint(tmp_path / "full")


# 8-bit floating point


def stored_in_float8(tensors: dict[str, Tensor], block: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return projections in 8 bits with their scales, and their dequantized values, computed number by number."""
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj" not in name or not name.endswith(".weight"):
            continue
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
        scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) * 0.01 + 0.001
        wide = torch.tensor(
            [[float(scales[i // block[0], j // block[1]]) for j in range(weight.shape[1])] for i in range(weight.shape[0])]
        )
        stored[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = stored[name].float() * wide
    return stored, meant


@pytest.fixture(name="float8", scope="session")
def float8_model(made_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a model in blocks that do not divide the sizes, and the values of its weights."""
    path = tmp_path_factory.mktemp("float8")
    tensors = load_file(made_of("deepseek_v3").path / "full" / "model.safetensors")
    stored, meant = stored_in_float8(tensors, (12, 20))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made_of("deepseek_v3").path / "full" / "config.json").read_text())
    quantised = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [12, 20]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    return path, meant


def test_weights_in_float8_are_read_as_what_they_stand_for(float8: Any, made_of: Any, tmp_path: Path, matrix: Any) -> None:
    path, meant = float8
    checkpoint = Checkpoint(path)
    assert all(torch.equal(checkpoint.tensor(name), meant[name]) for name in checkpoint.shapes)
    assert checkpoint.bytes == sum(each.nbytes for each in load_file(path / "model.safetensors").values())
    shutil.copy(made_of("deepseek_v3").path / "full" / "config.json", tmp_path)
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(loaded(Checkpoint(tmp_path), plain=True))
    assert float((expected - made_of("deepseek_v3").logits).abs().max()) > 1e-2, "they are rounded"
    matrix("deepseek_v3", "float8", "as it is", worst(own_logits(checkpoint), expected))
    assert inspect(str(path), checksums=False, progress=lambda names, _: names)["float8_block"] == [12, 20]
    (tmp_path / "pruned").mkdir()
    apply(pruning_plan({1: [0, 1], 2: [3]}), checkpoint, tmp_path / "pruned")
    pruned = Checkpoint(tmp_path / "pruned")
    assert pruned.raw_config["quantization_config"] == checkpoint.raw_config["quantization_config"]
    assert (
        load_file(tmp_path / "pruned" / "model.safetensors")[f"{WEIGHT.replace('.3.', '.0.')}"].dtype == torch.float8_e4m3fn
    )
    assert torch.equal(pruned.tensor("model.layers.2.mlp.experts.0.up_proj.weight"), meant[WEIGHT])
    narrow = (narrowed_expert(3, [2, 15]), kept_expert(0))
    apply(Plan({1: narrow, 2: narrow}), checkpoint, tmp_path / "narrow")
    widened = Checkpoint(tmp_path / "narrow")
    assert "quantization_config" not in widened.raw_config and widened.dtype("lm_head.weight") == torch.float32
    units = widened.tensor("model.layers.2.mlp.experts.0.up_proj.weight")
    assert torch.equal(units, meant[WEIGHT][[2, 15]])


WEIGHT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "token"}, "activation_scheme='token'"),
        ({"weight_block_size": [128]}, "weight_block_size="),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    ],
)
def test_other_kinds_of_quantised_weights_are_refused_by_name(
    quantised: dict[str, Any], message: str, float8: Any, tmp_path: Path
) -> None:
    shutil.copytree(float8[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= quantised
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({f"{WEIGHT}_scale_inv": torch.ones(2, 2, dtype=torch.float64)}, UnsupportedError, "scales of torch.float64"),
        ({f"{WEIGHT}_scale_inv": torch.ones(2, 1)}, CheckpointError, r"scales of shape \[2, 1\]"),
        ({f"{WEIGHT}_scale_inv": None}, CheckpointError, f"{WEIGHT} is torch.float8_e4m3fn"),
        ({WEIGHT: torch.ones(16, 32)}, UnsupportedError, f"{WEIGHT}: is torch.float32 with scales"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    changed: dict[str, Tensor | None], error: type[Exception], message: str, float8: Any, tmp_path: Path
) -> None:
    shutil.copytree(float8[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors") | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=message):
        Checkpoint(tmp_path)
