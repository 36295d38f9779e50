"""Tensors that conversion to GGUF moves or changes: the gated delta rule, zero-centered norms, and GLM-4.7-Flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from family_matrix import own_logits
from gguf_for_tests import Tensors, q8_0, write_gguf
from gguf_models_for_tests import DELTA_SIZES, gguf_metadata, gguf_tensors, save_gguf

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.plans.gguf_plan import planned_file, write_planned
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.writer import column_weights, pieces
from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.families.gguf.description import described
from engine.families.gguf.forms import Form, HeadsInTurns, PartByPart, Rate
from engine.files.gguf_file import GgufFile
from engine.kernels.stored.block_weight import BlockWeight

FAMILIES = ("qwen3_next", "qwen3_5_moe_text")
ALIGNED: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}
"""Sizes that blocks divide."""
KEPT = ("_norm", "_inp", "bias", "ssm_conv1d", "ssm_a", "ssm_b")
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
LATENT |= {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}


def make(tmp_path: Path, family: str, **sizes: Any) -> Checkpoint:
    if sizes.get("num_hidden_layers") == 2:
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    save_reference(family, tmp_path / "model", **DELTA_SIZES.get(family, {}) | sizes)
    return Checkpoint(tmp_path / "model")


def in_blocks(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {name: one if any(map(name.__contains__, KEPT)) else q8_0(one) for name, one in tensors.items()}


@pytest.mark.parametrize(
    "form",
    [
        Form(rows=HeadsInTurns(3, 2, 3, 4)),
        Form(columns=HeadsInTurns(0, 2, 2, 3)),
        Form(rows=PartByPart(3, (2, 2, 1, 4)), parts=(15, 12)),
        Form(values=Rate()),
    ],
)
def test_a_form_is_undone(form: Form) -> None:
    own = torch.randn(27, 1, 12, generator=torch.Generator().manual_seed(0))
    stored = form.stored(own)
    assert [tuple(each.shape) for each in stored] == form.shapes((27, 1, 12))
    assert (form.own(*stored).view_as(own) - own).abs().max() <= (1e-6 if form.values else 0)
    assert form.by_column(torch.arange(12)).tolist() == ([*form.columns.stored()] if form.columns else [*range(12)])


def test_heads_and_parts_are_in_the_order_of_files() -> None:
    """Two key heads with three heads each, and two groups with one row of a, two of b."""
    assert [*HeadsInTurns(1, 2, 3, 1).stored()] == [0, 1, 4, 2, 5, 3, 6]
    assert [*HeadsInTurns(0, 2, 2, 2).stored()] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert [*PartByPart(2, (1, 2)).stored()] == [0, 3, 1, 2, 4, 5]


def test_rates_give_numbers_in_bfloat16_back() -> None:
    own = torch.cat([torch.linspace(-8, 3, 1000).bfloat16().float(), torch.tensor([0.0])])
    assert torch.equal(Rate().own(Rate().stored(own)), own)


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_rows_and_columns_stay_in_blocks(family: str, tmp_path: Path) -> None:
    own = make(tmp_path, family, **ALIGNED)
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), in_blocks(gguf_tensors(own))))
    weights = read.weights(torch.bfloat16, block_types=frozenset(["Q8_0"]))
    names = [name for name in read.shapes if "linear_attn" in name and len(read.shapes[name]) == 2]
    in_blocks_now = [name for name in names if isinstance(weights(name), BlockWeight)]
    assert {name.rpartition("attn.")[2] for name in in_blocks_now} == (
        {"in_proj_qkvz.weight", "out_proj.weight"}
        if family == "qwen3_next"
        else {"in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"}
    )
    for name in in_blocks_now:
        weight = weights(name)
        assert isinstance(weight, BlockWeight)
        assert torch.equal(weight.dequantised(torch.float32), read.tensor(name, torch.float32))
        assert (read.tensor(name, torch.float32) - own.tensor(name)).abs().max() <= own.tensor(name).abs().max() / 120


def test_columns_of_half_a_block_are_dequantized(tmp_path: Path) -> None:
    own = make(tmp_path, "qwen3_5_moe_text", **ALIGNED | {"linear_key_head_dim": 16, "linear_value_head_dim": 16})
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), in_blocks(gguf_tensors(own))))
    name = "model.layers.0.linear_attn.out_proj.weight"
    weight = read.weights(torch.bfloat16, block_types=frozenset(["Q8_0"]))(name)
    assert not isinstance(weight, BlockWeight)
    assert torch.equal(torch.as_tensor(weight), read.tensor(name, torch.bfloat16))


def test_parts_of_two_types_are_read(tmp_path: Path) -> None:
    own = make(tmp_path, "qwen3_next", **ALIGNED)
    tensors: dict[str, Any] = gguf_tensors(own)
    tensors["blk.0.attn_gate.weight"] = q8_0(tensors["blk.0.attn_gate.weight"])
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors))
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    whole, by_head = read.tensor(name), own.tensor(name).view(2, -1, 64)
    assert torch.equal(whole.view(2, -1, 64)[:, :128], by_head[:, :128]) and not torch.equal(whole, own.tensor(name))
    assert not isinstance(read.weights(torch.bfloat16, block_types=frozenset(["Q8_0"]))(name), BlockWeight)


def test_earlier_files_with_projections_together_are_read(tmp_path: Path) -> None:
    own = make(tmp_path, "qwen3_next")
    tensors = {name: one for name, one in gguf_tensors(own).items() if "attn_qkv." not in name and "attn_gate." not in name}
    tensors |= {
        f"blk.{layer}.ssm_in.weight": own.tensor(f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight") for layer in (0, 2)
    }
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors))
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    assert torch.equal(read.tensor(name), own.tensor(name))


def test_layers_for_prediction_are_left_out(tmp_path: Path) -> None:
    """Newer conversions of Qwen3.5 have such a layer after the others, and count it."""
    own = make(tmp_path, "qwen3_5_moe_text")
    tensors, further = gguf_tensors(own), ("attn_q.weight", "nextn.eh_proj.weight", "ffn_up_exps.weight")
    plain = Checkpoint(write_gguf(tmp_path / "plain.gguf", gguf_metadata(own), tensors))
    more = tensors | {f"blk.3.{name}": torch.zeros(4, 4) for name in further}
    said = gguf_metadata(own, block_count=4, nextn_predict_layers=1)
    read = Checkpoint(write_gguf(tmp_path / "more.gguf", said, more))
    assert read.prediction_layers == 1 and torch.equal(own_logits(read), own_logits(plain))


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({}, "glm4_moe_lite"),
        ({"moe_compress.model_type": None, "tokenizer.ggml.pre": "glm4"}, "glm4_moe_lite"),
        ({"moe_compress.model_type": None}, "deepseek_v3"),
    ],
)
def test_glm_is_told_from_deepseek(metadata: dict[str, Any], family: str, tmp_path: Path) -> None:
    """Both have the same layers, and compute the same."""
    own = make(tmp_path, "glm4_moe_lite")
    said = {key: value for key, value in (gguf_metadata(own) | metadata).items() if value is not None}
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", said, gguf_tensors(own)))
    assert read.config.architecture.model_type == family and torch.equal(own_logits(read), own_logits(own))


LARGE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    **{"vocab_size": 32, "num_hidden_layers": 2, "num_experts": 3, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "linear_num_key_heads": 2,
}


@pytest.mark.parametrize(
    ("family", "type_"),
    [
        ("qwen3_next", "q4_k_s"),
        pytest.param("qwen3_next", "q8_0", marks=pytest.mark.slow),
        *(pytest.param("qwen3_5_moe_text", each, marks=pytest.mark.slow) for each in ("q8_0", "q4_k_s")),
    ],
)
def test_low_bit_files_are_read_as_written(family: str, type_: str, tmp_path: Path) -> None:
    """The logits are compared when a file is written. Small matrices stay in float32, whatever the type is."""
    own = make(tmp_path, family, **LARGE)
    figures = export_gguf(GgufExportOptions(model=str(tmp_path / "model"), output=tmp_path / "m.gguf", type=type_))
    assert figures["max_abs_logit_difference"] <= 1e-4
    tensors = GgufFile(tmp_path / "m.gguf").tensors
    kinds = {name: tensor.type.name for name, tensor in tensors.items()}
    assert {kinds[name] for name in kinds if any(map(name.__contains__, KEPT))} == {"F32"}
    assert kinds["blk.0.attn_qkv.weight"] == {"q8_0": "Q8_0", "q4_k_s": "Q5_K"}[type_]  # as values of attention
    assert kinds["blk.0.attn_gate.weight"] == kinds["blk.0.ssm_out.weight"] == {"q8_0": "Q8_0", "q4_k_s": "Q4_K"}[type_]
    read = Checkpoint(tmp_path / "m.gguf")
    for name in own.shapes:
        off, whole = read.tensor(name, torch.float32) - own.tensor(name), own.tensor(name)
        assert float(off.square().mean()) <= 0.01 * float(whole.square().mean()) + 1e-12


@pytest.mark.parametrize("family", [*FAMILIES, "glm4_moe_lite"])
def test_kept_experts_keep_their_blocks_bit_for_bit(family: str, tmp_path: Path) -> None:
    sizes = ALIGNED if family in FAMILIES else LATENT
    own = make(tmp_path, family, **sizes)
    source = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), in_blocks(gguf_tensors(own))))
    kept = list(range(0, source.config.experts_per_layer[0], 2))
    planned = planned_file(pruning_plan(dict.fromkeys(source.config.moe_layers, kept)), source)
    result = write_planned(planned, source, tmp_path / "out.gguf")
    files = GgufFile(source.directory), GgufFile(result.directory)
    assert files[0].entries.keys() == files[1].entries.keys()
    for name in files[0].entries:
        whole, divided = files[0].tensor(name), any(part in name for part in ("_exps.", "gate_inp.", "exp_probs_b"))
        assert torch.equal(files[1].tensor(name), whole[kept] if divided else whole), name


def test_weights_of_inputs_are_in_the_order_of_columns(tmp_path: Path) -> None:
    """A file that is rounded by weights is as if model and weights had the file's order from the start."""
    own = make(tmp_path, "qwen3_5_moe_text", **LARGE)
    name, seen = "model.layers.0.linear_attn.out_proj.weight", torch.arange(256.0)
    stored = next(tensor for tensor in described(own.config).tensors if tensor.sources == (name,))
    columns = next(pieces(own, stored))[0]
    (weights,) = column_weights(stored, {name: seen})
    assert weights is not None and torch.equal(own.tensor(name)[0][weights.long()], columns)
    assert not torch.equal(weights, seen)


REFUSED: list[tuple[str, dict[str, Any], type[CompressError], str]] = [
    ("qwen3_next", {"ssm.inner_size": 48}, UnsupportedError, "ssm.inner_size is 48"),
    ("qwen3_next", {"ssm.inner_size": None}, CheckpointError, "ssm.inner_size is missing"),
    ("qwen3_next", {"ssm.state_size": 4, "ssm.inner_size": 16}, CheckpointError, "shape"),
    ("qwen3_next", {"ssm.group_count": 3}, CheckpointError, "cannot share 3 linear key heads"),
    ("qwen3_next", {"ssm.conv_kernel": "four"}, CheckpointError, "number of things"),
    ("qwen3_next", {"full_attention_interval": 0}, CheckpointError, "full_attention_interval is 0"),
    ("qwen3_next", {"full_attention_interval": 3}, CheckpointError, "missing"),
    ("qwen3_next", {"expert_weights_norm": False}, UnsupportedError, "expert_weights_norm"),
    ("qwen3_next", {"expert_gating_func": 2}, UnsupportedError, "gating"),
    ("qwen3_next", {"attention.recurrent_layers": [True]}, UnsupportedError, "recurrent_layers"),
    ("qwen3_5_moe_text", {"rope.dimension_sections": None}, CheckpointError, "dimension_sections is"),
    ("qwen3_5_moe_text", {"rope.dimension_sections": 4}, CheckpointError, "list of numbers of things"),
    ("qwen3_5_moe_text", {"rope.dimension_sections": [2, 1]}, UnsupportedError, r"sections is \[2, 1\]; only three"),
    ("qwen3_5_moe_text", {"rope.dimension_sections": [2, 1, 1, 1]}, UnsupportedError, "only three numbers of pairs"),
    ("qwen3_5_moe_text", {"rope.dimension_sections": [2, 0, 1, 0]}, UnsupportedError, "out some of 4 rotated pairs"),
    ("glm4_moe_lite", {"leading_dense_block_count": 0}, CheckpointError, "is missing"),
    ("glm4_moe_lite", {"expert_gating_func": 1}, UnsupportedError, "gating"),
]


@pytest.mark.parametrize(("family", "changes", "error", "says"), REFUSED, ids=[str(row[1])[1:40] for row in REFUSED])
def test_metadata_that_cannot_be_honored_is_refused(
    family: str, changes: dict[str, Any], error: type[CompressError], says: str, tmp_path: Path
) -> None:
    path = save_gguf(make(tmp_path, family), tmp_path / "m.gguf", **changes)
    with pytest.raises(error, match=says) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_part_of_another_shape_is_named(tmp_path: Path) -> None:
    own = make(tmp_path, "qwen3_next")
    tensors = gguf_tensors(own) | {"blk.0.attn_gate.weight": torch.zeros(8, 32)}
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_qkv\.weight goes with blk\.0\.attn_gate\.weight, which has shape"
    ):
        Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors))


UNSAID: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"linear_value_head_dim": 12}, "8 dimensions of keys and 12 of values"),
    ("qwen3_next", {"mlp_only_layers": [2]}, r"its layers\[2\]\.moe;"),
    ("qwen3_next", {"norm_topk_prob": False}, "normalise_top_k"),
    ("qwen3_next", {"attention_bias": True}, "its qkv_bias;"),
    ("qwen3_next", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, r"its layers\[1\]\.linear;"),
    ("qwen3_5_moe_text", {"rope_parameters": {"mrope_section": [2, 0, 1]}}, "leaves out some of 4 rotated pairs"),
    *(
        ("qwen3_5_moe_text", {"rope_parameters": {"mrope_section": wrong}}, "its mrope_section is .*; only three numbers")
        for wrong in ([11], [2, 1, 1, 0], [2, -1, 1], [2, 1.0, 1], None)
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, r"its layers\[1\]\.moe;"),
]


@pytest.mark.parametrize(("family", "sizes", "says"), UNSAID, ids=[str(row[1])[1:40] for row in UNSAID])
def test_what_files_cannot_say_is_refused(family: str, sizes: dict[str, Any], says: str, tmp_path: Path) -> None:
    if "rope_parameters" in sizes:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True}
        sizes = {"rope_parameters": rope | sizes["rope_parameters"]}
    with pytest.raises(UnsupportedError, match=says):
        described(make(tmp_path, family, **sizes).config)
