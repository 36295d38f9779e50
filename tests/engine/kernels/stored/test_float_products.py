"""Products with packed floats equal products with matrices that a second, plain implementation makes of the same bytes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels, needs_integers
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.experts import CompiledExperts, Expert
from engine.decoder.routing import Selection
from engine.kernels.kernel_choice import DECODING, PROMPT
from engine.kernels.linear import expert_form, kernel_form, linear, linears, plain
from engine.kernels.stored.float_weight import FLOAT_TYPES, FloatWeight
from engine.kernels.stored.quantized_weight import quantise

pytestmark = needs_numba
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """Return a number in E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa, and one NaN."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.nan if byte & 127 == 127 else -size if byte & 128 else size


BYTES = np.array([e4m3(byte) for byte in range(256)])
CODES = np.array([*E2M1, *(-size for size in E2M1)])


def naive(values: Tensor, scales: Tensor, kind: str, block: tuple[int, int] | None, divisor: float) -> Tensor:
    """Return the matrix in float64."""
    if kind == "FP8":
        assert block is not None
        wide = np.kron(scales.numpy().astype(float), np.ones(block))[: len(values), : values.shape[1]]
        return torch.from_numpy(BYTES[values.numpy()] * wide)
    pairs = np.stack([values.numpy() & 15, values.numpy() >> 4], axis=-1).reshape(len(values), -1)
    group = 32 if kind == "MXFP4" else 16
    sizes = 2.0 ** (scales.numpy().astype(float) - 127) if kind == "MXFP4" else BYTES[scales.numpy()]
    return torch.from_numpy(CODES[pairs] * np.repeat(sizes, group, axis=1) / divisor)


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0, *, gap: int = 0) -> FloatWeight:
    """Return a matrix of random bytes. gap: bytes between rows."""
    generator, block, divisor = torch.Generator().manual_seed(seed), None, 1.0
    size = inputs if kind == "FP8" else inputs // 2
    values = torch.randint(0, 256, (outputs, size + gap), generator=generator).to(torch.uint8)[:, :size]
    if kind == "FP8":
        values[values & 127 == 127] = 0
        block = 8, 128
        scales = torch.rand(-(-outputs // 8), -(-inputs // 128), generator=generator) * 0.01
    elif kind == "MXFP4":
        scales = torch.randint(118, 124, (outputs, inputs // 32), generator=generator).to(torch.uint8)
    else:
        scales, divisor = torch.randint(1, 100, (outputs, inputs // 16), generator=generator).to(torch.uint8), 37.0
    return made(values, scales, kind, inputs, block, divisor)


def made(
    values: Tensor, scales: Tensor, kind: str, inputs: int, block: tuple[int, int] | None = None, divisor: float = 1.0
) -> FloatWeight:
    def dequantized(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return naive(values, scales, kind, block, divisor).float().to(dtype)

    return FloatWeight(values, scales, kind, inputs, dequantized, block=block, divisor=divisor)


def exact(weight: FloatWeight) -> Tensor:
    return naive(weight.values_OB, weight.scales_PQ, weight.kind, weight.block, weight.divisor)


def inputs_of(kind: str) -> int:
    """Return a number of inputs that leaves rests after whole steps of a product."""
    return 5 * 128 + 64 if kind == "FP8" else 2 * 512 + 3 * 64 + 32


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@pytest.mark.parametrize("gap", [0, 7])
def test_exact_products_are_those_of_the_naive_matrix(kind: str, gap: int) -> None:
    """In float32, whose kernels processors without pairs of bfloat16 take."""
    inputs = inputs_of(kind)
    weight, x = weight_of(kind, 12, inputs, gap=gap), torch.randn(7, inputs)
    expected = x.double() @ exact(weight).T
    prepare = "prepare_wide" if kind == "FP8" else "prepare_wide_halves"
    place, record = weight.addresses
    prepared, y = torch.empty_like(x), torch.zeros(7, 12)
    for row in range(7):
        kernels.KERNELS[prepare](x[row].data_ptr(), inputs, prepared[row].data_ptr())
    for rows in (1, 2, 3, 7):
        y.zero_()
        multiply = kernels.KERNELS[f"multiply_exact_{kind.lower()}"]
        multiply(place, record, 1, 12, inputs, prepared.data_ptr(), rows, y.data_ptr(), 12)
        assert float((y[:rows] - expected[:rows]).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert not y[rows:].any()


def integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of at most 2¹³ that each 16 values become, and their powers of two."""
    groups = x.double().view(-1, 16)
    _, exponent = torch.frexp(groups.abs().amax(1, keepdim=True))  # the largest value is below 2^exponent
    step = 2.0 ** (exponent.double() - 13)
    return (groups / step).round(), step


@needs_integers
def test_vectors_become_pairs_of_bytes() -> None:
    """In order of the even places of each 128 values, then the odd ones; behind them in each 32."""
    torch.manual_seed(0)
    inputs = 2 * 128 + 32
    x = torch.randn(inputs) * 10.0 ** torch.randint(-3, 4, (inputs // 16,)).repeat_interleave(16)
    x[16:32], x[33] = 0.0, 2.0**-60
    target = torch.zeros(inputs * 5 // 2, dtype=torch.uint8)
    kernels.KERNELS["prepare_rounded_halves"](x.data_ptr(), inputs, target.data_ptr())
    high, low = (part.view(torch.int8).double() for part in target[: 2 * inputs].split(inputs))
    halves, offsets = (part.view(torch.float32).double() for part in target[2 * inputs :].split(inputs // 4))
    expected, step = integers(x)
    expected[1], step[1] = 0.0, 0.0
    in_order = torch.cat(
        [part.view(-1, 2).T.reshape(-1) for part in (*expected.reshape(-1)[:256].split(128), expected[-2:])]
    )
    assert torch.equal(128 * high + low, in_order)
    assert torch.equal(halves[step[:, 0] > 0], step[step[:, 0] > 0, 0] / 2)
    assert torch.equal(offsets, halves * expected.sum(1) * 12)


@needs_integers
@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
@pytest.mark.parametrize("gap", [0, 7])
def test_products_of_integers_are_those_of_the_naive_matrix(kind: str, gap: int) -> None:
    """As processors with AVX2, AVX512-VNNI or dot products of ARM multiply, if they have no pairs of bfloat16."""
    torch.manual_seed(0)
    inputs = inputs_of(kind)
    weight, x = weight_of(kind, 12, inputs, gap=gap), torch.randn(7, inputs)
    rounded, step = integers(x)
    expected = (rounded * step).view(7, inputs) @ exact(weight).T
    place, record = weight.addresses
    prepared, y = torch.empty(7, inputs * 5 // 2, dtype=torch.uint8), torch.zeros(7, 12)
    for row in range(7):
        kernels.KERNELS["prepare_rounded_halves"](x[row].data_ptr(), inputs, prepared[row].data_ptr())
    for rows in (1, 2, 3, 7):
        y.zero_()
        multiply = kernels.KERNELS[f"multiply_rounded_{kind.lower()}"]
        multiply(place, record, 1, 12, inputs, prepared.data_ptr(), rows, y.data_ptr(), 12)
        assert float((y[:rows] - expected[:rows]).abs().max()) <= 1e-6 * float(expected.abs().max())
        assert not y[rows:].any()
    assert float((y - x.double() @ exact(weight).T).abs().max()) <= 2e-4 * float(expected.abs().max())


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@pytest.mark.parametrize(("gap", "outputs", "further"), [(0, 1028, 0), (7, 1028, 0), (0, 36, 12 * 1024)])
def test_products_are_those_of_the_naive_matrix(gap: int, outputs: int, further: int, kind: str) -> None:
    """Nothing but the result is rounded, because vectors are bfloat16; and rows do not depend on what is beside them.

    further: inputs that make the vectors long.
    """
    inputs = inputs_of(kind) + further
    weight, x = weight_of(kind, outputs, inputs, gap=gap), torch.randn(7, inputs).bfloat16()
    expected = x.double() @ exact(weight).T
    assert kernel_form(kernels, [weight]) == (kind, kernels.WHOLE_ROWS)
    y = linear(x, weight, choice=DECODING)
    # A bfloat16 has eight bits, and a sum of about 1,000 products in float32 loses less than 1e-5 of its largest terms.
    bound = expected.abs() / 256 + 1e-5 * (x.double().abs() @ exact(weight).abs().T)
    assert bool(((y.double() - expected).abs() <= bound).all())
    for count in (1, 2, 3):
        assert torch.equal(torch.cat([linear(rows, weight, choice=DECODING) for rows in x.split(count)]), y)


@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_widened_matrices_are_the_naive_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(kind, 36, inputs_of(kind), gap=3)
    monkeypatch.setattr("engine.kernels.linear.loaded_kernels", lambda: kernels)
    # Each weight is rounded once more after its product with the scale in float32, in both.
    assert torch.equal(plain(weight, torch.bfloat16), weight.dequantised(torch.bfloat16))


@needs_numba
@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_prompts_are_multiplied_with_widened_rows(kind: str) -> None:
    weight, x = weight_of(kind, 132, inputs_of(kind)), torch.randn(40, inputs_of(kind)).bfloat16()
    wide = weight.dequantised(torch.bfloat16)
    assert torch.equal(linear(x, weight, choice=PROMPT), linear(x, wide, choice=PROMPT))


def every_way(weight: FloatWeight, x: Tensor) -> list[Tensor]:
    """Return products with one vector in which all values are equal, in both kinds of kernels."""
    (outputs, inputs), (place, record), y = weight.shape, weight.addresses, torch.zeros(weight.shape[0])
    multiply = kernels.KERNELS[f"multiply_exact_{weight.kind.lower()}"]
    multiply(place, record, 1, outputs, inputs, x.data_ptr(), 1, y.data_ptr(), outputs)
    return [linear(x[None].bfloat16(), weight, choice=DECODING)[0].double(), y.double()]


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal to the bit, NaN included."""
    return np.array_equal(found.numpy(), expected.numpy(), equal_nan=True)


def test_every_byte_is_the_format_s() -> None:
    """Each of the 256 bytes is the only one of its row that is not zero, at all places of a unit; NaN is one of them."""
    values = torch.zeros(256, 192, dtype=torch.uint8)
    rows = torch.arange(256)
    values[rows, rows % 192] = rows.to(torch.uint8)
    for found in every_way(made(values, torch.ones(1, 1), "FP8", 192, (256, 192)), torch.ones(192)):
        assert same(found, torch.from_numpy(BYTES))


def test_every_scale_is_the_format_s() -> None:
    """A row of 32 weights has one of the 256 scales of MXFP4, and one of 16 has one of NVFP4."""
    ones, scales = torch.full((256, 16), 0x22, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)[:, None]
    powers = 2.0 ** (torch.arange(256).double() - 127)
    powers[255] = math.nan
    kept = torch.arange(256) != 254  # with 2¹²⁷, the parts of a sum of integers exceed float32
    for found in every_way(made(ones, scales, "MXFP4", 32), torch.full((32,), 2.0**-5)):
        assert same(found[kept], powers.float().double()[kept])
    ones[:, 8:] = 0
    for found in every_way(made(ones, scales.repeat(1, 2) & 127, "NVFP4", 32), torch.full((32,), 2.0**-4)):
        assert same(found, torch.from_numpy(BYTES[np.arange(256) & 127]))


def test_every_half_of_a_byte_is_the_format_s() -> None:
    values, scales = torch.zeros(64, 48, dtype=torch.uint8), torch.full((64, 3), 127, dtype=torch.uint8)
    for row in range(64):  # each code at four places, two of them in the rest behind a unit
        place = (row * 7) % 96
        values[row, place // 2] = (row % 16) << 4 * (place % 2)
    for found in every_way(made(values, scales, "MXFP4", 96), torch.ones(96)):
        assert same(found, torch.from_numpy(CODES[np.arange(64) % 16]))


def summed(experts: list[Expert], x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what chosen experts make of tokens, by torch in float32."""
    wide = [Expert(*(weight.dequantised(torch.float32) for weight in expert.projections)) for expert in experts]  # type: ignore[union-attr,operator]
    rows = []
    for token, own, shares in zip(x, chosen, weights, strict=True):
        outputs = [wide[int(e)](token[None].float())[0] * share for e, share in zip(own, shares, strict=True)]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "kinds", [("MXFP4",) * 3, ("FP8",) * 3, ("FP8", "FP8", "MXFP4"), pytest.param(("NVFP4", 4, "FP8"), marks=needs_integers)]
)
def test_experts_are_multiplied_as_stored(kinds: tuple[str | int, ...]) -> None:
    """In decoding and in prompts, also where the matrices of one expert have different types; each token is as if alone."""
    shapes = ((128, 256), (128, 256), (256, 128))

    def matrix(kind: str | int, shape: tuple[int, int], seed: int) -> object:
        if isinstance(kind, int):
            return quantise(torch.randn(*shape) * 0.05, kind, 32, torch.bfloat16)
        own = weight_of(kind, *shape, seed, gap=16)
        return made(own.values_OB, own.scales_PQ, kind, shape[1], own.block, 37.0 if kind == "NVFP4" else 1.0)

    experts = [
        Expert(*(matrix(kind, shape, 3 * e + p) for p, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))))  # type: ignore[arg-type]
        for e in range(3)
    ]
    weights = [weight for expert in experts for weight in expert.projections]
    assert expert_form(kernels, weights) == (kernels.MIXED if len(set(kinds)) > 1 else (kinds[0], kernels.WHOLE_ROWS))
    for tokens, choice in ((5, DECODING), (40, PROMPT)):
        torch.manual_seed(tokens)
        x, shares = torch.randn(tokens, 256).bfloat16() / 8, torch.rand(tokens, 2)
        chosen = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])
        y = CompiledExperts()(x, experts, Selection(chosen, shares), choice=choice)
        assert y is not None
        expected = summed(experts, x, chosen, shares)
        assert float((y.float() - expected).norm() / expected.norm()) < 0.01
        if choice is DECODING:
            for row in range(tokens):
                own = slice(row, row + 1)
                alone = CompiledExperts()(x[own], experts, Selection(chosen[own], shares[own]), choice=choice)
                assert alone is not None and torch.equal(alone[0], y[row])


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
@pytest.mark.parametrize("up_first", [False, True])
def test_rows_of_gate_and_up_in_turns_are_multiplied_as_apart(kind: str, up_first: bool) -> None:
    """To the bit: as GPT-OSS stores them, and each matrix alone. Blocks of units begin and end within an expert."""
    width, inputs = 96, 320
    apart, in_turns = list[Expert](), list[Expert]()
    for seed in range(3):
        stack, down = weight_of(kind, 2 * width, inputs, seed), weight_of(kind, inputs, width, seed + 10)
        views = [
            made(stack.values_OB[start::2], stack.scales_PQ[start::2], kind, inputs, divisor=stack.divisor)
            for start in ((1, 0) if up_first else (0, 1))
        ]
        copies = [
            made(view.values_OB.contiguous(), view.scales_PQ.contiguous(), kind, inputs, divisor=view.divisor)
            for view in views
        ]
        in_turns.append(Expert(*views, down))
        apart.append(Expert(*copies, down))
    x, shares = torch.randn(5, inputs).bfloat16() / 8, torch.rand(5, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(5)])
    found = [CompiledExperts()(x, own, Selection(chosen, shares), choice=DECODING) for own in (in_turns, apart)]
    assert found[0] is not None and found[1] is not None and torch.equal(*found)


def test_matrices_of_several_types_share_no_call() -> None:
    x, weights = torch.randn(3, 256).bfloat16(), [weight_of(kind, 8, 256) for kind in FLOAT_TYPES]
    assert kernel_form(kernels, weights) is None
    together = linears(x, weights, [None] * 3, DECODING)
    assert all(map(torch.equal, together, (linear(x, weight, choice=DECODING) for weight in weights)))


def test_a_copy_has_addresses_of_its_own() -> None:
    """And no product reads the weight that was copied."""
    weight, x = weight_of("MXFP4", 8, 256), torch.randn(2, 256).bfloat16()
    expected, before = linear(x, weight, choice=DECODING), weight.addresses
    copied = copy.deepcopy(weight)
    weight.values_OB.zero_()
    assert torch.equal(linear(x, copied, choice=DECODING), expected)
    assert not {*before} & {*copied.addresses} and weight.addresses == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_no_overflow_is_hidden(kind: str, value: float) -> None:
    x = torch.ones(1, 256).bfloat16()
    x[0, 40] = value
    assert not linear(x, weight_of(kind, 4, 256), choice=DECODING).isfinite().any()


def test_other_shapes_are_not_served() -> None:
    assert kernel_form(kernels, [weight_of("MXFP4", 6, 64)]) is None, "rows are multiplied four at a time"
    values = torch.zeros(8, 96, dtype=torch.uint8)
    assert kernel_form(kernels, [made(values, torch.ones(1, 1), "FP8", 96, (8, 128))]) is None, "units have 64 weights"
    values = torch.zeros(8, 256, dtype=torch.uint8)
    for columns in (64, 192):
        scales = torch.ones(1, -(-256 // columns))
        assert kernel_form(kernels, [made(values, scales, "FP8", 256, (8, columns))]) is None, "a scale is for 128 or more"
    assert set(FLOAT_TYPES) == set(kernels.FLOAT_KINDS)
