"""Rounding with error feedback equals a naive implementation, is nearer in output than rounding to nearest, and resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EVERY_MOE_FAMILY, others_slow, save_reference
from safetensors.torch import load_file, save_file

from compress.options.quantize import QuantiserOptions
from compress.rounding import feedback_pass
from compress.rounding.feedback_pass import round_layers
from compress.rounding.gptq import DAMPING, Feedback, shrunk
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk
from engine.errors import CheckpointError, DataError
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import WHOLE_ROW, Scheme


def inputs_of(tokens: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Return inputs whose channels are correlated and of different sizes, [T, I]."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator) * torch.rand(inputs, generator=generator) * 3
    return torch.randn(tokens, inputs, generator=generator) @ mixed


def naive(weight: np.ndarray, moment: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Return the dequantized weight, by removing a row and a column of H⁻¹ after each column (GPTQ, equations 2 and 3)."""
    inputs, middle = weight.shape[1], 2 ** (bits - 1)
    damped = moment + DAMPING * np.diag(moment).mean() * np.eye(inputs)
    inverse, left, result = np.linalg.inv(damped), weight.astype(np.float64).copy(), np.empty(weight.shape)
    scale = np.repeat(scales.astype(np.float64), inputs // scales.shape[1], axis=1)
    for column in np.argsort(-np.diag(moment), kind="stable"):
        result[:, column] = np.clip(np.round(left[:, column] / scale[:, column]), -middle, middle - 1) * scale[:, column]
        error = (left[:, column] - result[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, WHOLE_ROW), Scheme(8, 16), Scheme(3, 32), Scheme(2, 16)])
def test_rounding_equals_a_naive_implementation_in_float64(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 inputs in blocks of 24, the last one incomplete."""
    monkeypatch.setattr("compress.rounding.gptq.BLOCK", 24)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    x = inputs_of(200, 64).double()
    rounded = Feedback(x.T @ x).round(weight, scheme)
    expected = naive(weight.numpy(), (x.T @ x).numpy(), rounded.scales_OC.numpy(), scheme.bits)
    assert torch.allclose(rounded.dequantised(torch.float64), torch.from_numpy(expected), atol=1e-6)
    assert (rounded.bits, rounded.group_size) == (scheme.bits, 64 if scheme.group_size == WHOLE_ROW else scheme.group_size)


def test_parts_of_a_matrix_are_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(10, 32, generator=torch.Generator().manual_seed(1)), inputs_of(80, 32).double()
    whole = Feedback(x.T @ x).round(weight, Scheme(4, 32))
    monkeypatch.setattr("compress.rounding.gptq.MOST_WEIGHTS", 96)
    parts = Feedback(x.T @ x).round(weight, Scheme(4, 32))
    assert torch.equal(whole.packed_OB, parts.packed_OB) and torch.equal(whole.scales_OC, parts.scales_OC)


def test_several_matrices_are_rounded_as_each_alone() -> None:
    """They have different widths and two group sizes."""
    generator, x = torch.Generator().manual_seed(1), inputs_of(80, 64).double()
    feedback = Feedback(x.T @ x)
    schemes = [Scheme(2, 32), Scheme(8, 32), Scheme(4, WHOLE_ROW), Scheme(3, 32)]
    matrices = [(torch.randn(5 + place, 64, generator=generator), scheme) for place, scheme in enumerate(schemes)]
    for (weight, scheme), found in zip(matrices, feedback.round_all(matrices), strict=True):
        alone = feedback.round(weight, scheme)
        assert torch.equal(found.packed_OB, alone.packed_OB) and torch.equal(found.scales_OC, alone.scales_OC)
        assert (found.bits, found.shape) == (scheme.bits, weight.shape)


def test_the_factor_by_hand() -> None:
    """H = diag(1, 4) with damping 0.025: columns change places, and U has the roots of the entries of H⁻¹."""
    feedback = Feedback(torch.diag(torch.tensor([1.0, 4.0])))
    damped = torch.tensor([4.025, 1.025], dtype=torch.float64)
    assert torch.allclose(feedback.factor_II, torch.diag(damped.rsqrt())) and feedback.order_I.tolist() == [1, 0]
    assert torch.allclose(feedback.importance_I, damped.flip(0))


@pytest.mark.parametrize("dead", [slice(0, 32), slice(0, 16)])
def test_inputs_that_are_never_used_are_rounded_to_nearest(dead: slice) -> None:
    """All inputs, as of an expert that no token chose, or those of one group."""
    weight, x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)), inputs_of(80, 32)
    x[:, dead] = 0.0
    found, nearest = Feedback(x.T @ x).round(weight, Scheme(4, 16)), quantise(weight, 4, 16)
    own, other = (each.dequantised(torch.float32)[:, dead] for each in (found, nearest))
    assert torch.equal(own, other)


def test_a_moment_of_few_tokens_leans_on_its_prior_by_hand() -> None:
    """Two inputs and two tokens: half of the mean of the tokens and half of the prior."""
    found = shrunk(torch.tensor([[4.0, 2.0], [2.0, 6.0]]), 2, torch.eye(2))
    assert torch.allclose(found, torch.tensor([[1.5, 0.5], [0.5, 2.0]]))


def test_the_output_error_is_smaller_than_that_of_rounding_to_nearest() -> None:
    weight, x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), inputs_of(400, 64)
    held_out = inputs_of(400, 64)[200:]
    rounded = Feedback(x[:200].T @ x[:200]).round(weight, Scheme(4, 32)).dequantised(torch.float32)
    nearest = quantise(weight, 4, 32).dequantised(torch.float32)
    error, other = (float((held_out @ (own - weight).T).square().sum()) for own in (rounded, nearest))
    assert error < 0.5 * other


def test_scales_weigh_errors_by_importance() -> None:
    """One large weight whose error does not matter: the scale serves the small ones, and the large one is clipped."""
    weight = torch.tensor([[8.0, 0.8, -0.8, 0.8, 0.8, -0.8, 0.8, -0.8]])
    plain, weighted = quantise(weight, 4, 8), quantise(weight, 4, 8, importance_D=torch.tensor([0.0] + [1.0] * 7))
    assert float(plain.scales_OC.abs()) == 1.0 and float(weighted.scales_OC.abs()) == pytest.approx(0.8)
    assert torch.equal(plain.scales_OC, quantise(weight, 4, 8, importance_D=torch.ones(8)).scales_OC)


OPTIONS = QuantiserOptions(4, 8)


@pytest.mark.parametrize("family", others_slow(EVERY_MOE_FAMILY, "mixtral", "qwen2_moe"))
def test_matrices_of_a_model_are_rounded_for_the_inputs_that_they_have(family: str, tmp_path: Path) -> None:
    """Sums over whole text, of one matrix of attention and of one expert, collected by naive hooks of this test."""
    save_reference(family, tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    tokens_SL = torch.randint(0, checkpoint.config.vocabulary_size, (6, 16), generator=torch.Generator().manual_seed(0))
    found = round_layers(checkpoint, tokens_SL, tmp_path / "work", OPTIONS, dtype=torch.float32)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    weights, seen = parameters_on_disk(decoder), dict[str, torch.Tensor]()
    block = decoder.moe_blocks[0]

    def watch(module: torch.nn.Module, name: str) -> None:
        def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            seen[name] = given[0].flatten(0, -2)

        module.register_forward_pre_hook(keep)

    watch(decoder.layers[0].attention, "attention")
    watch(block, "block")
    with torch.no_grad():
        decoder.hidden_states(tokens_SL)
        name = next(each for each in weights if each.startswith("model.layers.0") and "q_proj.weight" in each)
        x = seen["attention"].double()
        expected = Feedback(x.T @ x).round(weights[name].detach(), Scheme(4, 8))
        own = found(name)
        assert own is not None and torch.equal(own.packed_OB, expected.packed_OB)
        x, expert = seen["block"], block.experts[1]
        selection = block.routing(block.logits(x))
        weight_T = torch.where(selection.experts == 1, selection.weights, 0.0).sum(-1).double()
        chosen_T = (selection.experts == 1).any(-1)
        rows, w = x[chosen_T].double(), weight_T[chosen_T]
        typical = float(w.square().mean())
        mean = (x.double().T @ x.double()) / len(x)
        moment = shrunk((rows * w[:, None]).T @ (rows * w[:, None]) / typical, len(rows), mean)
        for weight in expert.projections[:2]:
            name = next(key for key, each in weights.items() if each is weight)
            own, other = found(name), Feedback(moment).round(weight.detach(), Scheme(4, 8))
            assert own is not None and torch.equal(own.scales_OC, other.scales_OC)
            assert float((own.packed_OB != other.packed_OB).double().mean()) < 0.02, "sums in float32 may round another way"


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_reference("mixtral", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] *= 1e30
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="are NaN or infinite; check"):
        round_layers(Checkpoint(model), torch.zeros(2, 8, dtype=torch.long), tmp_path / "work", OPTIONS, dtype=torch.float32)


def test_an_interrupted_pass_resumes_at_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    tokens_SL = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    round_layers(checkpoint, tokens_SL, tmp_path / "whole", OPTIONS, dtype=torch.float32)
    written: list[str] = []
    write = feedback_pass.write_state

    def once(path: Path, *given: object) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(feedback_pass, "write_state", once)
    with pytest.raises(KeyboardInterrupt):
        round_layers(checkpoint, tokens_SL, tmp_path / "work", OPTIONS, dtype=torch.float32)
    monkeypatch.setattr(feedback_pass, "write_state", lambda path, *given: (written.append(path.name), write(path, *given)))
    found = round_layers(checkpoint, tokens_SL, tmp_path / "work", OPTIONS, dtype=torch.float32)
    layers = len(checkpoint.config.layers)
    assert written == [f"rounded-{layer}.safetensors" for layer in range(layers)]
    for layer in range(layers):
        name = f"rounded-{layer}.safetensors"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "work" / name).read_bytes()
    file = tmp_path / "work" / "rounded-0.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    name = next(each for each in OPTIONS.names(checkpoint.config) if each.startswith("model.layers.0."))
    with pytest.raises(DataError, match="damaged"):
        found(name)
