"""Plans on GGUF files: blocks of what stays are the source's, and the result computes what the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import save_reference
from family_matrix import TOKENS, decoder_of, own_logits, worst
from gguf_for_tests import write_gguf
from gguf_models_for_tests import ARCHITECTURES, FURTHER_SIZES, gguf_metadata, gguf_tensors
from torch import Tensor

from compress.plans.apply import planned_decoder
from compress.plans.gguf_plan import planned_file, write_planned
from compress.plans.plan import Part, Plan, PlannedExpert, Source, narrowed_expert, pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.writer import encoded
from engine.decoder.routing import Masked
from engine.errors import OutputError, UnsupportedError
from engine.files import gguf_file_writer
from engine.files.gguf_file import GgufFile
from engine.files.gguf_types import BLOCK_TYPES

SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "olmoe": {"num_key_value_heads": 4},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    **FURTHER_SIZES,
}
ALIGNED = {"hidden_size": 64, "intermediate_size": 128}
KEPT = (0, 2, 3, 5)
ONE_WIDTH = {"llama4_text"}
"""Families whose GGUF files say one width for the experts and the shared expert."""
UNROUNDED = ("_norm", "_inp", "bias", "sinks")
METADATA = {"general.note": "kept as it is", "general.tags": ["a", "b"], "some.number": (10, 2**40)}


def make(tmp_path: Path, family: str = "mixtral", type_: str | None = None, **sizes: Any) -> Checkpoint:
    """Return a tiny model as a GGUF file with its tensors in float32, or its matrices in a quantized type."""
    save_reference(family, tmp_path / "model", **SIZES.get(family, {}) | sizes)
    own = Checkpoint(tmp_path / "model")
    tensors = gguf_tensors(own)
    if type_ is not None:
        tensors = {
            name: one if any(map(name.__contains__, UNROUNDED)) else blocks(one, type_) for name, one in tensors.items()
        }
    return Checkpoint(write_gguf(tmp_path / "m.gguf", gguf_metadata(own) | METADATA, tensors))


def blocks(tensor: Tensor, type_: str) -> Any:
    kind = gguf.GGMLQuantizationType[type_]
    return int(kind), tuple(tensor.shape), encoded(tensor.float(), BLOCK_TYPES[int(kind)], "").tobytes()


def written(plan: Plan, source: Checkpoint, made: Mapping[str, Tensor] | None = None) -> Checkpoint:
    return write_planned(planned_file(plan, source, made), source, source.directory.with_name("out.gguf"))


def kept_experts(source: Checkpoint, kept: Sequence[int] = KEPT) -> Plan:
    return pruning_plan(dict.fromkeys(source.config.experts_by_layer, kept))


def kept_units(source: Checkpoint, units: Sequence[int]) -> Plan:
    counts = source.config.experts_by_layer
    return Plan({layer: tuple(narrowed_expert(expert, units) for expert in range(count)) for layer, count in counts.items()})


def stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a stored tensor; a quantized one as rows of bytes."""
    return GgufFile(checkpoint.directory).tensor(name)


def all_or_fast(families: Sequence[str], fast: Sequence[str]) -> list[Any]:
    return [family if family in fast else pytest.param(family, marks=pytest.mark.slow) for family in families]


MIXTURES = [
    family for family in ARCHITECTURES if family not in ("llama", "mistral", "granite", "ernie4_5", "qwen2", "qwen3")
]


@pytest.mark.parametrize("family", all_or_fast(MIXTURES, ["gpt_oss", "qwen3_next"]))
def test_results_of_every_family_compute_what_the_plan_says(family: str, tmp_path: Path) -> None:
    source = make(tmp_path, family)
    count = max(source.config.experts_per_layer)
    has_groups = any(layer.moe is not None and layer.moe.groups for layer in source.config.layers)
    narrower = kept_units(source, range(0, source.config.widest_ffn(), 2))
    plans = [kept_experts(source, range(count) if has_groups else KEPT), narrower]
    if family in ONE_WIDTH:
        with pytest.raises(UnsupportedError, match=r"layers\[1\].moe.expert_width; write the model as safetensors"):
            planned_file(plans.pop(), source)
    for plan in plans:
        expected = planned_decoder(plan, source, torch.float32)(TOKENS)
        assert torch.equal(own_logits(written(plan, source)), expected)


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0"])
def test_kept_experts_keep_their_blocks_bit_for_bit(type_: str, tmp_path: Path) -> None:
    source = make(tmp_path, type_=type_, **ALIGNED)
    plan = kept_experts(source)
    result = written(plan, source)
    assert source.gguf is not None and result.gguf is not None
    for name in source.gguf.by_name:
        whole, found = stored(source, name), stored(result, name)
        divided = "_exps." in name or "_inp." in name
        assert torch.equal(found, whole[list(KEPT)] if divided else whole), name
        kinds = [checkpoint.gguf.by_name[name].tensors[name].type for checkpoint in (source, result) if checkpoint.gguf]
        assert kinds[0] == kinds[1]


def test_the_logits_are_those_of_the_model_with_masked_experts(tmp_path: Path) -> None:
    """A mask of minus infinity on the router's logits of the other experts gives the same choice and weights."""
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    result = written(kept_experts(source), source)
    masked, kept_N = decoder_of(source), torch.tensor([expert in KEPT for expert in range(6)])
    for block in masked.moe_blocks:
        block.routing = Masked(block.routing, kept_N)
    assert worst(own_logits(result), masked(TOKENS)) <= 1e-5


def test_only_the_numbers_of_experts_differ_in_the_metadata(tmp_path: Path) -> None:
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    result = GgufFile(written(kept_experts(source), source).directory)
    own = GgufFile(source.directory)
    changed = {key for key in own.metadata if result.metadata_entry(key) != own.metadata_entry(key)}
    assert changed == {"llama.expert_count"} and list(result.metadata) == list(own.metadata)
    assert result.metadata["llama.expert_count"] == 4
    narrower = GgufFile(written(kept_units(source, range(64)), source).directory)
    changed = {key for key in own.metadata if narrower.metadata_entry(key) != own.metadata_entry(key)}
    assert changed == {"llama.feed_forward_length"} and narrower.metadata["llama.feed_forward_length"] == 64


def test_rows_of_units_are_copied_and_columns_are_rounded_to_their_type(tmp_path: Path) -> None:
    source, units = make(tmp_path, type_="Q4_0", **ALIGNED), [*range(0, 96, 2), *range(96, 112)]
    result = written(kept_units(source, units), source)
    for part in ("gate", "up"):
        name = f"blk.1.ffn_{part}_exps.weight"
        assert torch.equal(stored(result, name), stored(source, name)[:, units])
    name, kind = "blk.1.ffn_down_exps.weight", gguf.GGMLQuantizationType.Q4_0
    numbers = gguf.quants.dequantize(stored(source, name).numpy(), kind)[..., units]
    assert (stored(result, name).numpy() == gguf.quants.quantize(numbers, kind)).all()


def test_units_of_k_types_leave_in_blocks_of_256(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    source, units = make(tmp_path, type_="Q4_K", **sizes), range(0, 512, 2)
    result = written(kept_units(source, units), source)
    assert torch.equal(
        stored(result, "blk.0.ffn_up_exps.weight"), stored(source, "blk.0.ffn_up_exps.weight")[:, list(units)]
    )
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    whole = source.tensor(name, torch.float32)[:, list(units)]
    off = result.tensor(name, torch.float32) - whole
    assert float(off.square().sum()) <= 0.01 * float(whole.square().sum())
    with pytest.raises(UnsupportedError, match="--unit-multiple 256"):
        planned_file(kept_units(source, range(128)), source)


def test_whole_blocks_of_columns_are_copied(tmp_path: Path) -> None:
    source, units = make(tmp_path, type_="Q4_0", **ALIGNED), [*range(32, 64), *range(96, 128)]
    result = written(kept_units(source, units), source)
    name = "blk.1.ffn_down_exps.weight"
    whole = stored(source, name)
    assert torch.equal(stored(result, name), whole.view(*whole.shape[:-1], 4, 18)[:, :, [1, 3]].flatten(-2))


def test_fitted_projections_are_rounded_to_their_type(tmp_path: Path) -> None:
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    fitted = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert name in source.shapes
    result = written(kept_units(source, range(64)), source, {name: fitted})
    kind = gguf.GGMLQuantizationType.Q8_0
    found = stored(result, "blk.1.ffn_down_exps.weight")
    assert (found[2].numpy() == gguf.quants.quantize(fitted.numpy(), kind)).all()
    assert torch.equal(found[1], stored(source, "blk.1.ffn_down_exps.weight")[1, :, : 2 * 34])


def test_other_layouts(tmp_path: Path) -> None:
    """Gate and up in one stack, experts one by one (which become stacks), and prediction layers (which go)."""
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    file = GgufFile(source.directory)
    tensors = {
        name: (8 if one.type.element is None else 0, one.shape, bytes(file.raw(name))) for name, one in file.tensors.items()
    }
    gate, up, down = (tensors.pop(f"blk.1.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
    whole = [torch.frombuffer(bytearray(one[2]), dtype=torch.uint8).view(6, -1) for one in (gate, up, down)]
    tensors["blk.1.ffn_gate_up_exps.weight"] = (8, (6, 256, 64), raw_bytes(torch.cat(whole[:2], 1)))
    tensors |= {f"blk.1.ffn_down.{expert}.weight": (8, (64, 128), raw_bytes(whole[2][expert])) for expert in range(6)}
    tensors["blk.3.ffn_gate_exps.weight"] = gate
    metadata = file.metadata | {"llama.block_count": 4, "llama.nextn_predict_layers": 1} | METADATA
    other = Checkpoint(write_gguf(tmp_path / "other.gguf", metadata, tensors))
    for plan in (kept_experts(source), kept_units(source, range(0, 128, 2))):
        expected = own_logits(written(plan, source))
        result = written(plan, other)
        assert torch.equal(own_logits(result), expected)
        assert result.gguf is not None and not any("blk.3" in name or ".ffn_down.2" in name for name in result.gguf.by_name)
        assert result.gguf.metadata["llama.block_count"] == 3


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


MERGED = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5))),), (Source(0),))
REFUSED = [
    (lambda own: pruning_plan({0: KEPT, 1: KEPT, 2: (0, 1)}), r"several numbers of experts .*--uniform"),
    (lambda own: Plan(dict.fromkeys(range(3), (MERGED,) * 4)), "sums of others"),
    (lambda own: kept_units(own, range(40)), r"ffn_down_exps.weight would have rows of 40 .* --unit-multiple 32"),
]


@pytest.mark.parametrize(("plan", "said"), REFUSED)
def test_a_plan_whose_result_does_not_fit_is_refused(plan: Any, said: str, tmp_path: Path) -> None:
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    with pytest.raises(UnsupportedError, match=said):
        planned_file(plan(source), source)


def test_bytes_that_are_read_back_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path, type_="Q8_0", **ALIGNED)
    planned = planned_file(kept_experts(source), source)
    check = gguf_file_writer.check_written

    def damaged(file: GgufFile, digests: Mapping[str, bytes]) -> None:
        content = bytearray(file.path.read_bytes())
        content[file.entries["blk.1.ffn_up_exps.weight"].begin + 5] ^= 1
        file.path.write_bytes(content)
        check(GgufFile(file.path), digests)

    monkeypatch.setattr("compress.plans.gguf_plan.check_written", damaged)
    with pytest.raises(OutputError, match=r"blk\.1\.ffn_up_exps\.weight was read back with other bytes"):
        write_planned(planned, source, tmp_path / "out.gguf")
