"""Families in GGUF files whose layers differ in sizes, whose tensors conversion reshapes, or that have indexers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import others_slow, save_reference
from family_matrix import own_logits
from gguf_for_tests import write_gguf
from gguf_hybrids_for_tests import HYBRID_ARCHITECTURES, HYBRID_SIZES
from gguf_models_for_tests import gguf_metadata, gguf_tensors, save_gguf

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.plans.gguf_plan import planned_file, write_planned
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.families.gguf.description import described
from engine.families.gguf.forms import Form, Rate
from engine.files.gguf_file import GgufFile

LFM2, GEMMA, NEMOTRON, GLM5 = "lfm2_moe", "gemma4_text", "nemotron_h", "glm_moe_dsa"
ALIGNED: dict[str, dict[str, Any]] = {
    LFM2: {"moe_intermediate_size": 32},
    GEMMA: {"moe_intermediate_size": 32, "head_dim": 16, "global_head_dim": 32},
    NEMOTRON: {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "mamba_head_dim": 16},
}
"""Sizes that blocks of 32 numbers divide."""
IN_FLOAT32 = (
    "norm",
    "_inp",
    "bias",
    "ssm_conv1d",
    "shortconv.conv",
    "ssm_a",
    "ssm_d",
    ".scale",
    "output_scale",
    "rope_freqs",
)


def make(tmp_path: Path, family: str, **sizes: Any) -> Checkpoint:
    save_reference(family, tmp_path / "model", **HYBRID_SIZES.get(family, {}) | sizes)
    return Checkpoint(tmp_path / "model")


def exported(tmp_path: Path, family: str, type_: str) -> Checkpoint:
    make(tmp_path, family, hidden_size=64, intermediate_size=64, **ALIGNED[family])
    export_gguf(GgufExportOptions(model=str(tmp_path / "model"), output=tmp_path / "m.gguf", type=type_))
    return Checkpoint(tmp_path / "m.gguf")


def test_a_list_in_rows_is_undone() -> None:
    own = torch.randn(12, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for form in (Form(row=1), Form(row=4), Form(row=1, values=Rate())):
        (stored,) = form.stored(own)
        assert [tuple(stored.shape)] == form.shapes((12,)) == [(12 // form.row, form.row)]
        assert torch.equal(form.own(stored), own)


@pytest.mark.parametrize("type_", ["q8_0", pytest.param("q4_k", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", others_slow(ALIGNED, NEMOTRON))
def test_small_tensors_stay_in_float32(family: str, type_: str, tmp_path: Path) -> None:
    """Matrices are in blocks; the logits are compared when the file is written."""
    file = GgufFile(exported(tmp_path, family, type_).directory)
    for name, tensor in file.tensors.items():
        is_kept = any(part in name for part in IN_FLOAT32)
        assert (tensor.type.name == "F32") == is_kept, name


@pytest.mark.parametrize("family", others_slow(ALIGNED, GEMMA))
def test_kept_experts_keep_their_blocks_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = exported(tmp_path, family, "q8_0")
    kept = [expert for expert in range(source.config.experts_per_layer[0]) if expert % 3 != 1]
    plan = pruning_plan(dict.fromkeys(source.config.moe_layers, kept))
    result = write_planned(planned_file(plan, source), source, tmp_path / "out.gguf")
    before, after = GgufFile(source.directory), GgufFile(result.directory)
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        whole, is_divided = before.tensor(name), "_exps." in name or "_probs" in name or name.endswith("_inp.weight")
        assert torch.equal(after.tensor(name), whole[kept] if is_divided else whole), name
    assert result.config.experts_per_layer == (len(kept),) * len(source.config.moe_layers)


def test_models_in_bfloat16_get_their_own_rates_back(tmp_path: Path) -> None:
    """Files have rates -exp(A) in float32. Of a model in float32 they are its own to rounding."""
    own = make(tmp_path, NEMOTRON)
    read = Checkpoint(save_gguf(own, tmp_path / "m.gguf"))
    assert float((own_logits(read) - own_logits(own)).abs().max()) <= 1e-5


def test_the_head_may_have_a_matrix_of_its_own(tmp_path: Path) -> None:
    own = make(tmp_path, LFM2, tie_word_embeddings=False)
    read = Checkpoint(save_gguf(own, tmp_path / "m.gguf"))
    assert not read.config.tied_embeddings and torch.equal(own_logits(read), own_logits(own))


def test_keys_that_say_nothing_about_nemotron_are_accepted(tmp_path: Path) -> None:
    own = make(tmp_path, NEMOTRON)
    further = {"rope.dimension_count": 8, "rope.freq_base": 1e4, "rope.scaling.finetuned": False}
    plain, read = (
        Checkpoint(save_gguf(own, tmp_path / f"{number}.gguf", **each))
        for number, each in enumerate(({"attention.layer_norm_epsilon": None}, further))
    )
    assert torch.equal(own_logits(read), own_logits(plain))


def test_values_of_full_attention_may_have_a_projection(tmp_path: Path) -> None:
    own = make(tmp_path, GEMMA, attention_k_eq_v=False, num_global_key_value_heads=None)
    read = Checkpoint(save_gguf(own, tmp_path / "m.gguf"))
    assert torch.equal(own_logits(read), own_logits(own))


def test_stacks_of_gate_and_up_together_are_read(tmp_path: Path) -> None:
    """Conversion of Gemma 4 leaves them together; here they are written apart, which llama.cpp reads too."""
    own = make(tmp_path, GEMMA)
    tensors = gguf_tensors(own)
    for layer in own.config.moe_layers:
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat([gate, up], 1)
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors))
    assert torch.equal(own_logits(read), own_logits(own))


@pytest.mark.parametrize("has_entries", [False, True])
@pytest.mark.parametrize("family", [LFM2, GEMMA, GLM5])
def test_lists_may_have_entries_for_layers_for_prediction(
    family: str, has_entries: bool, models: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """GLM-5's list of indexers has none for them, and lists of heads have. Pruned files lack these layers."""
    own, said = models[family], gguf_metadata(models[family])
    lists = {key: value for key, value in said.items() if isinstance(value, list)}
    layers, name = len(own.config.layers), HYBRID_ARCHITECTURES[family]
    said |= {f"{name}.block_count": layers + 1, f"{name}.nextn_predict_layers": 1}
    said |= {key: [*value, value[-1]] for key, value in lists.items() if has_entries}
    tensors = gguf_tensors(own) | {f"blk.{layers}.nextn.eh_proj.weight": torch.zeros(4, 4)}
    read = Checkpoint(write_gguf(tmp_path / "m.gguf", said, tensors))
    assert read.prediction_layers == 1 and torch.equal(own_logits(read), own_logits(own))
    plan = pruning_plan(dict.fromkeys(read.config.moe_layers, range(0, read.config.experts_per_layer[0], 2)))
    result = write_planned(planned_file(plan, read), read, tmp_path / "out.gguf")
    assert result.gguf is not None and lists and {key: result.gguf.metadata[key] for key in lists} == lists


REFUSED: list[tuple[str, dict[str, Any], type[CompressError], str]] = [
    (LFM2, {"attention.head_count_kv": [0, 2]}, CheckpointError, "head_count_kv has 2 numbers, and the model has 3 layers"),
    (LFM2, {"attention.head_count_kv": [0, 0, 0]}, CheckpointError, "is 0 in every layer"),
    (LFM2, {"attention.head_count_kv": [2, 4, 2]}, UnsupportedError, r"differs by layer \(2, 4\)"),
    (LFM2, {"attention.head_count_kv": [0, 2, 2]}, CheckpointError, "missing"),
    (LFM2, {"shortconv.l_cache": None}, CheckpointError, "shortconv.l_cache is missing"),
    (LFM2, {"shortconv.l_cache": 4}, CheckpointError, "shape"),
    (LFM2, {"expert_gating_func": 1}, UnsupportedError, "gating"),
    (LFM2, {"expert_weights_scale": 2.0}, UnsupportedError, "expert_weights_scale"),
    (LFM2, {"attention.sliding_window": 8}, UnsupportedError, "sliding_window"),
    (NEMOTRON, {"ssm.inner_size": 50}, CheckpointError, "ssm.inner_size is 50, which 4 heads cannot share"),
    (NEMOTRON, {"ssm.time_step_rank": 0}, CheckpointError, "0 heads cannot share"),
    (NEMOTRON, {"ssm.state_size": None}, CheckpointError, "ssm.state_size is missing"),
    (NEMOTRON, {"ssm.group_count": 3}, CheckpointError, "3 groups"),
    (NEMOTRON, {"feed_forward_length": [0, 16, 16, 0, 16]}, CheckpointError, "layer 2 has both"),
    (
        NEMOTRON,
        {"feed_forward_length": [0, 24, 0, 0, 24]},
        UnsupportedError,
        "feed_forward_length is 24, and experts have 16",
    ),
    (NEMOTRON, {"feed_forward_length": 16}, CheckpointError, "has both"),
    (NEMOTRON, {"moe_latent_size": 8}, UnsupportedError, "moe_latent_size"),
    (NEMOTRON, {"expert_shared_count": 2}, UnsupportedError, "expert_shared_count"),
    (GEMMA, {"expert_count": None}, UnsupportedError, "without experts"),
    (GEMMA, {"attention.shared_kv_layers": 1}, UnsupportedError, "shared_kv_layers"),
    (GEMMA, {"embedding_length_per_layer_input": 8}, UnsupportedError, "embedding_length_per_layer_input"),
    (GEMMA, {"attention.sliding_window_pattern": [True, False]}, CheckpointError, "a flag for each layer"),
    (GEMMA, {"attention.sliding_window_pattern": 2}, CheckpointError, "a flag for each layer"),
    (GEMMA, {"attention.head_count_kv": [1, 2, 2]}, UnsupportedError, "in layers of one kind"),
    (GEMMA, {"attention.key_length": 32}, UnsupportedError, "value_length"),
    (GEMMA, {"rope.dimension_count_swa": 4}, UnsupportedError, "dimension_count_swa"),
    (GEMMA, {"rope.freq_base_swa": None}, CheckpointError, "freq_base_swa is missing"),
    (GEMMA, {"nextn_predict_layers": 1}, CheckpointError, "attn_q.weight has shape"),
    (GLM5, {"attention.indexer.head_count": None}, CheckpointError, "indexer.head_count is missing"),
    (GLM5, {"attention.indexer.key_length": 16}, CheckpointError, "shape"),
    (GLM5, {"attention.indexer.types": [True, False]}, CheckpointError, "a flag for each layer"),
    (GLM5, {"attention.indexer.types": [False, True, True]}, CheckpointError, "'shared' for layer 0"),
    (GLM5, {"attention.indexer.types": [True, True, True]}, CheckpointError, "missing"),
]


@pytest.mark.parametrize(("family", "changes", "error", "says"), REFUSED, ids=[str(row[1])[1:40] for row in REFUSED])
def test_metadata_that_cannot_be_honored_is_refused(
    family: str,
    changes: dict[str, Any],
    error: type[CompressError],
    says: str,
    models: dict[str, Checkpoint],
    tmp_path: Path,
) -> None:
    path = save_gguf(models[family], tmp_path / "m.gguf", **changes)
    with pytest.raises(error, match=says) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {family: make(tmp_path_factory.mktemp(family), family) for family in (*ALIGNED, GLM5)}


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        (None, "rope_freqs.weight is missing"),
        (torch.ones(4), "rope_freqs.weight is missing, or has not one number for each pair of 16"),
        (torch.full((8,), 2.0), "has 2.0; numbers but 1 and 1e30"),
        (torch.tensor([1.0, 1e30, *[torch.nan] * 6]), "has nan; numbers but 1 and 1e30"),
        (torch.ones(8).half(), "is F16, and is read in F32 only"),
    ],
)
def test_other_factors_of_frequencies_are_refused(
    factors: torch.Tensor | None, says: str, models: dict[str, Checkpoint], tmp_path: Path
) -> None:
    own = models[GEMMA]
    tensors = {name: tensor for name, tensor in gguf_tensors(own).items() if name != "rope_freqs.weight"}
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    with pytest.raises(CompressError, match=says):
        Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own), tensors))


UNSAID: list[tuple[str, dict[str, Any], str]] = [
    (LFM2, {"routed_scaling_factor": 1.7}, "layers.*weight_scale"),
    (LFM2, {"norm_topk_prob": False}, "layers.*normalise_top_k"),
    (NEMOTRON, {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}, "layer 3 is an FFN"),
    (NEMOTRON, {"time_step_min": 0.01}, "layers.*least_step"),
]


@pytest.mark.parametrize(("family", "sizes", "says"), UNSAID, ids=[str(row[1])[1:40] for row in UNSAID])
def test_what_files_cannot_say_is_refused(family: str, sizes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=says):
        described(make(tmp_path, family, **sizes).config)


def test_names_are_those_of_the_package(tmp_path: Path) -> None:
    """Every tensor that is written is one of its architecture in the package gguf, or has a name of llama.cpp's own."""
    for family, architecture in ((LFM2, "LFM2MOE"), (GEMMA, "GEMMA4"), (NEMOTRON, "NEMOTRON_H_MOE"), (GLM5, "GLM_DSA")):
        known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[architecture]]}
        known |= {gguf.TENSOR_NAMES[each] for each in (gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP)}
        config = make(tmp_path / family, family).config
        for tensor in described(config).tensors:
            parts = tensor.name.split(".")
            name = tensor.name.replace(f"blk.{parts[1]}.", "blk.{bid}.") if parts[0] == "blk" else tensor.name
            stem = name if name.endswith(("ssm_a", "ssm_d")) else name.rpartition(".")[0]
            assert stem in known, tensor.name
