"""Models in packed floats stay as they are stored, and compute what their dequantized weights do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from float_models_for_tests import compressed as compressed_entry
from float_models_for_tests import save_compressed_float8, save_float8, save_mxfp4, save_nvfp4
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from safetensors.torch import load_file, save_file

import engine.kernels.kernel_choice
from engine.checkpoint.block_float8 import Float8
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.compressed_floats import formats_of
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, UnsupportedError
from engine.generation.generate import Engine
from engine.kernels.kernel_choice import DECODING, PROMPT
from engine.kernels.stored.float_weight import FloatWeight
from engine.kernels.stored.quantized_weight import Weight, as_tensor

MODELS: dict[str, tuple[Any, str]] = {
    "blocks": (partial(save_float8, "qwen3_moe"), "FP8"),
    "latent": (partial(save_float8, "deepseek_v3"), "FP8"),
    "powers": (partial(save_float8, "qwen3_moe", scales="powers"), "FP8"),
    "rows": (partial(save_float8, "qwen3_moe", scales="rows", suffix="_scale"), "FP8"),
    "tensors": (partial(save_float8, "qwen3_moe", scales="tensors", suffix="_scale"), "FP8"),
    "channel": (partial(save_compressed_float8, strategy="channel"), "FP8"),
    "tensor": (partial(save_compressed_float8, strategy="tensor"), "FP8"),
    "block": (partial(save_compressed_float8, strategy="block"), "FP8"),
    "mxfp4": (save_mxfp4, "MXFP4"),
    "nvfp4": (save_nvfp4, "NVFP4"),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "compiled")
    engine.kernels.kernel_choice._load_kernels.cache_clear()


@needs_numba
@pytest.mark.parametrize("name", MODELS)
def test_a_model_stays_packed(name: str, tmp_path: Path) -> None:
    """The logits are as near to those in float32 as the logits of the dequantized weights in bfloat16 are."""
    save, kind = MODELS[name]
    save(tmp_path)
    opened = Engine.open(tmp_path)
    checkpoint, packed = opened.checkpoint, opened.decoder
    assert isinstance(checkpoint, Checkpoint) and isinstance(packed, Decoder)
    weights = [module for module in packed.modules() if isinstance(module, FloatWeight)]
    experts = [weight for block in packed.moe_blocks for expert in block.experts for weight in expert.projections[:3]]
    assert {weight.kind for weight in weights} == {kind} and {*experts} <= {*weights}
    wide = Decoder(checkpoint.config, checkpoint.weights(torch.bfloat16))
    saved = sum(weight.shape[0] * weight.shape[1] * 2 - weight.nbytes for weight in weights)
    assert packed.weights_bytes == wide.weights_bytes - saved
    if kind == "MXFP4":  # the same bytes as the file's, rows of gate and up in turns
        stack = checkpoint.packed("model.layers.0.mlp.experts.gate_up_proj_blocks")
        assert stack is not None and experts[1].values_OB.data_ptr() == stack.data_ptr() + stack[0, 0].numel()
    as_stored = checkpoint.weights(torch.bfloat16, "cpu", tuple(kernels.FLOAT_KINDS))
    exact = Decoder(checkpoint.config, lambda name: _exactly(as_stored(name)))
    tokens = torch.randint(0, checkpoint.config.vocabulary_size, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = exact(tokens)[0]
        found = {decoder: _one_by_one(opened, decoder, tokens) for decoder in (packed, wide)}
        of_prompts = {decoder: decoder(tokens, choice=PROMPT)[0] for decoder in (packed, wide)}
        assert torch.equal(of_prompts[packed], of_prompts[wide])
        for made in (found, of_prompts):
            own, other = (float((made[each].float() - expected).norm(dim=-1).median()) for each in (packed, wide))
            assert own <= 1.25 * other and own < 0.05 * float(expected.norm(dim=-1).median())
        rows = torch.cat([_next(opened, packed, token.view(1, 1)) for token in tokens[0, :5]])
        assert torch.equal(_next(opened, packed, tokens[0, :5, None]), rows), "to the bit, whatever is computed beside it"


def _exactly(weight: Weight) -> torch.Tensor:
    return weight.dequantised(torch.float32) if isinstance(weight, FloatWeight) else as_tensor(weight).float()


def _one_by_one(opened: Engine, decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    cache = opened.new_cache(1, 16)
    return torch.stack([decoder.last_logits(token.view(1, 1), None, cache, DECODING)[0] for token in tokens[0]])


def _next(opened: Engine, decoder: Decoder, tokens_B1: torch.Tensor) -> torch.Tensor:
    """Return the logits after one token of several sequences."""
    return decoder.last_logits(tokens_B1, None, opened.new_cache(len(tokens_B1), 16), DECODING)


@needs_numba
def test_what_the_kernels_do_not_multiply_is_dequantized_once(tmp_path: Path) -> None:
    """Blocks of 32 columns have too many scales for a step of the kernels."""
    save_float8("qwen3_moe", tmp_path, block=(32, 32))
    decoder = Engine.open(tmp_path).decoder
    assert not any(isinstance(module, FloatWeight) for module in decoder.modules())


def test_without_kernels_weights_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_mxfp4(tmp_path)
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "torch")
    engine.kernels.kernel_choice._load_kernels.cache_clear()
    assert not any(isinstance(module, FloatWeight) for module in Engine.open(tmp_path).decoder.modules())


@pytest.mark.parametrize("name", [name for name, (_, kind) in MODELS.items() if kind == "FP8"])
def test_scales_mean_what_the_formats_say(name: str, tmp_path: Path) -> None:
    """Each weight is its number times the scale of its block, row or tensor."""
    save, _ = MODELS[name]
    save(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    for own in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.2.down_proj.weight"):
        values = checkpoint._by_name[own].tensor(own).float()
        scales = next(n for n in (own + "_scale_inv", own + "_scale") if n in checkpoint._by_name)
        numbers = checkpoint._by_name[scales].tensor(scales).float()
        if name in ("blocks", "latent", "powers", "block"):
            wide = torch.stack([numbers[row // 128] for row in range(len(values))])
            numbers = torch.stack([wide[:, column // 128] for column in range(values.shape[1])], dim=1)
        assert torch.equal(checkpoint.tensor(own), (values * numbers).bfloat16())


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_nvfp4_means_what_the_format_says(tmp_path: Path) -> None:
    """Each weight is its number times the scale of its 16, over the scale of the tensor."""
    save_nvfp4(tmp_path)
    checkpoint, tensors = Checkpoint(tmp_path), load_file(tmp_path / "model.safetensors")
    assert checkpoint.bytes == sum(each.nbytes for name, each in tensors.items() if "input" not in name.split(".")[-1])
    own = "model.layers.1.mlp.experts.2.up_proj.weight"
    found = checkpoint.tensor(own, torch.float32)
    packed, scales, whole = (tensors[f"{own}_{part}"] for part in ("packed", "scale", "global_scale"))
    for row, column in ((0, 0), (3, 1), (17, 46), (63, 127)):
        code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        number = E2M1[code & 7] * (-1 if code & 8 else 1)
        expected = number * (float(scales[row, column // 16]) / float(whole))
        assert float(found[row, column]) == pytest.approx(expected, rel=1e-2)  # the model is bfloat16
    assert checkpoint.is_packed(own) and not checkpoint.schemes_used


def test_nvfp4_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_nvfp4(tmp_path)
    whole, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.2.up_proj.weight"
    for part, changed, message in (
        ("packed", torch.zeros(64, 60, dtype=torch.uint8), "in NVFP4 has"),
        ("scale", torch.ones(64, 8), "in NVFP4 has"),
        ("global_scale", torch.ones(2), "in NVFP4 has"),
        ("scale", None, "up_proj.weight_scale is missing"),
    ):
        tensors = whole | ({} if changed is None else {f"{name}_{part}": changed})
        if changed is None:
            del tensors[f"{name}_{part}"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(tmp_path)
    save_file(whole | {f"{name}_global_scale": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="global_scale is 0"):
        Checkpoint(tmp_path).tensor(name)


@pytest.mark.parametrize(
    ("form", "changed", "message"),
    [
        ("float-quantized", {"num_bits": 6, "strategy": "channel"}, "weights.num_bits is 6"),
        ("float-quantized", {"num_bits": 8, "strategy": "group"}, "weights.strategy is 'group'"),
        (
            "float-quantized",
            {"num_bits": 8, "strategy": "block", "block_structure": "128x128"},
            "block_structure is '128x128'",
        ),
        ("float-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, "weights.symmetric is False"),
        ("nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": 32}, "weights.group_size is 32"),
        ("mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, "format is 'mxfp4-pack-quantized'"),
    ],
)
def test_other_floats_of_compressed_tensors_are_refused_by_name(form: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        formats_of({"quantization_config": compressed_entry(form, **changed)})


def test_groups_of_several_floats(tmp_path: Path) -> None:
    """NVFP4 and FP8 go together, two kinds of FP8 do not."""
    entry, other = (compressed_entry("float-quantized", num_bits=8, strategy=each) for each in ("channel", "tensor"))
    fours = compressed_entry("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
    groups = [each["config_groups"]["group_0"] for each in (entry, other, fours)]
    both = {"quantization_config": entry | {"config_groups": dict(zip("abc", groups, strict=True))}}
    found = formats_of(both)
    assert found.nvfp4 and found.float8 == Float8(None) and not found.schemes
    groups[1]["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    with pytest.raises(UnsupportedError, match="scales of several kinds"):
        formats_of(both)
