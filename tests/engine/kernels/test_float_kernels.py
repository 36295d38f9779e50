"""Decoding in float32 and float16: the compiled products of plain weights, and where torch computes in their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import save_reference
from kernels_for_tests import kernels
from nearness import is_as_near
from packages_for_tests import needs_numba
from test_decode_kernels import decoded
from torch import Tensor

import engine.kernels.kernel_choice
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import CompiledExperts, Expert, expert_of, gated
from engine.decoder.model import Decoder
from engine.decoder.routing import NO_EXPERT, Selection
from engine.families.layer_config import Activation, ClampedSwiglu, GatedGelu
from engine.kernels.kernel_choice import DECODING, FLOATS_MAX_ROWS, PROMPT, prepare_decoding
from engine.kernels.linear import linear, linears, wide_linear
from engine.kernels.plain_forms import FLOATS
from engine.kernels.stored.quantized_weight import quantise

DTYPES = sorted(FLOATS, key=str)
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3}
"""Relative to the largest number, where a result is rounded to the dtype once."""


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the kernels where they are, however fast torch is."""
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "compiled")
    engine.kernels.kernel_choice._load_for_floats.cache_clear()
    yield
    engine.kernels.kernel_choice._load_for_floats.cache_clear()


def matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return a random matrix. Memory beside it is NaN."""
    around = torch.full((outputs * inputs + 4096,), torch.nan, dtype=dtype)
    return around[2048 : 2048 + outputs * inputs].view(outputs, inputs).copy_(torch.randn(outputs, inputs) * inputs**-0.5)


def is_near(made: Tensor, exact: Tensor, inputs: int = 256) -> bool:
    """inputs: numbers that are added up one after another."""
    tolerance = TOLERANCES[made.dtype] * max(1.0, inputs / 256) ** 0.5
    return bool((made.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp_min(1.0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels' functions that were called."""
    called: list[str] = []

    def noting(name: str) -> Any:
        own = getattr(kernels, name)

        def call(*given: Any, **options: Any) -> Any:
            called.append(name)
            return own(*given, **options)

        return call

    for name in ("products", "swiglu"):
        monkeypatch.setattr(kernels, name, noting(name))
    return called


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, FLOATS_MAX_ROWS])
@pytest.mark.parametrize("inputs", [1, 17, 48, 70, 256, 330, 3300])
def test_products_equal_the_formula_and_have_the_same_bits_alone(
    dtype: torch.dtype, rows: int, inputs: int, calls: list[str]
) -> None:
    torch.manual_seed(0)
    weights = [matrix(outputs, inputs, dtype) for outputs in (5, 130, 1)]
    biases = [torch.randn(5, dtype=dtype), None, None]
    x = torch.randn(rows, inputs).to(dtype)
    with torch.inference_mode():
        together = linears(x, weights, biases, DECODING)
        alone = [torch.cat(each) for each in zip(*(linears(row[None], weights, biases, DECODING) for row in x), strict=True)]
    assert calls == ["products"] * (1 + rows)
    for weight, bias, made, single in zip(weights, biases, together, alone, strict=True):
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        assert made.dtype == dtype and is_near(made, exact)
        assert torch.equal(made, single)


@needs_numba
@pytest.mark.parametrize("inputs", [17, 330, 3300])
def test_bfloat16_is_multiplied_in_float32(inputs: int) -> None:
    torch.manual_seed(4)
    weight, x = matrix(9, inputs, torch.bfloat16), torch.randn(5, inputs).bfloat16()
    made = wide_linear(kernels, x, weight)
    assert made.dtype == torch.float32 and is_near(made, x.double() @ weight.double().T)
    assert torch.equal(made, torch.cat([wide_linear(kernels, row[None], weight) for row in x]))


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "gelu", "scaled", "without a gate"])
@pytest.mark.parametrize("tokens", [1, 3, FLOATS_MAX_ROWS])
def test_experts_equal_the_formula(dtype: torch.dtype, kind: str, tokens: int, calls: list[str]) -> None:
    torch.manual_seed(1)
    hidden = 70
    experts = experts_of(kind, hidden, (33, 1, 300, 64), dtype)
    for weight in experts[-1].projections:  # an expert that nobody chooses is not read
        weight.data.fill_(torch.nan)
    x_TD, weights_TS = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 2)
    chosen_TS = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])
    chosen_TS[0, 1] = NO_EXPERT
    scales_TS = torch.rand(tokens, 2) if kind == "scaled" else None
    with torch.inference_mode():
        made = CompiledExperts()(x_TD, experts, Selection(chosen_TS, weights_TS), scales_TS, DECODING)
    assert made is not None and made.dtype == dtype and calls == ["swiglu"]
    assert is_near(made, summed(experts, x_TD, chosen_TS, weights_TS, scales_TS))


def summed(experts: list[Expert], x_TD: Tensor, chosen_TS: Tensor, weights_TS: Tensor, scales_TS: Tensor | None) -> Tensor:
    """Return the sums of the chosen experts' outputs in float64, one after another."""
    exact_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for token, slot in (chosen_TS != NO_EXPERT).nonzero().tolist():
        scale = 1.0 if scales_TS is None else scales_TS[token, slot].double()
        made = formula(experts[chosen_TS[token, slot]], x_TD[token].double() * scale)
        exact_TD[token] += weights_TS[token, slot].double() * made
    return exact_TD


def experts_of(kind: str, hidden: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[Expert]:
    """Return random experts of these widths. kind: `gelu`, `without a gate`, or another."""
    activation, ins = GatedGelu() if kind == "gelu" else None, 1 if kind == "without a gate" else 2
    return [
        expert_of([*(matrix(width, hidden, dtype) for _ in range(ins)), matrix(hidden, width, dtype)], activation)
        for width in widths
    ]


def formula(expert: Expert, x_D: Tensor) -> Tensor:
    *ins, down = (weight.double() for weight in expert.projections)
    units = [weight @ x_D for weight in ins]
    return down @ (gated(*units, expert.swiglu) if expert.has_gate else units[0].clamp_min(0.0) ** 2)


@needs_numba
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen3_next", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_families_decode_as_well_as_through_torch(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)

    def logits(own: torch.dtype) -> Tensor:
        plain = checkpoint.source(dtype)
        return decoded(Decoder(checkpoint.config, lambda name: plain(name).to(own)), checkpoint.config, own)

    made = logits(dtype)
    assert "products" in calls and made.dtype == dtype
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "torch")
    engine.kernels.kernel_choice._load_for_floats.cache_clear()
    calls.clear()
    of_torch, exact = logits(dtype), logits(torch.float64)
    assert not calls, "float64 and COMPRESS_KERNELS=torch go through torch"
    assert is_as_near((made - exact).norm(dim=-1), (of_torch - exact).norm(dim=-1))


@needs_numba
@pytest.mark.parametrize("rows", [1, 16, 97, 250])
@pytest.mark.parametrize("inputs", [4, 48, 132, 2052])
def test_prompts_in_float32_equal_the_formula_and_have_the_same_bits_in_pieces(
    rows: int, inputs: int, calls: list[str]
) -> None:
    """The rows give panels of each width, and the inputs end a part of a matrix and begin another."""
    torch.manual_seed(0)
    x, weights = torch.randn(rows, inputs), [matrix(outputs, inputs, torch.float32) for outputs in (36, 4, 300)]
    with torch.inference_mode():
        made = linears(x, weights, [None, None, torch.ones(300)], PROMPT)
        some = torch.randperm(rows)[: rows // 2 + 1]
        assert all(
            map(torch.equal, linears(x[some], weights, [None, None, torch.ones(300)], PROMPT), (y[some] for y in made))
        )
    for y, weight, bias in zip(made, weights, (0.0, 0.0, 1.0), strict=True):
        assert y.dtype == torch.float32 and is_near(y, x.double() @ weight.double().T + bias, inputs)
    assert calls == ["products"] * 2


@needs_numba
@pytest.mark.parametrize("kind", ["plain", "gelu", "scaled", "without a gate"])
def test_experts_of_prompts_in_float32_equal_the_formula(kind: str, calls: list[str]) -> None:
    """One expert has more tokens than a panel holds, one has none, and one slot is empty."""
    torch.manual_seed(1)
    tokens, hidden = 300, 136
    experts = experts_of(kind, hidden, (36, 4, 300, 64), torch.float32)
    x_TD, weights_TS = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    chosen_TS = torch.stack([torch.tensor([0, 1 + token % 2]) for token in range(tokens)])
    chosen_TS[0, 1] = NO_EXPERT
    scales_TS = torch.rand(tokens, 2) if kind == "scaled" else None

    def made(own: slice) -> Tensor:
        scales = None if scales_TS is None else scales_TS[own]
        with torch.inference_mode():
            y = CompiledExperts()(x_TD[own], experts, Selection(chosen_TS[own], weights_TS[own]), scales, PROMPT)
        assert y is not None
        return y

    y = made(slice(None))
    assert y.dtype == torch.float32 and calls == ["swiglu"]
    assert is_near(y, summed(experts, x_TD, chosen_TS, weights_TS, scales_TS))
    assert torch.equal(torch.cat([made(slice(0, 7)), made(slice(7, 220)), made(slice(220, None))]), y)


@needs_numba
def test_torch_computes_prompts_in_float16_many_rows_gradients_and_other_weights(calls: list[str]) -> None:
    torch.manual_seed(2)
    weight, other = matrix(96, 64, torch.float32), matrix(96, 64, torch.float64)
    low_bit = quantise(torch.randn(96, 64), 8, 32, torch.float32)
    x = torch.randn(FLOATS_MAX_ROWS + 1, 64)
    with torch.inference_mode():
        assert torch.equal(linear(x, weight, choice=DECODING), F.linear(x, weight))
        halves = x[:2].half(), weight.half()
        assert torch.equal(linear(*halves, choice=PROMPT), linear(*halves))
        assert torch.equal(linear(x[:2].double(), other, choice=DECODING), F.linear(x[:2].double(), other))
        exact = F.linear(x[:2], low_bit.dequantised(torch.float32))
        assert torch.equal(linear(x[:2], low_bit, choice=DECODING), exact), "vectors are not rounded to 8 bits"
    learned = x[:2].clone().requires_grad_()
    linear(learned, weight, choice=DECODING).sum().backward()
    assert learned.grad is not None and not calls


@needs_numba
@pytest.mark.parametrize("activation", [None, ClampedSwiglu(1.7, 2.0)])
def test_experts_with_biases_go_through_torch(activation: Activation | None) -> None:
    torch.manual_seed(3)
    parts = [matrix(32, 64, torch.float32), matrix(32, 64, torch.float32), matrix(64, 32, torch.float32)]
    expert = expert_of([*parts, torch.randn(32), torch.randn(32), torch.randn(64)], activation)
    x_TD = torch.randn(2, 64)
    alone = Selection(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    with torch.inference_mode():
        assert CompiledExperts()(x_TD, [expert], alone, None, DECODING) is None
        assert torch.allclose(expert(x_TD, DECODING), expert(x_TD), atol=1e-5)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_are_loaded_before_the_first_token(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(kernels, "prepare", lambda needed, progress: loaded.extend(needed))
    prepare_decoding(dtype, torch.device("cpu"), lambda module: pytest.fail("those of bfloat16"))
    assert {f"multiply_{FLOATS[dtype].lower()}", "prepare_wide", "products", "swiglu"} <= {each.name for each in loaded}
