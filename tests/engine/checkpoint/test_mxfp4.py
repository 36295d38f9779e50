"""Packed experts are read as transformers reads them, and unchanged experts stay packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from family_matrix import logits_of, own_logits, worst
from safetensors.torch import load_file, save_file

from compress.plans.apply import apply
from compress.plans.plan import Part, Plan, PlannedExpert, Source, pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.mxfp4 import unpacked
from engine.errors import CheckpointError, UnsupportedError
from engine.families.tensor_names import expert_tensor


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache into which transformers copies remote code. It read the path when it was imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def save_packed(path: Path) -> None:
    """Save a tiny model with experts as published: blocks and scales in the place of two stacks, and a matching config."""
    save_reference("gpt_oss", path, hidden_size=64, intermediate_size=32)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))


def unpacked_by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    options = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM
    return model.from_pretrained(path, dtype=torch.float32, trust_remote_code=True, **options).eval()


def test_packed_experts_are_read_and_kept_as_they_are(tmp_path: Path) -> None:
    save_packed(tmp_path / "full")
    full = Checkpoint(tmp_path / "full")
    assert worst(own_logits(full), logits_of(unpacked_by_transformers(tmp_path / "full"))) <= 1e-4
    stored = load_file(tmp_path / "full" / "model.safetensors")
    assert full.bytes == sum(tensor.nbytes for tensor in stored.values())
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    for directory, kept in ("uniform", {0: [1, 4], 1: [0, 3], 2: [2, 5]}), ("other", {0: [1, 4, 5], 1: [3], 2: [2, 5]}):
        apply(pruning_plan(kept), full, tmp_path / directory)
        pruned = Checkpoint(tmp_path / directory)
        assert torch.equal(load_file(tmp_path / directory / "model.safetensors")[name], stored[name][kept[1]])
        assert worst(own_logits(pruned), logits_of(unpacked_by_transformers(tmp_path / directory))) <= 1e-4
    again = Checkpoint(tmp_path / "uniform")
    mixed = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5))),), (Source(0),))
    apply(Plan(dict.fromkeys(range(3), (mixed,))), again, tmp_path / "merged")
    merged = Checkpoint(tmp_path / "merged")
    assert "quantization_config" not in merged.raw_config
    row = again.config.architecture
    one, other = (again.tensor(expert_tensor(row, 1, expert, 2)).float() for expert in range(2))
    assert torch.equal(merged.tensor(expert_tensor(row, 1, 0, 2)), (0.5 * one + 0.5 * other).to(torch.bfloat16))


def test_every_packed_number_is_the_format_s() -> None:
    """The table follows the specification: sign, two exponent bits with bias 1, one mantissa bit. A scale of ones is NaN."""
    code = torch.arange(256, dtype=torch.uint8)
    found = unpacked(code.view(1, 16, 16), torch.arange(120, 136, dtype=torch.uint8)[None]).float().view(16, 16, 2)
    for byte in range(256):
        for half in range(2):
            bits = byte >> 4 * half & 15
            exponent, mantissa = bits >> 1 & 3, bits & 1
            size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1.0 + 0.5 * mantissa)
            expected = (-size if bits & 8 else size) * 2.0 ** (120 + byte // 16 - 127)
            assert float(found[byte // 16, byte % 16, half]) == expected
    assert bool(unpacked(code[:16].view(1, 1, 16), torch.full((1, 1), 255, dtype=torch.uint8)).isnan().all())


def test_packed_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_packed(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = whole[f"{name}_blocks"], whole[f"{name}_scales"]
    for change, message in (
        ({f"{name}_blocks": blocks[:, :-1]}, "_blocks has shape"),
        ({f"{name}_scales": scales[..., None]}, "_scales has shape"),
        ({f"{name}_scales": scales.float()}, "packed weights are torch.uint8"),
    ):
        save_file({key: tensor.contiguous() for key, tensor in (whole | change).items()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(tmp_path)
    del whole[f"{name}_scales"]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="_scales is missing"):
        Checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="quant_method='gptq'"):
        Checkpoint(tmp_path)
