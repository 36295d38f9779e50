"""Statistics of hidden units against a second, naive implementation that goes token by token in float64."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import MOE_FAMILIES, save_reference
from interruptions import Interruption
from test_collect import naive_weights
from torch import Tensor

import calibrate.unit_statistics
import engine.passes.streaming
from calibrate.unit_statistics import Moments, collect_units, held_bytes, moments_bytes, unit_moments, unit_sums
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import Decoder
from engine.errors import DataError, OutputError
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (9, 7), generator=torch.Generator().manual_seed(7))
"""The second of the nine sequences is held out."""
HELD_SEQUENCE = 1


class Slots(NamedTuple):
    """Hidden units of one expert, for each token that chose it in the order of the text."""

    units: list[Tensor]
    weights: list[float]
    is_held: list[bool]

    def gram(self, *, held: bool) -> Tensor:
        """Return Σ w² h hᵀ over the tokens that are held out, or over the others."""
        every = zip(self.units, self.weights, self.is_held, strict=True)
        zero = torch.zeros(len(self.units[0]), len(self.units[0]), dtype=torch.float64)
        return sum((w * w * torch.outer(h, h) for h, w, is_held in every if is_held == held), zero)


@torch.no_grad()
def naive_slots(checkpoint: Checkpoint) -> dict[int, list[Slots]]:
    """Return the slots of each expert by layer: the definition, written out for one token at a time."""
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    inputs: dict[int, Tensor] = {}
    for index in checkpoint.config.moe_layers:
        decoder.layers[index].feed_forward.register_forward_pre_hook(
            lambda _, arguments, index=index: inputs.__setitem__(index, arguments[0])
        )
    decoder(TOKENS)
    return {index: layer_slots(decoder, index, x_TD) for index, x_TD in inputs.items()}


def layer_slots(decoder: Decoder, index: int, x_TD: Tensor) -> list[Slots]:
    """Return the slots of one layer's experts."""
    block, moe = decoder.layers[index].feed_forward, decoder.config.layers[index].moe
    assert isinstance(block, MoeBlock) and moe is not None
    found = [Slots([], [], []) for _ in block.experts]
    for token, x in enumerate(x_TD):
        z = block.logits(x[None])[0]
        for expert, weight in naive_weights(moe, z).items():
            own = x * z[expert].sigmoid() if moe.scales_inputs else x
            parts = block.experts[expert].projections
            gate, up = parts[0] @ own, parts[1] @ own
            if len(parts) > 3:
                gate, up = gate + parts[3], up + parts[4]
            if moe.swiglu is None:
                h = gate * gate.sigmoid() * up
            else:
                gate, up = gate.clamp(max=moe.swiglu.limit), up.clamp(-moe.swiglu.limit, moe.swiglu.limit)
                h = (up + 1.0) * gate * (moe.swiglu.alpha * gate).sigmoid()
            found[expert].units.append(h)
            found[expert].weights.append(weight)
            found[expert].is_held.append(token // TOKENS.shape[1] == HELD_SEQUENCE)
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"mlp_only_layers": [1]}),
        ("deepseek_v3", {}),
        pytest.param("granitemoeshared", {}, marks=pytest.mark.slow),
    ],
)
def test_ffns_that_every_token_uses_follow_the_experts(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model", **changes)
    checkpoint = Checkpoint(tmp_path / "model")
    kinds = ("shared", "dense")
    directory = collected(checkpoint, tmp_path / "all", include=kinds, budget=MemoryBudget(tokens_per_batch=14))
    assert checkpoint.config.common_widths
    for layer, (network, x_TD, weight_T) in naive_common(checkpoint).items():
        sums, number = unit_sums(directory, layer), len(checkpoint.config.ffn_widths().get(layer, ()))
        gate, up = network.gate_FD, network.up_FD
        h_TF = (x_TD @ gate.T) * (x_TD @ gate.T).sigmoid() * (x_TD @ up.T)
        rows_TF = weight_T[:, None] * h_TF
        is_held_T = torch.arange(len(x_TD)) // TOKENS.shape[1] == HELD_SEQUENCE
        assert int(sums.tokens[number]) == len(x_TD) and len(sums.tokens) == number + 1
        assert close(sums.square_sum[number], h_TF.square().sum(0))
        assert close(sums.weighted_square_sum[number], rows_TF.square().sum(0))
        moments = unit_moments(directory, layer, number)
        assert close(moments.fit, rows_TF[~is_held_T].T @ rows_TF[~is_held_T])
        assert close(moments.held, rows_TF[is_held_T].T @ rows_TF[is_held_T])
    alone = collected(checkpoint, tmp_path / "experts")
    for layer in checkpoint.config.moe_layers:
        own, both = unit_sums(alone, layer), unit_sums(directory, layer)
        assert all(close(*pair) for pair in zip(own.square_sum, both.square_sum, strict=False))


@torch.no_grad()
def naive_common(checkpoint: Checkpoint) -> dict[int, tuple[Any, Tensor, Tensor]]:
    """Return each FFN that every token uses, with its inputs [T, D] and the factors of its outputs [T], by layer."""
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    found = {}
    for index in checkpoint.config.common_widths:
        block = decoder.layers[index].feed_forward

        def keep(_: Any, arguments: Any, index: int = index, block: Any = block) -> None:
            x_TD = arguments[0]
            network = getattr(block, "shared", block)
            gate = getattr(block, "shared_gate_1D", None)
            weight_T = torch.ones(len(x_TD)).double() if gate is None else (x_TD @ gate[0]).sigmoid()
            found[index] = network, x_TD, weight_T

        block.register_forward_pre_hook(keep)
    decoder(TOKENS)
    return found


def collected(checkpoint: Checkpoint, directory: Path, **options: Any) -> Path:
    """Collect sums and moments in float32, and return their directory."""
    collect_units(checkpoint, TOKENS, directory, **({"moments": True, "dtype": torch.float32} | options))
    return directory


def close(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree to 1e-4 of the largest value."""
    return got.shape == expected.shape and torch.allclose(
        got.double(), expected.double(), rtol=1e-4, atol=1e-5 * max(1e-30, float(expected.abs().max()))
    )


@pytest.mark.parametrize("family", [*MOE_FAMILIES, "llama4_text"])
def test_sums_and_gram_matrices_equal_the_naive_implementation(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    directory = collected(checkpoint, tmp_path / "units", budget=MemoryBudget(tokens_per_batch=14))
    for layer, experts in naive_slots(checkpoint).items():
        sums = unit_sums(directory, layer)
        assert sums.tokens.tolist() == [len(own.units) for own in experts]
        for expert, own in enumerate(experts):
            if not own.units:
                assert not sums.square_sum[expert].any() and not unit_moments(directory, layer, expert).fit.any()
                continue
            squares = [(h.square(), w * w * h.square()) for h, w in zip(own.units, own.weights, strict=True)]
            square, weighted = (sum(each, torch.zeros(())) for each in zip(*squares, strict=True))
            assert close(sums.square_sum[expert], square) and close(sums.weighted_square_sum[expert], weighted)
            moments = unit_moments(directory, layer, expert)
            assert moments.is_gram == (len(own.units) >= len(square)), "few tokens are kept as they are"
            fit, held = second_moments(moments)
            assert close(fit, own.gram(held=False)) and close(held, own.gram(held=True))


def test_one_sequence_in_eight_is_held_out(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    short = tmp_path / "short"
    collect_units(checkpoint, TOKENS[:HELD_SEQUENCE], short, moments=True, dtype=torch.float32)
    directory = collected(checkpoint, tmp_path / "units")
    experts = range(checkpoint.config.experts_per_layer[0])
    assert not any(unit_moments(short, 0, expert).held.any() for expert in experts)
    assert any(unit_moments(directory, 0, expert).held.any() for expert in experts)


@pytest.fixture(name="model")
def small_model(tmp_path: Path) -> Checkpoint:
    save_reference("qwen2_moe", tmp_path / "model", mlp_only_layers=[1])
    return Checkpoint(tmp_path / "model")


def everything(directory: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """Return all sums and moments of a directory."""
    found: list[Tensor] = []
    for layer, count in checkpoint.config.experts_by_layer.items():
        sums = unit_sums(directory, layer)
        found += [sums.tokens, *sums.square_sum, *sums.weighted_square_sum]
        for expert in range(count):
            moments = unit_moments(directory, layer, expert)
            found += [moments.fit, moments.held]
    return found


def test_experts_are_summed_up_in_groups_with_their_inputs_in_a_file(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = everything(collected(model, tmp_path / "whole"), model)
    monkeypatch.setattr(calibrate.unit_statistics, "GRAM_BYTES", 1)  # one expert at a time
    budget = MemoryBudget(tokens_per_batch=TOKENS.shape[1], kept_bytes=0)
    limited = everything(collected(model, tmp_path / "limited", budget=budget), model)
    assert all(close(own, expected) for own, expected in zip(limited, whole, strict=True))
    assert held_bytes(model.config) == 2 * calibrate.unit_statistics.expert_gram_bytes(
        max(moe.expert_width for layer in model.config.layers if (moe := layer.moe) is not None)
    )


def test_sums_need_no_moments(model: Checkpoint, tmp_path: Path) -> None:
    directory = collected(model, tmp_path / "units", moments=False)
    assert unit_sums(directory, model.config.moe_layers[0]).tokens.sum() > 0
    assert not list(directory.glob("*ffn*"))


def test_an_interrupted_pass_resumes_at_its_layer(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = everything(collected(model, tmp_path / "straight"), model)
    one_layer, seen = engine.passes.streaming.one_layer, list[int]()

    def stopping(checkpoint: Checkpoint, index: int, *others: Any) -> Any:
        seen.append(index)
        if seen == [0, 1, 2]:
            raise Interruption
        return one_layer(checkpoint, index, *others)

    monkeypatch.setattr(engine.passes.streaming, "one_layer", stopping)
    with pytest.raises(Interruption):
        collected(model, tmp_path / "units")
    seen.append(-1)
    resumed = collected(model, tmp_path / "units")
    assert seen == [0, 1, 2, -1, 2], "the layers before the interruption do not run again"
    assert all(torch.equal(*pair) for pair in zip(everything(resumed, model), straight, strict=True))
    collected(model, tmp_path / "units")
    assert len(seen) == 5, "a finished pass does not run again"


def test_damaged_moments_are_refused(model: Checkpoint, tmp_path: Path) -> None:
    directory = collected(model, tmp_path / "units")
    path = next(iter(sorted(directory.glob("layer-*-ffn-*.safetensors"))))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    layer, expert = int(path.stem.split("-")[1]), int(path.stem.split("-")[3])
    with pytest.raises(DataError, match="damaged"):
        unit_moments(directory, layer, expert)


def second_moments(moments: Moments) -> tuple[Tensor, Tensor]:
    """Return H of both parts."""
    fit, held = moments.fit.double(), moments.held.double()
    return (fit, held) if moments.is_gram else (fit.T @ fit, held.T @ held)


def test_wide_experts_keep_their_weighted_tokens(model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grams = collected(model, tmp_path / "grams")
    monkeypatch.setattr(calibrate.unit_statistics, "WIDEST_GRAM", 1)
    samples = collected(model, tmp_path / "samples", budget=MemoryBudget(tokens_per_batch=14))
    for layer, count in model.config.experts_by_layer.items():
        for expert in range(count):
            own, expected = (unit_moments(place, layer, expert) for place in (samples, grams))
            assert not own.is_gram
            pairs = zip(second_moments(own), second_moments(expected), strict=True)
            assert all(close(own, expected) for own, expected in pairs)


def test_a_sample_of_many_small_batches_is_as_large_and_weighs_as_much_as_the_text(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may have fewer tokens of an expert than the distance between two sampled tokens."""
    most = 5
    grams = collected(model, tmp_path / "grams")
    monkeypatch.setattr(calibrate.unit_statistics, "WIDEST_GRAM", 1)
    monkeypatch.setattr(calibrate.unit_statistics, "SAMPLED_TOKENS", most)
    budget = MemoryBudget(tokens_per_batch=TOKENS.shape[1])  # a batch for each sequence
    directory = collected(model, tmp_path / "samples", budget=budget)
    shares = []
    for layer, count in model.config.experts_by_layer.items():
        routed_N = unit_sums(directory, layer).tokens.tolist()
        for expert, routed in enumerate(routed_N[:count]):
            sample, gram = unit_moments(directory, layer, expert), unit_moments(grams, layer, expert)
            assert len(sample.fit) + len(sample.held) <= most + 2, "rounded up in each part"
            if routed > most:
                shares.append(float(second_moments(sample)[0].trace() / second_moments(gram)[0].trace()))
    assert sum(shares) / len(shares) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("sequences", [1, len(TOKENS)])
def test_moments_take_no_more_space_than_was_asked_for(model: Checkpoint, tmp_path: Path, sequences: int) -> None:
    text = TOKENS[:sequences]
    directory = tmp_path / "units"
    collect_units(model, text, directory, moments=True, dtype=torch.float32)
    moments = [
        unit_moments(directory, layer, expert)
        for layer, count in model.config.experts_by_layer.items()
        for expert in range(count)
    ]
    taken = sum(part.nbytes for own in moments for part in (own.fit, own.held))
    assert 0 < taken <= moments_bytes(model.config, text.numel())


def test_too_little_space_is_refused_before_the_pass(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=1000))
    monkeypatch.setattr(calibrate.unit_statistics, "visit_layers", None)
    with pytest.raises(OutputError, match=r"moments of hidden units take up to .* GB are free; make space"):
        collected(model, tmp_path / "units")
