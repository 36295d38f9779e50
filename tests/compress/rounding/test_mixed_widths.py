"""Different bits for each matrix of each expert: on disk, in the decoder, pruned, and described for other programs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import save_reference
from kernels_for_tests import needs_integers
from safetensors.torch import load_file, save_file
from test_quantized_weight import naive_weights, prefill_and_steps

import cli
from compress.plans.apply import apply
from compress.plans.mixed_model import write_mixed_widths
from compress.plans.plan import pruning_plan
from compress.rounding.feedback_pass import round_layers
from compress.rounding.mixed_widths import mixed_widths
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.step.decode_step import DecodeStep
from engine.errors import OptionError
from engine.families.experts import DOWN, GATE, UP
from engine.families.tensor_names import expert_tensor
from engine.kernels.kernel_choice import DECODING
from engine.kernels.stored.quantized_weight import QuantizedWeight
from engine.kernels.stored.scheme import Scheme

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FAMILIES = ("mixtral", "granitemoe", "gpt_oss", "qwen2_moe")
"""Families that store experts one by one and stacked, with biases and with a shared expert."""


def some_widths(checkpoint: Checkpoint, seed: int = 0) -> dict[tuple[int, int, int], int]:
    choices, every = random.Random(seed), checkpoint.config.experts_by_layer.items()
    return {
        (layer, expert, projection): choices.choice((2, 3, 4, 8, 16))
        for layer, count in every
        for expert in range(count)
        for projection in (GATE, UP, DOWN)
    }


def made(
    family: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Checkpoint, dict[tuple[int, int, int], int], Checkpoint]:
    """Return a tiny model, its widths, and the model with these widths."""
    sizes = SIZES if family == "qwen2_moe" else {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    save_reference(family, path / "full", **sizes)
    file = path / "full" / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    full = Checkpoint(path / "full")
    widths = some_widths(full)
    write_mixed_widths(full, path / "mixed", widths, **options)
    return full, widths, Checkpoint(path / "mixed")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_matrix_has_its_own_bits(family: str, tmp_path: Path) -> None:
    full, widths, mixed = made(family, tmp_path, others=8)
    row, naive = full.config.architecture, naive_weights(tmp_path / "mixed")
    saved = 0
    for place, bits in widths.items():
        name = expert_tensor(row, *place)
        outputs, inputs = full.shapes[name]
        if bits == 16:
            assert mixed.scheme(name) is None and torch.equal(mixed.tensor(name), full.tensor(name))
        else:
            assert mixed.scheme(name) == Scheme(bits, 32)
            saved += outputs * inputs * 4 - (outputs * (inputs * bits // 8 + inputs // 32 * 4) + 16)
    experts = {expert_tensor(row, *place) for place in widths}
    others = [name for name in mixed.shapes if mixed.scheme(name) and name not in experts]
    assert others and {mixed.scheme(name) for name in others} == {Scheme(8, 32)}
    for name in others:
        outputs, inputs = full.shapes[name]
        saved += outputs * inputs * 4 - (outputs * (inputs + inputs // 32 * 4) + 16)
    assert full.bytes - mixed.bytes == saved
    logits = prefill_and_steps(Decoder(mixed.config, mixed.weights(torch.float32)).eval())
    assert torch.allclose(logits, prefill_and_steps(Decoder(mixed.config, naive.__getitem__).eval()), atol=1e-5)


def described(checkpoint: Checkpoint) -> dict[str, Scheme | None]:
    """Return the scheme of each matrix of an expert as programs find it that evaluate targets: a name before a class."""
    entry, row = checkpoint.raw_config["quantization_config"], checkpoint.config.architecture
    found: dict[str, Scheme | None] = {}
    for layer, count in checkpoint.config.experts_by_layer.items():
        for expert in range(count):
            for projection in (GATE, UP, DOWN):
                module = expert_tensor(row, layer, expert, projection).removesuffix(".weight")
                groups = [
                    group["weights"]
                    for group in entry["config_groups"].values()
                    if any(re.match(target[3:], module) for target in group["targets"] if target.startswith("re:"))
                ] or [group["weights"] for group in entry["config_groups"].values() if "Linear" in group["targets"]]
                assert len(groups) == 1
                ignored = any(
                    re.match(each[3:], module) if each.startswith("re:") else each == module for each in entry["ignore"]
                )
                found[module + ".weight"] = None if ignored else Scheme(groups[0]["num_bits"], groups[0]["group_size"])
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_the_config_says_which_matrix_has_which_bits(family: str, tmp_path: Path) -> None:
    _, _, mixed = made(family, tmp_path)
    found = described(mixed)
    assert len(found) == 3 * sum(mixed.config.experts_by_layer.values())
    assert all(mixed.scheme(name) == scheme for name, scheme in found.items())
    assert "experts of a layer have different bits" in (mixed.loading_note or "")
    kept = {layer: [1, *range(3, count)] for layer, count in mixed.config.experts_by_layer.items()}
    apply(pruning_plan(kept), mixed, tmp_path / "pruned")
    pruned, row = Checkpoint(tmp_path / "pruned"), mixed.config.architecture
    assert all(pruned.scheme(name) == scheme for name, scheme in described(pruned).items())
    for layer, experts in kept.items():
        for number, own in enumerate(experts):
            for projection in (GATE, UP, DOWN):
                after = pruned.stored(expert_tensor(row, layer, number, projection))
                before = mixed.stored(expert_tensor(row, layer, own, projection))
                if isinstance(before, QuantizedWeight):
                    assert isinstance(after, QuantizedWeight) and torch.equal(after.packed_OB, before.packed_OB)
                else:
                    assert torch.equal(after, before)


@needs_integers
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@torch.inference_mode()
def test_the_compiled_step_serves_it(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence gets the same bits beside others, and nearly what the layers compute one by one with plain weights."""
    _, _, mixed = made(family, tmp_path, torch.bfloat16)
    decoder = Decoder(mixed.config, mixed.weights(torch.bfloat16)).eval()
    tokens = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(2))
    served = list[bool]()
    step = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda *given: (y := step(*given), served.append(y is not None))[0])

    def decoded(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        cache = KeyValueCache(mixed.config, len(tokens), 9, torch.bfloat16)
        return torch.cat([decoder(tokens[:, i : i + 1], None, cache, DECODING) for i in range(9)], dim=1)

    together = decoded(decoder, tokens)
    assert len(served) == 9 and all(served)
    assert torch.equal(torch.cat([decoded(decoder, row[None]) for row in tokens]), together)
    plain = Decoder(mixed.config, mixed.source(torch.float32)).eval()
    exact = plain(tokens)
    assert float((together.float() - exact).norm() / exact.norm()) < 0.1


def test_inspect_counts_parameters_by_their_bits(tmp_path: Path) -> None:
    full, widths, mixed = made("mixtral", tmp_path)
    result = CliRunner().invoke(cli.main, ["inspect", str(mixed.directory), "--json"], catch_exceptions=False)
    figures = json.loads(result.stdout)
    sizes = {bits: 64 * 64 * sum(own == bits for own in widths.values()) for bits in (2, 3, 4, 8)}
    assert figures["bytes"] == mixed.bytes and figures["weight_bits"] == 2 and figures["parameters"] == full.parameters
    assert figures["parameters_by_bits"] == {str(bits): size for bits, size in sizes.items()}


def test_rounding_with_error_feedback_takes_each_matrix_to_its_bits(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "full", hidden_size=64, intermediate_size=64)
    full = Checkpoint(tmp_path / "full")
    options = mixed_widths(full.config, some_widths(full))
    tokens = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0))
    found = round_layers(full, tokens, tmp_path / "work", options, dtype=torch.float32)
    write_mixed_widths(full, tmp_path / "mixed", some_widths(full), made=found)
    mixed = Checkpoint(tmp_path / "mixed")
    for name, bits in options.by_name.items():
        stored, rounded = mixed.stored(name), found(name)
        assert isinstance(stored, QuantizedWeight) and rounded is not None and stored.bits == rounded.bits == bits
        assert torch.equal(stored.packed_OB, rounded.packed_OB) and torch.equal(stored.scales_OC, rounded.scales_OC)


@pytest.mark.parametrize(
    ("widths", "options", "said"),
    [
        ({(0, 6, UP): 4}, {}, "layer 0 has no projection 1 of an expert 6"),
        ({(3, 0, UP): 4}, {}, "layer 3 has no projection 1"),
        ({(0, 0, 3): 4}, {}, "no projection 3"),
        ({(0, 0, UP): 5}, {}, "5 bits; weights have one of 2, 3, 4, 8 or 16"),
        ({(0, 0, UP): 16}, {}, "nothing is rounded"),
        ({(0, 0, UP): 4, (0, 0, DOWN): 3}, {"group_size": 16}, "w2.weight has 64 inputs, which groups of 16 do not fill"),
    ],
)
def test_widths_that_do_not_fit_are_refused(
    widths: dict[tuple[int, int, int], int], options: dict[str, int], said: str, tmp_path: Path
) -> None:
    save_reference("mixtral", tmp_path, hidden_size=64, intermediate_size=64)
    with pytest.raises(OptionError, match=said):
        mixed_widths(Checkpoint(tmp_path).config, widths, **options)
