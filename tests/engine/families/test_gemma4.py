"""Gemma 4: its parts against transformers and against formulas written out, its place in a model of images, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from artifacts_for_tests import CALIBRATION, make_workplace, run
from family_matrix import TOKENS, Made, decoder_of, full, worst
from test_families import pruned_like_its_language_model
from test_family_commands import refused
from tiny_families import by_name, save_tiny
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from calibrate.collect import collect
from compress.methods.gate_gradients import gate_gradients
from compress.training.losses import next_token_loss
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.model import embedded, positions_for
from engine.decoder.parameters import parameters_on_disk
from engine.decoder.routing import ScaledTopK, TopK
from engine.errors import CheckpointError, UnsupportedError
from engine.families.layer_config import LayerHeads
from engine.families.resolve import decoder_config
from engine.files.json_file import load_json
from engine.inspect import inspect
from engine.passes.layerwise import LayerwiseDecoder

TEXT = [*CALIBRATION, "--evaluation-samples", "2"]
LINEAR_ROTATION = {
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.fixture(name="made", scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("gemma4_text", tmp_path_factory.mktemp("gemma4"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_k_eq_v": False, "final_logit_softcapping": None, "attention_bias": True},
        {"per_layer_config": {}, "rope_parameters": LINEAR_ROTATION, "sliding_window": 3, "tie_word_embeddings": False},
    ],
    ids=["values of their own", "heads of one size"],
)
def test_what_configs_ask_for(changes: dict[str, Any], tmp_path: Path) -> None:
    assert full(Made("gemma4_text", tmp_path, changes)) <= 1e-4


def test_heads_and_caches_differ_between_layers(made: Made) -> None:
    """The bytes are counted by hand: layers with 1 head of 16 and layers with 2 heads of 8, keys and values."""
    config = made.checkpoint.config
    full_layer, sliding = LayerHeads(1, 16, shares_projection=True), LayerHeads(2, 8)
    assert [config.heads_of(layer) for layer in range(3)] == [full_layer, sliding, full_layer]
    assert config.rotary_kinds == {"full_attention": 16, "sliding_attention": 8}
    assert position_bytes(config, torch.bfloat16) == 2 * 2 * (16 + 16 + 16)
    assert position_bytes(config, torch.int8) == 2 * (16 + 4) + 2 * (16 + 2 * 4) + 2 * (16 + 4)
    assert KeyValueCache(config, 3, 5, torch.float32).bytes == 3 * 5 * position_bytes(config, torch.float32)


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_of_each_kind(made: Made, layer: int) -> None:
    """The expected outputs are transformers', for all positions at once and for the last ones after a cache."""
    decoder, reference = decoder_of(made.checkpoint, torch.float64), made.reference.double()
    x_BLD = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention, kind = decoder.layers[layer].attention, made.checkpoint.config.layers[layer].kind
    text, index = reference.model, torch.arange(16)[None]
    angles = text.rotary_emb(x_BLD, index, kind)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    allowed = (distance >= 0) & (distance < (7 if layer == 1 else 16))
    mask = torch.zeros(16, 16, dtype=torch.float64).masked_fill(~allowed, -torch.inf)[None, None]
    with torch.no_grad():
        expected, _ = text.layers[layer].self_attn(x_BLD, angles, mask, {})
        positions = positions_for(decoder.config, decoder.rotary, TOKENS, None, 0, torch.float64)
        assert worst(attention(x_BLD, positions), expected) < 1e-6  # transformers' angles are in float32
        cache, found = KeyValueCache(decoder.config, 2, 16, torch.float64), []
        for start, end in ((0, 9), (9, 12), (12, 13), (13, 16)):
            positions = positions_for(decoder.config, decoder.rotary, TOKENS[:, start:end], None, start, torch.float64)
            found.append(attention(x_BLD[:, start:end], positions, cache))
            cache.advance(end - start)
        assert worst(torch.cat(found, 1), expected) < 1e-6
    made.reference.float()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_each_part_of_a_block_reads_its_own_norm(made: Made) -> None:
    """Router, routed experts and the FFN beside them are written out for single tokens; the grouped path is compared too."""
    block = decoder_of(made.checkpoint, torch.float64).layers[1].feed_forward
    own = {name: made.checkpoint.tensor(f"model.layers.1.{name}").double() for name in NAMES}
    hidden_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_TD = rms(hidden_TD, own["post_attention_layernorm.weight"])

    def ffn(x: Tensor, parts: Any) -> Tensor:
        gate, up, down = (part.detach() for part in parts)
        return down @ (F.gelu(gate @ x, approximate="tanh") * (up @ x))

    expected = []
    for h, x in zip(hidden_TD, x_TD, strict=True):
        shares = (own["router.proj.weight"] @ (rms(h, own["router.scale"]) / math.sqrt(32))).softmax(-1)
        best = shares.topk(2)
        weights = best.values / best.values.sum() * own["router.per_expert_scale"][best.indices]
        routed = sum(w * ffn(x, block.experts[int(e)].projections) for w, e in zip(weights, best.indices, strict=True))
        shared = ffn(rms(h, own["shared_input_norm.weight"]), block.shared.projections)
        normed = rms(routed, own["routed_output_norm.weight"]), rms(shared, own["shared_output_norm.weight"])
        expected.append(normed[0] + normed[1])
    with torch.no_grad():
        assert worst(block(x_TD, hidden_TD=hidden_TD), torch.stack(expected)) < 1e-12
        parts = [block(x_TD[i : i + 3], hidden_TD=hidden_TD[i : i + 3]) for i in range(0, 9, 3)]
        assert worst(torch.cat(parts), torch.stack(expected)) < 1e-12


NAMES = (
    *("post_attention_layernorm.weight", "shared_input_norm.weight", "shared_output_norm.weight"),
    *("routed_output_norm.weight", "router.proj.weight", "router.scale", "router.per_expert_scale"),
)


def test_weights_are_sorted_after_they_were_multiplied() -> None:
    logits, factors = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1.0, 5.0, 7.0])
    plain, scaled = TopK(2, True)(logits), ScaledTopK(2, True, factors_N=factors)(logits)
    assert plain.experts.tolist() == [[0, 1]] and scaled.experts.tolist() == [[1, 0]]
    assert torch.allclose(scaled.weights, plain.weights.flip(1) * torch.tensor([5.0, 1.0]))


def test_losses_see_capped_logits(made: Made) -> None:
    decoder = decoder_of(made.checkpoint)
    hidden = decoder.hidden_states(TOKENS).detach().requires_grad_()
    logits = decoder.logits(hidden)
    assert float(logits.detach().abs().max()) <= 2.0 and worst(logits.detach(), made.logits) <= 1e-4
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    found = next_token_loss(hidden, decoder.head_VD, TOKENS, decoder.head_bias_V, decoder.logit_cap)
    gradients = [torch.autograd.grad(loss, hidden)[0] for loss in (expected, found)]
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6) and torch.allclose(
        *gradients, atol=1e-6
    )


def test_the_factor_of_embeddings_is_rounded_to_the_model_s_dtype(made: Made) -> None:
    config, table = made.checkpoint.config, torch.ones(3, 4, dtype=torch.bfloat16)
    assert embedded(config, torch.tensor([[1]]), table)[0, 0, 0] == torch.tensor(math.sqrt(32), dtype=torch.bfloat16)
    assert float(embedded(config, torch.tensor([[1]]), table.float())[0, 0, 0]) == pytest.approx(math.sqrt(32))


def test_the_language_model_within_a_model_of_images(made: Made, tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision |= {"intermediate_size": 32, "patch_size": 4, "position_embedding_size": 64}
    config = Gemma4Config(text_config=made.checkpoint.raw_config, vision_config=vision, audio_config=None)
    model: Any = Gemma4ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(made.reference.model.state_dict())
    whole = tmp_path / "whole"
    model.save_pretrained(whole)
    found = inspect(str(whole), checksums=False, progress=lambda names, _: names)
    assert found["parts_not_read"] == ["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"]
    assert (found["architecture"], found["parameters"]) == ("gemma4_text", made.checkpoint.parameters)
    pruned = pruned_like_its_language_model(made, whole)
    assert Checkpoint(pruned).raw_config["architectures"] == ["Gemma4ForCausalLM"]


def test_statistics_and_gradients_are_those_of_transformers_model(made: Made) -> None:
    """The reference reads the same weights through transformers' classes. Its router returns probabilities as logits."""
    adapted = AdaptedCheckpoint(made.checkpoint.directory)
    tokens = torch.randint(3, 96, (3, 14), generator=torch.Generator().manual_seed(2))
    own, theirs = (collect(each, tokens, dtype=torch.float32).layers for each in (made.checkpoint, adapted))
    for layer, statistics in own.items():
        expected = vars(theirs[layer])
        for name, found in vars(statistics).items():
            if isinstance(found, Tensor) and name != "router_gram":
                scale = float(expected[name].abs().max()) if expected[name].numel() else 0.0
                assert torch.allclose(found.double(), expected[name].double(), rtol=1e-4, atol=1e-4 * scale), name
    decoders = LayerwiseDecoder(made.checkpoint, torch.float32), AdaptedLayerwiseDecoder(adapted, torch.float32)
    found, expected = (gate_gradients(each, tokens, own_samples=False)[0] for each in decoders)
    assert all(torch.allclose(found[layer], expected[layer], rtol=1e-3, atol=1e-4) for layer in (0, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}, "hidden_size_per_layer_input=8"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"enable_moe_block": False}, "enable_moe_block=False"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "intermediate_size in per_layer_config"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "different heads in layers of one kind"),
        (
            {
                "rope_parameters": LINEAR_ROTATION
                | {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
            },
            r"rope_parameters\['full_attention'\]",
        ),
    ],
)
def test_what_is_refused_by_name(made: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        decoder_config(made.checkpoint.raw_config | changes)


def test_embeddings_of_each_layer_are_left_to_transformers(tmp_path: Path) -> None:
    save_tiny(by_name("gemma4"), tmp_path)
    raw = load_json(tmp_path / "config.json", "config")
    assert raw.get("text_config", raw)["hidden_size_per_layer_input"] > 0
    assert isinstance(open_mixture_checkpoint(tmp_path), AdaptedCheckpoint)


def test_wrong_heads_are_refused(made: Made) -> None:
    own = {"0": {"head_dim": 16, "num_key_value_heads": 3}, "2": {"head_dim": 16, "num_key_value_heads": 3}}
    with pytest.raises(CheckpointError, match="layer 0 has 4 heads of 16 dimensions and 3 key-value heads"):
        decoder_config(made.checkpoint.raw_config | {"per_layer_config": own})


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path, "gemma4_text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_no_result_can_be(place: Path) -> None:
    assert "norms of their own, which one FFN has not" in refused("densify", "model", *TEXT, "-o", "out")
    assert "which our graphs cannot have" in refused("export", "model", "--format", "onnx", "-o", "out")
    asked = ["--granularity", "unit", "--sparsity", "0.5", "--correct", *TEXT, "-o", "out"]
    assert "leave out --correct" in refused("prune", "model", *asked)


@pytest.mark.slow
def test_every_command(place: Path) -> None:
    assert run("inspect", "model")["experts_per_layer"] == [6, 6, 6]
    assert run("calibrate", "model", *CALIBRATION, "-o", "statistics")["tokens"] == 64
    third = ["--sparsity", "0.33", "--statistics", "statistics", *TEXT]
    for method, options in {
        "frequency": ["--uniform"],
        "fisher": ["--recover-steps", "1"],
        "naee": [],
        "diep": ["--epochs", "1", "--merge", "cka"],
    }.items():
        assert run("prune", "model", "--method", method, *third, *options, "-o", method)["experts_after"] == 12
        assert run("inspect", method, "--checksums")["valid"]
    units = ["--granularity", "unit", "--sparsity", "0.5", "--include", "shared", *TEXT]
    assert "drift_per_layer" not in run("prune", "model", *units, "-o", "units"), "nothing is corrected"
    assert run("merge", "model", "--experts", "4", *TEXT, "-o", "merged")["experts_per_layer"] == [4, 4, 4]
    rounding = ["--bits", "4", "--group-size", "8", "--activation-aware"]
    run("quantize", "model", *rounding, *TEXT, "-o", "rounded")
    assert Checkpoint(place / "rounded").schemes_used
    for name in ("model", "frequency", "fisher", "units", "merged", "rounded"):
        assert run("generate", name, "-p", "the quick", "-n", "4")["generated_tokens"] <= 4
        assert run("evaluate", name, *CALIBRATION)["value"] > 1.0
    assert len(run("bench", "model", "-p", "4", "-n", "2", "-r", "1")["rows"]) == 2
    assert run("generate", "fisher", "-p", "the", "-n", "4", "--skip-threshold", "1")["experts_skipped_share"] >= 0.0
    recipe = ["--recipe", "sar", *CALIBRATION, "--steps", "1", "--batch-size", "2"]
    assert run("distill", "--teacher", "model", "--student", "frequency", *recipe, "-o", "distilled")["steps"] == 1


def test_every_tensor_has_its_parameter(made: Made) -> None:
    """The number of each layer and the factors of experts are not trained."""
    found = parameters_on_disk(decoder_of(made.checkpoint))
    constant = ("layer_scalar", "per_expert_scale")
    expected = {name: shape for name, shape in made.checkpoint.shapes.items() if not name.endswith(constant)}
    assert {name: tuple(each.shape) for name, each in found.items()} == expected
