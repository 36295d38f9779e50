"""`compress quantize` of a family that only transformers runs, before and after pruning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import by_name, save_tiny
from tiny_rounding import naively_rounded
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from calibrate.options import CalibrationOptions
from compress.evaluate import evaluate_model
from compress.options.evaluate import EvaluateOptions
from compress.options.prune import PruneOptions
from compress.options.quantize import QuantiserOptions, QuantizeOptions
from compress.plans.selection import Budget
from compress.prune import prune
from compress.quantize import quantize
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.bench.backends import BACKENDS, BenchSpec
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.errors import CompressError
from engine.generation.generate import Engine

TEXT = CalibrationOptions(data="stdlib", samples=2, sequence_length=16, evaluation_samples=2)
BLIND = replace(TEXT, evaluation_samples=0)
NARROW = Budget(sparsity=0.5, scope="uniform", granularity="unit", unit_multiple=8, min_experts=0)
UNITS: dict[str, Any] = {"method": "unit-magnitude", "budget": NARROW}
"""Half of the hidden units of every expert."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model` and `small`, the same with 8 bits."""
    path = tmp_path_factory.mktemp("quantize")
    save_tiny(by_name("exaone_moe"), path / "model", vocab_size=VOCABULARY)
    add_tokenizer(path / "model")
    return path


def _quantize(model: Path, output: Path, bits: int, group: int, **changes: Any) -> Any:
    quantiser = QuantiserOptions(bits=bits, group_size=group)
    return quantize(
        replace(QuantizeOptions(model=str(model), output=output, quantiser=quantiser, calibration=TEXT), **changes)
    )


def _prune(model: Path, output: Path, **changes: Any) -> Any:
    return prune(PruneOptions(model=str(model), output=output, **{"calibration": TEXT, "method": "reap"} | changes))


@pytest.fixture(scope="module")
def small(place: Path) -> tuple[Path, Any]:
    """Return the result and its figures."""
    return place / "small", _quantize(place / "model", place / "small", 8, 16)


def test_an_artifact_with_its_figures(place: Path, small: tuple[Path, Any]) -> None:
    result, figures = AdaptedCheckpoint(small[0]), small[1]
    source = load_file(place / "model" / "model.safetensors")
    assert (figures["weight_bits"], figures["group_size"]) == (8, 16)
    assert (figures["bytes_after"], figures["bytes_not_quantized"]) == (result.bytes, result.plain_bytes)
    assert figures["parameters_before"] == figures["parameters_after"]
    off, whole = 0.0, 0.0
    for name in result.low_bit:
        off += float((naively_rounded(source[name], 8) - source[name]).double().square().sum())
        whole += float(source[name].double().square().sum())
    assert figures["relative_weight_error"] == pytest.approx((off / whole) ** 0.5, rel=1e-4)
    assert len(figures["relative_weight_error_per_layer"]) == 4
    assert (small[0] / SKIP_TABLES).is_file()
    card = (small[0] / "README.md").read_text()
    assert "have 8 bits" in card and "vLLM" not in card


def test_it_is_evaluated_within_a_limit_and_generates(small: tuple[Path, Any]) -> None:
    text = replace(TEXT, evaluation_samples=2)
    own = evaluate_model(
        EvaluateOptions(model=str(small[0]), calibration=text, split="held-out", memory_limit=3_000_000_000)
    )
    assert own["value"] == pytest.approx(small[1]["perplexity_after"], rel=1e-4)
    engine = Engine.open(small[0], skip_threshold=1.0)
    assert engine.decoder.weights_bytes < small[1]["bytes_after"]
    assert engine.generate(["the quick"], max_new_tokens=4)


def test_what_is_refused(place: Path, small: tuple[Path, Any], tmp_path: Path) -> None:
    for attempt, message in (
        (lambda: _quantize(small[0], tmp_path / "out", 4, 16), "has weights of 8 bits; take the model"),
        (
            lambda: _quantize(place / "model", tmp_path / "out", 8, 16, activation_aware=True),
            "--rounding awq scales norms",
        ),
        (
            lambda: _quantize(place / "model", tmp_path / "out", 8, 16, rounding="gptq"),
            "--rounding gptq rounds each matrix for its own inputs",
        ),
        (lambda: _quantize(place / "model", tmp_path / "out", 8, 32), "has 16 inputs, which groups of 32 do not fill"),
        (lambda: _prune(small[0], tmp_path / "out", **UNITS), "such experts can only be kept or removed as a whole"),
        (
            lambda: BACKENDS["transformers"](BenchSpec(str(small[0]), "transformers", threads=1, device="cpu")),
            "transformers itself does not read",
        ),
    ):
        with pytest.raises(CompressError, match=message):
            attempt()
    assert not (tmp_path / "out").exists()


def test_whole_experts_of_a_rounded_model_are_removed(small: tuple[Path, Any], tmp_path: Path) -> None:
    """The weights of 5 experts of 8 remain in each layer, as low-bit as before."""
    figures = _prune(small[0], tmp_path / "pruned", budget=Budget(experts=5, scope="uniform", min_experts=0))
    before, after = AdaptedCheckpoint(small[0]), AdaptedCheckpoint(tmp_path / "pruned")
    assert figures["experts_per_layer"] == [5, 5, 5]
    assert len(before.low_bit) - len(after.low_bit) == 3 * 3 * 3
    assert after.schemes_used == before.schemes_used
    assert figures["perplexity_after"] > 0


@pytest.fixture(scope="module")
def narrow(place: Path) -> Path:
    """Return the model with half of the hidden units, with 4 bits."""
    _prune(place / "model", place / "narrow", calibration=BLIND, **UNITS)
    _quantize(place / "narrow", place / "rounded", 4, 8)
    return place / "rounded"


def test_pruned_units_are_rounded(place: Path, narrow: Path) -> None:
    """Weights are those of the pruned model, rounded naively."""
    result, source = AdaptedCheckpoint(narrow), load_file(place / "narrow" / "model.safetensors")
    assert {layer.width for layer in result.found.experts} == {8}
    for name in result.low_bit:
        assert torch.allclose(result.stored_tensor(name), naively_rounded(source[name], 4, 8), atol=1e-6)
    held_out = EvaluateOptions(model=str(narrow), calibration=TEXT, split="held-out")
    figures = result.provenance["figures"] if result.provenance else {}
    assert evaluate_model(held_out)["value"] == pytest.approx(figures["perplexity_after"], rel=1e-4)


@pytest.mark.slow
def test_units_are_removed_and_rounded_at_once(place: Path, narrow: Path, tmp_path: Path) -> None:
    """The bytes are those of rounding afterwards."""
    quantiser = QuantiserOptions(bits=4, group_size=8)
    _prune(place / "model", tmp_path / "at-once", quantiser=quantiser, calibration=BLIND, **UNITS)
    one, other = (load_file(path / "model.safetensors") for path in (narrow, tmp_path / "at-once"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
