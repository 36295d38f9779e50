"""Low-bit weights in families that transformers runs: logits are those of naively rounded weights in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from safetensors.torch import load_file, save_file
from tiny_families import (
    TOKENS_SL,
    by_name,
    difference,
    logits_of,
    masked,
    save_tiny,
    some_removed,
    through_layers,
)
from tiny_rounding import measured_rounding, round_naively, rounded
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from calibrate.collect import collect
from compress.options.quantize import QuantiserOptions
from compress.plans.adapted_rounding import check_rounding
from compress.plans.apply import apply
from compress.plans.plan import Plan, narrowed_expert, pruning_plan
from engine.adapted import experts_implementation
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.experts_implementation import StackedExperts, experts_forward
from engine.adapted.interface_families import interface_families
from engine.adapted.low_bit_weights import LowBitLinear, LowBitStack, stack_low_bit
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.families.experts import UP
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import WHOLE_ROW

LAYOUTS = others_slow(("exaone_moe", "gpt_oss", "nemotron_h", "qwen3_vl_moe", "flex_olmo"), "exaone_moe", "gpt_oss")
"""Experts one by one; stacked, with gate and up in turn, biases and transposed weights; without gate; stacked beside a
vision tower; and a family of plain shape."""

REFUSED = {
    "deepseek_v4": "is a table of expert numbers",
    "diffusion_gemma": "do not lie in one list of layers",
    "ernie4_5_vl_moe": "the 8 experts of a model of the family ernie4_5_vl_moe are not found",
}


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AdaptedCheckpoint, AdaptedCheckpoint]:
    """Return a model of transformers whose weights are rounded naively, its checkpoint, and our result with 4 bits."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(by_name(request.param), path)
    checkpoint = AdaptedCheckpoint(path)
    result = rounded(checkpoint, path / "rounded", bits=4)
    round_naively(model, result, bits=4)
    return model, checkpoint, result


def test_logits_are_those_of_naively_rounded_weights(made: Any) -> None:
    """Layer by layer, whole, and step by step."""
    model, _, result = made
    reference = logits_of(model)
    assert difference(through_layers(result), reference) < 1e-5
    decoder = AdaptedDecoder(result, torch.float32)
    assert difference(decoder(TOKENS_SL), reference) < 1e-5
    cache = decoder.new_cache()
    steps = [decoder.last_logits(part, None, cache) for part in TOKENS_SL.split([13, 1, 1, 1], dim=1)]
    assert difference(torch.stack(steps, dim=1), reference[:, -4:]) < 1e-5


def test_matrices_are_rounded_and_all_else_is_copied(made: Any) -> None:
    _, checkpoint, result = made
    source, made_of = (load_file(each.directory / "model.safetensors") for each in (checkpoint, result))
    for name, tensor in made_of.items():
        if not name.endswith(("_packed", "_scale", "_shape")):
            assert torch.equal(tensor, source[name])
    routers = {f"{layer.router}.weight" for layer in checkpoint.found.experts}
    assert routers & set(checkpoint.names.targets.values()) <= {
        result.names.targets[name] for name in made_of if name in result.names.targets
    }
    per_layer = 3 if result.model.get_submodule(result.found.experts[0].experts).has_gate else 2
    experts = [name for name in result.low_bit if ".experts." in name and "shared" not in name]
    assert len(experts) == per_layer * sum(layer.count for layer in result.found.experts)
    assert any("q_proj" in name or "qkv" in name for name in result.low_bit)
    assert result.parameters == checkpoint.parameters
    rounded_bytes = sum(checkpoint.model_dtype.itemsize * view.shape[0] * view.shape[1] for view in result.low_bit.values())
    assert result.plain_bytes < result.bytes < checkpoint.bytes - 0.7 * rounded_bytes
    assert [scheme.bits for scheme in result.schemes_used] == [4]


def test_a_model_keeps_its_weights_as_they_are_stored(made: Any) -> None:
    result = made[2]
    decoder = AdaptedDecoder(result, torch.float32)
    for block in decoder.moe_blocks:
        assert isinstance(StackedExperts(block.module).down_NDF, LowBitStack)
    linears = [module for module in decoder.model.modules() if isinstance(module, LowBitLinear)]
    assert len(linears) == sum(".experts." not in name or "shared" in name for name in result.low_bit)
    shapes = 16 * len(result.low_bit)
    buffers = sum(each.nbytes for name, each in decoder.model.named_buffers() if name in result.names.targets.values())
    if result.directory.parent.name.startswith(("exaone", "gpt_oss")):  # no parts that text does not reach
        assert decoder.weights_bytes == result.bytes - shapes - buffers
    assert decoder.bytes_read_per_token([0.0] * len(decoder.moe_blocks)) < decoder.weights_bytes
    assert torch.equal(linears[0].weight, linears[0].stored.dequantised(torch.float32))


def test_pruning_copies_low_bit_experts(made: Any, tmp_path: Path) -> None:
    """The result has the bytes of kept experts, and the logits of the model whose routers cannot choose the others."""
    model, checkpoint, result = made
    kept = some_removed(result)
    apply(pruning_plan(kept), result, tmp_path)
    pruned = AdaptedCheckpoint(tmp_path)
    with masked(model, checkpoint, kept):
        reference = logits_of(model)
    assert difference(through_layers(pruned), reference) < 1e-5
    assert difference(AdaptedDecoder(pruned, torch.float32)(TOKENS_SL), reference) < 1e-5
    before, after = (load_file(each.directory / "model.safetensors") for each in (result, pruned))
    layer = result.found.experts[-1]
    names = {expert: result.stored_experts.matrices(layer.index, expert) for expert in range(layer.count)}
    for number, expert in enumerate(kept[layer.index]):
        for projection, name in names[number].items():
            for end in ("_packed", "_scale", "_shape"):
                assert torch.equal(after[name + end], before[names[expert][projection] + end])
    assert len(pruned.low_bit) < len(result.low_bit)


def test_low_bit_experts_are_not_narrowed(made: Any, tmp_path: Path) -> None:
    result = made[2]
    layers = {layer: tuple(narrowed_expert(each, range(8)) for each in range(8)) for layer in result.config.moe_layers}
    with pytest.raises(UnsupportedError, match=r"is a low-bit weight, .* give --granularity expert"):
        apply(Plan(layers), result, tmp_path)
    assert not list(tmp_path.iterdir())


def test_statistics_are_those_of_rounded_experts(made: Any) -> None:
    """Sums of the norms of experts' outputs, through hooks on the whole model."""
    model, _, result = made
    seen: dict[int, Any] = {}
    handles = [
        model.get_submodule(layer.router).register_forward_hook(
            lambda module, given, made, index=layer.index: seen.__setitem__(index, made[2])
        )
        for layer in result.found.experts
    ]
    logits_of(model)
    for handle in handles:
        handle.remove()
    statistics = collect(result, TOKENS_SL, dtype=torch.float32)
    for layer in result.found.experts:
        assert (
            statistics.layers[layer.index].tokens_routed.tolist()
            == torch.bincount(seen[layer.index].flatten(), minlength=layer.count).tolist()
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCheckpoint:
    """Return a tiny exaone_moe."""
    path = tmp_path_factory.mktemp("plain")
    save_tiny(by_name("exaone_moe"), path)
    return AdaptedCheckpoint(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("drop", "tensor .*_scale is missing"),
        ("shape", "and config.json says"),
        pytest.param("narrow", "match no group of quantization_config", marks=pytest.mark.slow),
        pytest.param("config", "is missing", marks=pytest.mark.slow),
    ],
)
def test_damaged_low_bit_weights_are_refused(damage: str, message: str, plain: Any, tmp_path: Path) -> None:
    rounded(plain, tmp_path / "rounded")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    weights, config = load_file(tmp_path / "rounded" / "model.safetensors"), tmp_path / "rounded" / "config.json"
    if damage == "drop":
        del weights[f"{name}_scale"]
    elif damage == "narrow":
        weights[f"{name}_packed"] = weights[f"{name}_packed"][:, :-1].contiguous()
    elif damage == "shape":
        weights[f"{name}_shape"] = torch.tensor([16, 16])
    else:
        config.write_text(
            json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "quantization_config"})
        )
    save_file(weights, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rounded" / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=message):
        AdaptedDecoder(AdaptedCheckpoint(tmp_path / "rounded"), torch.float32)


def test_other_forms_of_quantization_are_refused(plain: Any, tmp_path: Path) -> None:
    rounded(plain, tmp_path / "rounded")
    config = tmp_path / "rounded" / "config.json"
    raw = json.loads(config.read_text())
    for entry, message in (
        ({"quant_method": "fp8"}, "quantized weights are read for families with a row only"),
        (raw["quantization_config"] | {"format": "float-quantized"}, "format is .*float-quantized"),
    ):
        config.write_text(json.dumps(raw | {"quantization_config": entry}))
        with pytest.raises(UnsupportedError, match=message):
            AdaptedCheckpoint(tmp_path / "rounded")


def test_options_decide_what_is_rounded(plain: Any, tmp_path: Path) -> None:
    experts = rounded(plain, tmp_path / "experts", experts_only=True)
    assert all(".mlp.experts." in name or ".mlp.shared_experts." in name for name in experts.low_bit)
    head = rounded(plain, tmp_path / "head", bits=4, quantize_head=True)
    assert head.low_bit["lm_head.weight"].scheme.bits == 8
    assert {view.scheme.bits for name, view in head.low_bit.items() if name != "lm_head.weight"} == {4}
    assert difference(AdaptedDecoder(head, torch.float32)(TOKENS_SL), through_layers(head)) < 1e-5
    options = QuantiserOptions(bits=8, group_size=32)
    with pytest.raises(OptionError, match=r"has 16 inputs, which groups of 32 do not fill .* take --group-size 16"):
        check_rounding(options, plain, plain.config.ffn_widths())


def test_a_missing_matrix_of_an_expert_is_named(tmp_path: Path) -> None:
    save_tiny(by_name("qwen3_vl_moe"), tmp_path / "full")
    whole = rounded(AdaptedCheckpoint(tmp_path / "full"), tmp_path / "rounded")
    name = next(name for name, (_, expert, part) in whole.names.own_names.items() if (expert, part) == (3, UP))
    weights = load_file(tmp_path / "rounded" / "model.safetensors")
    rest = {own: tensor for own, tensor in weights.items() if not own.startswith(name)}
    save_file(rest, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rounded" / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=rf"{name}_packed is missing"):
        AdaptedCheckpoint(tmp_path / "rounded")


def test_a_scale_for_each_row_leaves_the_number_of_bits_to_the_stored_shape(plain: Any, tmp_path: Path) -> None:
    head = rounded(plain, tmp_path / "head", bits=4, quantize_head=True, group_size=WHOLE_ROW)
    assert head.low_bit["lm_head.weight"].scheme.bits == 8
    assert difference(AdaptedDecoder(head, torch.float32)(TOKENS_SL), through_layers(head)) < 1e-5


def test_layers_may_keep_one_expert(tmp_path: Path) -> None:
    """Also the first one: the layout of experts in the files is then looked up in another layer."""
    save_tiny(by_name("qwen3_vl_moe"), tmp_path / "full", num_experts_per_tok=1)
    full = AdaptedCheckpoint(tmp_path / "full")
    kept = {layer: [1] if not place else [0, 2] for place, layer in enumerate(full.config.experts_by_layer)}
    (tmp_path / "few").mkdir()
    apply(pruning_plan(kept), full, tmp_path / "few")
    few = rounded(AdaptedCheckpoint(tmp_path / "few"), tmp_path / "rounded")
    assert difference(AdaptedDecoder(few, torch.float32)(TOKENS_SL), through_layers(few)) < 1e-5
    assert few.stored_experts.matrices(next(iter(kept)), 0)


@needs_numba
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_kernels_multiply_low_bit_experts(bits: int) -> None:
    """For a few tokens and for many, those of dequantized weights up to activations of 8 bits; without gradients only."""
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, num_hidden_layers=1, vocab_size=8
    )
    config._experts_implementation = "eager"
    whole = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
    weights = []
    for expert in range(8):
        matrices = (
            *whole.gate_up_proj.data[expert].normal_(std=0.3).chunk(2),
            whole.down_proj.data[expert].normal_(std=0.3),
        )
        weights.append([quantise(matrix, bits, 32, torch.bfloat16) for matrix in matrices])
        dense = [own.dequantised(torch.bfloat16) for own in weights[-1]]
        whole.gate_up_proj.data[expert] = torch.cat(dense[:2])
        whole.down_proj.data[expert] = dense[2]
    low_bit = Qwen3MoeExperts(config)
    stack_low_bit(low_bit, weights)
    for tokens in (1, 3, 40, 200):
        generator = torch.Generator().manual_seed(tokens)
        x_TD = torch.randn(tokens, 64, generator=generator).bfloat16()
        given = (
            x_TD,
            torch.rand(tokens, 8, generator=generator).argsort(-1)[:, :2],
            torch.full((tokens, 2), 0.5).bfloat16(),
        )
        expected = experts_forward(whole, *given)
        assert float((experts_forward(low_bit, *given) - expected).abs().max()) < 0.03 * float(expected.abs().max())
    table = experts_implementation._tables[low_bit]
    assert (table.rows is not None) == (weights[0][0].product_form(kernels) is not None)
    with pytest.raises(UnsupportedError, match="low-bit weights"):
        experts_forward(low_bit, x_TD.requires_grad_(), *given[1:])


@pytest.mark.slow
@pytest.mark.parametrize("family", [family.name for family in interface_families() if family.model_type])
def test_every_family_is_rounded(family: str, tmp_path: Path) -> None:
    (cell,) = measured_rounding(by_name(family), tmp_path / "model").values()
    assert REFUSED[family] in str(cell) if family in REFUSED else isinstance(cell, float) and cell < 1e-4
