"""Tiny checkpoints in packed floats, made of random bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import save_reference
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
    "deepseek_v3": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
}
"""Sizes that the kernels for packed floats take, by family."""
KEPT = ("norm", "embed", "lm_head", "gate.weight", "router", "sinks", "bias")
"""Parts of names of tensors that stay as they are."""


def save_half(family: str, path: Path, **sizes: Any) -> dict[str, Tensor]:
    """Save a tiny model in bfloat16 and return its tensors."""
    save_reference(family, path, **SIZES[family] | sizes)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return tensors


def write(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Replace the tensors of a model, and say how they are quantized."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))


def scaled(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix in E4M3 with one float32 scale for each block."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(weight.shape[0])) * 0.001 + 0.001
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
    return (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def save_float8(
    family: str,
    path: Path,
    block: tuple[int, int] | None = (128, 128),
    scales: str = "blocks",
    suffix: str = "_scale_inv",
    **sizes: Any,
) -> None:
    """Save a tiny model in FP8. scales: `blocks`, `powers` (blocks, UE8M0), `rows`, or `tensors` (one number each)."""
    stored: dict[str, Tensor] = {}
    for name, tensor in save_half(family, path, **sizes).items():
        if any(part in name for part in KEPT):
            stored[name] = tensor
            continue
        own = {"rows": (1, tensor.shape[1]), "tensors": tuple(tensor.shape)}.get(scales, block)
        assert own is not None
        values, numbers = scaled(tensor, (own[0], own[1]))
        if scales == "powers":
            numbers = torch.exp2(numbers.log2().round()).to(torch.float8_e8m0fnu)
        if scales == "tensors":
            numbers, stored[name.removesuffix("weight") + "input_scale"] = numbers.reshape(()), torch.ones(())
        stored |= {name: values, name + suffix: numbers}
    quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if scales in ("blocks", "powers"):
        assert block is not None
        quantization["weight_block_size"] = list(block)
    else:
        quantization |= {"weight_block_size": None, "activation_scheme": "static"}
    write(path, stored, quantization)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return an entry of compressed-tensors for weights of one group."""
    own = {"type": "float", "symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"} | weights
    rounded = {"num_bits": weights["num_bits"], "type": "float", "dynamic": "local" if weights["num_bits"] == 4 else True}
    group = {"targets": ["Linear"], "format": form, "weights": own, "input_activations": rounded, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def save_compressed_float8(path: Path, strategy: str) -> None:
    """Save a tiny model in FP8 as compressed-tensors does, with scales in bfloat16 for `channel`, `tensor` or `block`."""
    kind = {"channel": "rows", "tensor": "tensors", "block": "blocks"}[strategy]
    save_float8("qwen3_moe", path, scales=kind, suffix="_scale")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_scale", "input_scale"))]:
        tensors[name] = tensors[name].bfloat16().reshape([1] if kind == "tensors" else tensors[name].shape)
        if name.endswith(".input_scale"):
            del tensors[name]
    block = [128, 128] if strategy == "block" else None
    write(path, tensors, compressed("float-quantized", num_bits=8, strategy=strategy, block_structure=block))


def save_nvfp4(path: Path) -> None:
    """Save a tiny model in NVFP4 as compressed-tensors does, with static scales of activations that are not read."""
    stored: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in save_half("qwen3_moe", path).items():
        if any(part in name for part in KEPT):
            stored[name] = tensor
            continue
        (outputs, inputs), module = tensor.shape, name.removesuffix("weight")
        stored |= {
            f"{name}_packed": torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8),
            f"{name}_scale": (torch.rand(outputs, inputs // 16, generator=generator) * 100 + 20).to(torch.float8_e4m3fn),
            f"{name}_global_scale": torch.rand(1, generator=generator) * 500 + 1000,
            f"{module}input_global_scale": torch.ones(1),
        }
    write(path, stored, compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16))


def save_mxfp4(path: Path) -> None:
    """Save a tiny GPT-OSS with experts as published: blocks and scales in the place of two stacks, and a matching config."""
    tensors, generator = save_half("gpt_oss", path), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    write(path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
