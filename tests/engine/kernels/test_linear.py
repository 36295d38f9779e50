"""The widened product equals the plain one, whichever processor runs the tests."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels_for_tests import kernels, needs_integers
from packages_for_tests import needs_numba

import engine.decoder.experts
import engine.kernels.kernel_choice
import engine.kernels.torch_products
from engine.decoder.experts import CompiledExperts, Expert, MoeBlock, grouped
from engine.decoder.routing import NO_EXPERT, Selection, TopK
from engine.errors import OptionError
from engine.families.layer_config import ClampedSwiglu
from engine.kernels.kernel_choice import DECODING
from engine.kernels.linear import addresses, as_bfloat16, kernel_form, linear, linears, plain
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import BITS
from engine.kernels.torch_products import transposed_linear


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(engine.kernels.torch_products, "has_half_arithmetic", lambda: request.param)
    monkeypatch.setattr(engine.kernels.torch_products, "BLOCK_ELEMENTS", 64)  # several blocks even for small matrices
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (9, 16), (2, 5, 16), (0, 16)])
def test_equals_float64(arithmetic: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(21, 16).to(dtype), torch.randn(21).to(dtype)
    with torch.no_grad():
        got = linear(x, weight, bias, DECODING)
    expected = x.double() @ weight.double().T + bias.double()
    assert got.dtype == dtype and got.shape == expected.shape
    assert torch.allclose(got.double(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 3, 9])
def test_transposed_weights_equal_float64(arithmetic: bool, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 16).to(dtype), torch.randn(16, 21).to(dtype), torch.randn(21).to(dtype)
    for added in (None, bias):
        expected = x.double() @ weight.double() + (0.0 if added is None else added.double())
        got = transposed_linear(x, weight, added)
        assert got.dtype == dtype and got.shape == expected.shape
        assert torch.allclose(got.double(), expected, rtol=2e-2, atol=5e-2)


@needs_numba
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs", [51, 64 * 2 + 32 + 7, 2 * 6144 + 32 + 7])  # all widths that a step has; a long vector
def test_compiled_products_equal_float64(threads: int, rows: int, inputs: int) -> None:
    torch.manual_seed(0)
    kernels.use_threads(threads)
    x, weights = torch.randn(rows, inputs).bfloat16(), [torch.randn(count, inputs).bfloat16() for count in (37, 1, 8)]
    y = as_bfloat16(kernels.products(x.data_ptr(), rows, [addresses(w) for w in weights], [37, 1, 8], inputs))
    exact = x.double() @ torch.cat(weights).double().T
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-5 * max(1.0, inputs / 300))
    assert (y == exact.float().bfloat16()).double().mean() > 0.99, "rounded once, from float32"
    for row in range(rows):  # bit-identical, whatever is computed beside it
        alone = kernels.products(x[row].data_ptr(), 1, [addresses(w) for w in weights], [37, 1, 8], inputs)
        assert torch.equal(as_bfloat16(alone)[0], y[row])


@needs_numba
@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_compiled_experts_equal_float64(slots: int, tokens: int) -> None:
    torch.manual_seed(0)
    hidden, width = 24, 77  # no multiple of a block of rows
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    experts = [tuple(torch.randn(shape).bfloat16() for shape in shapes) for _ in range(5)]
    table = kernels.expert_table([([addresses(weight) for weight in expert], width) for expert in experts])
    x = torch.randn(tokens, hidden).bfloat16() * 4  # gates up to ±60: all of exp's range
    chosen = torch.stack([torch.randperm(5)[:slots] for _ in range(tokens)])
    chosen[:, 1:2][::2] = NO_EXPERT
    weights = torch.rand(tokens, slots)
    y = as_bfloat16(kernels.swiglu(x.data_ptr(), table, chosen.numpy(), weights.numpy(), hidden))
    for token in range(tokens):
        wide, exact = x[token].double(), torch.zeros(hidden, dtype=torch.float64)
        for index, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if index != NO_EXPERT:
                gate, up, down = (part.double() for part in experts[index])
                middle = F.silu(gate @ wide) * (up @ wide)
                if kernels.MULTIPLIES_BFLOAT16:
                    middle = middle.bfloat16().double()
                exact += weight * (down @ middle)
        assert torch.allclose(y[token].double(), exact, rtol=2**-8, atol=1e-3)
        of_one = x[token].data_ptr(), table, chosen[token : token + 1].numpy(), weights[token : token + 1].numpy()
        assert torch.equal(as_bfloat16(kernels.swiglu(*of_one, hidden))[0], y[token])


def rounded_to_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Round vectors as the kernels do for low-bit weights: the largest of each 32 values becomes 127."""
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(127.0).div(largest)  # `127 / largest` would be 127 times a rounded reciprocal
    return ((groups * inverse).round().double() * (largest / 127).double()).flatten(-2)


@needs_integers
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [128, 640, 1536, 12800])  # less than a chunk, a chunk and a rest, chunks, a long vector
def test_compiled_products_of_few_bits(bits: int, group: int, inputs: int) -> None:
    torch.manual_seed(0)
    x, outputs = torch.randn(7, inputs).bfloat16(), [36, 4, 64]
    weights = [quantise(torch.randn(count, inputs), bits, group, torch.bfloat16) for count in outputs]
    assert kernel_form(kernels, weights) == (bits, group)
    y = torch.cat(linears(x, weights, (None,) * 3, DECODING), dim=-1)
    alone = [torch.cat(linears(row[None], weights, (None,) * 3, DECODING), dim=-1) for row in x]
    exact = rounded_to_8_bits(x) @ torch.cat([weight.dequantised(torch.float64) for weight in weights]).T
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))
    assert (y == exact.float().bfloat16()).double().mean() > 0.97, "summed up in float32, rounded once"
    assert torch.equal(torch.cat(alone), y), "to the bit, whatever is computed beside it"


@needs_integers
@pytest.mark.parametrize("bits", BITS)
def test_compiled_experts_of_few_bits(bits: int) -> None:
    torch.manual_seed(0)
    hidden, width, slots = 160, 96, 2
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    experts = [Expert(*(quantise(torch.randn(shape) / 8, bits, 32, torch.bfloat16) for shape in shapes)) for _ in range(4)]
    x, weights = torch.randn(5, hidden).bfloat16(), torch.rand(5, slots)
    chosen = torch.stack([torch.randperm(4)[:slots] for _ in range(5)])
    chosen[1, 0] = NO_EXPERT
    compiled = CompiledExperts()

    def made(rows: slice) -> torch.Tensor | None:
        return compiled(x[rows], experts, Selection(chosen[rows], weights[rows]), choice=DECODING)

    y, alone = made(slice(None)), [made(slice(t, t + 1)) for t in range(5)]
    assert y is not None
    for token in range(5):
        wide, exact = rounded_to_8_bits(x[token]), torch.zeros(hidden, dtype=torch.float64)
        for index, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if index != NO_EXPERT:
                gate, up, down = (part.dequantised(torch.float64) for part in experts[index].projections)
                exact += weight * (down @ rounded_to_8_bits(F.silu(gate @ wide) * (up @ wide)))
        # A value halfway between two may be rounded the other way in float32.
        assert torch.allclose(y[token].double(), exact, rtol=2**-7, atol=2e-3 * float(exact.abs().max()))
        assert alone[token] is not None and torch.equal(alone[token][0], y[token])


@needs_integers
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_compiled_products_of_few_bits_hide_no_overflow(value: float) -> None:
    x = torch.ones(1, 64).bfloat16()
    x[0, 40] = value
    assert not linear(x, quantise(torch.ones(4, 64), 8, 32, torch.bfloat16), choice=DECODING).isfinite().any()


@needs_numba
@pytest.mark.parametrize("bits", [16, *BITS])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 32), (16, 64), (97, 96), (113, 2048 + 32), (200, 160)])
def test_compiled_products_of_many_rows(rows: int, inputs: int, threads: int, bits: int) -> None:
    """The rows give panels of each width, empty places in the last one, and inputs that exceed one block."""
    torch.manual_seed(0)
    kernels.use_threads(threads)
    x, outputs = torch.randn(rows, inputs).bfloat16(), [36, 4, 300]
    plains = [torch.randn(count, inputs).bfloat16() for count in outputs]
    weights = plains if bits == 16 else [quantise(each.float(), bits, 32, torch.bfloat16) for each in plains]
    form = kernel_form(kernels, weights)
    assert form is not None and all(kernels.multiplies_many(count, inputs) for count in outputs)

    def products(x: torch.Tensor) -> torch.Tensor:
        where = x.data_ptr(), len(x), [addresses(weight) for weight in weights], outputs, inputs, form
        return as_bfloat16(kernels.products(*where, many=True))

    y = products(x)
    exact = x.double() @ torch.cat([plain(weight, torch.bfloat16) for weight in weights]).double().T
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-5 * inputs)
    assert (y == exact.float().bfloat16()).double().mean() > 0.99, "rounded once, from float32"
    some = torch.randperm(rows)[: rows // 2 + 1]
    assert torch.equal(products(x[some]), y[some]), "to the bit, whatever is computed beside it"


@needs_numba
@pytest.mark.parametrize("bits", [16, 8, 3])
@pytest.mark.parametrize("kind", ["plain", "scaled inputs", "clamped, with biases"])
def test_compiled_experts_of_many_tokens(kind: str, bits: int) -> None:
    """Experts have no token, a few, or more than fit into one panel; some slots are empty; one token has no expert."""
    torch.manual_seed(0)
    tokens, hidden, width, count = 150, 64, 160, 5
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    swiglu = ClampedSwiglu(1.7, 2.0) if kind.startswith("clamped") else None
    biases = [torch.randn(width), torch.randn(width), torch.randn(hidden)] if swiglu else []
    experts = [
        Expert(
            *(
                torch.randn(shape).bfloat16() / 4
                if bits == 16
                else quantise(torch.randn(shape) / 4, bits, 32, torch.bfloat16)
                for shape in shapes
            ),
            *(bias.bfloat16() for bias in biases),
            swiglu=swiglu,
        )
        for _ in range(count)
    ]
    x = torch.randn(tokens, hidden).bfloat16()
    chosen = torch.stack([torch.randint(1, count, (tokens,)), torch.zeros(tokens, dtype=torch.int64)], dim=1)
    chosen[120:, 1], chosen[chosen == 3], chosen[7] = NO_EXPERT, 4, NO_EXPERT  # 120 of expert 0, none of expert 3
    weights = torch.rand(tokens, 2)
    scales = torch.rand(tokens, 2) if kind == "scaled inputs" else None
    compiled = CompiledExperts()

    def made(some: torch.Tensor) -> torch.Tensor:
        own = None if scales is None else scales[some]
        with torch.no_grad():
            y = compiled(x[some].contiguous(), experts, Selection(chosen[some], weights[some]), own, DECODING)
        assert y is not None
        return y

    y = made(torch.arange(tokens))
    exact = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for slot in range(2):
            if (index := int(chosen[token, slot])) != NO_EXPERT:
                scaled = x[token] if scales is None else (x[token] * scales[token, slot]).bfloat16()
                wide = [plain(part, torch.bfloat16).double() for part in experts[index].projections]
                gate, up = (wide[at] @ scaled.double() + (wide[3 + at] if biases else 0) for at in (0, 1))
                if swiglu is None:
                    middle = F.silu(gate) * up
                else:
                    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit) + 1
                    middle = up * gate * torch.sigmoid(swiglu.alpha * gate)
                down = wide[2] @ middle.bfloat16().double() + (wide[5] if biases else 0)
                exact[token] += weights[token, slot] * down
    assert torch.equal(y[7], torch.zeros(hidden).bfloat16())
    assert torch.allclose(y.double(), exact, rtol=2**-7, atol=2e-3 * float(exact.abs().max()))
    some = torch.randperm(tokens)[:100]
    assert torch.equal(made(some), y[some]), "to the bit, whatever is computed beside it"


@needs_numba
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_panels_hide_no_overflow_and_keep_it_to_itself(value: float) -> None:
    x = torch.ones(80, 64).bfloat16()
    x[40, 3] = value
    finite = linear(x, torch.ones(4, 64).bfloat16(), choice=DECODING).isfinite()
    assert not finite[40].any() and finite[:40].all() and finite[41:].all()


@needs_numba
def test_matrices_that_panels_do_not_take_go_through_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(80, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    assert torch.equal(linear(x, weight, choice=DECODING), F.linear(x, weight))


@needs_numba
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", BITS)
def test_compiled_dequantising_is_the_plain_one(bits: int, group: int) -> None:
    torch.manual_seed(0)
    weight = quantise(torch.randn(5, 256), bits, group, torch.bfloat16)
    engine.kernels.kernel_choice.prepare_decoding(torch.bfloat16, torch.device("cpu"))
    assert torch.equal(plain(weight, torch.bfloat16), weight.dequantised(torch.bfloat16))


@pytest.mark.parametrize("change", ["outputs", "group", "scales"])
def test_few_bits_that_the_kernels_do_not_know(change: str) -> None:
    torch.manual_seed(0)
    outputs, group = 6 if change == "outputs" else 8, 16 if change == "group" else 32
    weight = quantise(torch.randn(outputs, 64), 4, group, torch.float16 if change == "scales" else torch.bfloat16)
    x = torch.randn(2, 64).bfloat16()
    wide = weight.dequantised(torch.bfloat16)
    assert torch.equal(linear(x, weight, choice=DECODING), linear(x, wide, choice=DECODING))


@needs_numba
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-40])
def test_the_compiled_kernel_hides_no_overflow(value: float) -> None:
    x, weight = torch.tensor([value, 1.0]).bfloat16(), torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
    y = as_bfloat16(kernels.products(x.data_ptr(), 1, [addresses(weight)], [2], 2))[0]
    expected = (weight.double() @ x.double()).float().bfloat16()
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_several_weights_at_once(arithmetic: bool, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 16).bfloat16()
    weights, biases = [torch.randn(n, 16).bfloat16() for n in (6, 4)], [torch.randn(6).bfloat16(), None]
    with torch.no_grad():
        together = linears(x, weights, biases, DECODING)
        alone = [linear(x, weight, bias, DECODING) for weight, bias in zip(weights, biases, strict=True)]
    assert [y.shape for y in together] == [(rows, 1, 6), (rows, 1, 4)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("rows", [1, 6])
def test_without_the_kernels_torch_serves(arithmetic: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 16).bfloat16(), torch.randn(21, 16).bfloat16()
    experts = [Expert(*(torch.randn(shape).bfloat16() / 4 for shape in ((24, 16), (24, 16), (16, 24)))) for _ in range(3)]
    block = MoeBlock(torch.randn(3, 16).bfloat16(), experts, TopK(2, True), shared=experts[0])
    with torch.no_grad():
        fast = linear(x, weight, choice=DECODING), block(x, DECODING), experts[1](x, DECODING)
        monkeypatch.setattr(engine.kernels.kernel_choice, "_load_kernels", lambda: None)
        slow = linear(x, weight, choice=DECODING), block(x, DECODING), experts[1](x, DECODING)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=5e-2)


def test_weights_that_moved_are_looked_up_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16).bfloat16()
    block = MoeBlock(torch.randn(2, 16), [Expert(*torch.randn(3, 16, 16) / 4) for _ in range(2)], TopK(1, True)).bfloat16()

    def agrees() -> bool:
        with torch.no_grad():
            compiled = block(x, DECODING).float()
            expected = grouped(x, block.routing(x @ block.router_ND.T), block.experts).float()
        return bool((compiled - expected).norm() < 0.02 * expected.norm())

    assert agrees()
    for parameter in block.parameters():
        parameter.data = parameter.data * 2
    assert agrees()
    block.router_ND.data = block.router_ND.data[:1]
    block.experts = block.experts[1:]
    assert agrees()


def test_gradients(arithmetic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(21, 16).bfloat16().requires_grad_()
    linear(x, weight).float().square().sum().backward()
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (wide_x @ wide_weight.T).square().sum().backward()
    assert torch.allclose(x.grad.double(), wide_x.grad, rtol=3e-2, atol=2.0)
    assert torch.allclose(weight.grad.double(), wide_weight.grad, rtol=3e-2, atol=2.0)


def test_transposed_products_equal_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.decoder.experts, "multiplies_bfloat16", lambda _: True)
    torch.manual_seed(0)
    gate, up, down = (torch.randn(shape).bfloat16() / 4 for shape in ((24, 16), (24, 16), (16, 24)))
    x = torch.randn(20, 16).bfloat16()
    with torch.no_grad():
        got = Expert(gate, up, down)(x)
    wide = x.double()
    exact = (F.silu(wide @ gate.double().T) * (wide @ up.double().T)) @ down.double().T
    assert got.shape == (20, 16) and torch.allclose(got.double(), exact, rtol=2e-2, atol=2e-2)


def test_training_pads_tokens_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of tokens would be a new shape for oneDNN; padded ones have few, and add nothing to any gradient."""
    torch.manual_seed(0)
    weights = [torch.randn(shape).bfloat16() / 4 for shape in ((24, 16), (24, 16), (16, 24))]
    x, seen, gradients = torch.randn(70, 16).bfloat16(), [], []
    for pads in (False, True):
        monkeypatch.setattr(engine.decoder.experts, "multiplies_bfloat16", lambda _, pads=pads: pads)
        expert, own = Expert(*(weight.clone() for weight in weights)), x.clone().requires_grad_()
        monkeypatch.setattr(
            expert, "units", lambda rows, choice, real=expert.units: seen.append(len(rows)) or real(rows, choice)
        )
        for parameter in expert.parameters():
            parameter.requires_grad_(True)
        made = expert(own)
        assert made.shape == x.shape
        made.float().square().sum().backward()
        gradients.append([own.grad, *(parameter.grad for parameter in expert.parameters())])
    assert seen == [70, 128]
    for padded, whole in zip(*gradients, strict=True):
        assert torch.allclose(padded.float(), whole.float(), rtol=2e-2, atol=2e-2 * float(whole.float().abs().max()))


def test_outside_decoding_the_kernels_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kernels.kernel_choice, "_load_kernels", lambda: pytest.fail("loaded"))
    with torch.no_grad():
        linear(torch.randn(1, 16).bfloat16(), torch.randn(21, 16).bfloat16())


@needs_numba
def test_what_decodes_is_tried_and_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine.kernels.kernel_choice._load_kernels.__wrapped__
    right = kernels.products

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return right(*arguments, **options)

    for verdict, products in ((kernels, right), (None, slow)):
        monkeypatch.setattr(kernels, "cache_directory", lambda made=tmp_path / products.__name__: made)
        kernels.cache_directory().mkdir()
        monkeypatch.delenv(engine.kernels.kernel_choice.KERNELS, raising=False)
        monkeypatch.setattr(kernels, "products", products)
        assert load() is verdict
        monkeypatch.setattr(kernels, "products", lambda *given, **options: pytest.fail("the verdict was kept"))
        assert load() is verdict
        monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "compiled")
        assert load() is kernels
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "torch")
    assert load() is None
    monkeypatch.setenv(engine.kernels.kernel_choice.KERNELS, "fast")
    with pytest.raises(OptionError, match="COMPRESS_KERNELS is 'fast'; it must be auto, compiled or torch"):
        load()
