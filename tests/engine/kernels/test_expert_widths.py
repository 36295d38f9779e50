"""Experts of differing widths: the compiled kernels and torch give what a formula in float64 gives, without padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels, needs_integers
from packages_for_tests import needs_numba
from test_linear import rounded_to_8_bits
from torch import Tensor

from engine.decoder.experts import CompiledExperts, Expert, MoeBlock, expert_of, gated, grouped, sparse
from engine.decoder.routing import NO_EXPERT, Selection, TopK
from engine.families.layer_config import ClampedSwiglu
from engine.kernels.kernel_choice import DECODING, PROMPT, TORCH
from engine.kernels.linear import plain
from engine.kernels.stored.quantized_weight import QuantizedWeight, Weight, quantise

CLAMPED = ClampedSwiglu(1.7, 2.0)
PLAIN, SCALED, BIASED, UNGATED = "plain", "scaled inputs", "clamped, with biases", "without a gate"
ODD, OF_FOUR = (77, 1, 300, 31, 150, 6), (76, 4, 300, 32, 148, 12)
"""Widths of plain experts: any, and those that the kernels for many tokens take."""
LOW_BIT = [(bits, group) for bits in (8, 4) for group in (32, 128)]


def some_experts(hidden: int, widths: Sequence[int], form: tuple[int, int] = (16, 1), kind: str = PLAIN) -> list[Expert]:
    """Return random experts. Memory beside the plain matrices is NaN."""
    swiglu = CLAMPED if kind == BIASED else None

    def weight(outputs: int, inputs: int) -> Weight:
        made = torch.randn(outputs, inputs) * inputs**-0.5
        if form[0] != 16:
            return quantise(made, *form, torch.bfloat16)
        around = torch.full((outputs * inputs + 4096,), torch.nan).bfloat16()
        own = around[2048 : 2048 + outputs * inputs].view(outputs, inputs)
        return own.copy_(made)

    experts = []
    for width in widths:
        matrices = [*(weight(width, hidden) for _ in range(1 + (kind != UNGATED))), weight(hidden, width)]
        biases = [torch.randn(size).bfloat16() for size in (width, width, hidden)] if swiglu else []
        experts.append(expert_of([*matrices, *biases], swiglu))
    return experts


def exact(expert: Expert, x_D: Tensor, *, many: bool = False) -> Tensor:
    """Return an expert's output in float64, with vectors rounded where the kernels round them."""
    is_low_bit = isinstance(expert.up_FD, QuantizedWeight) and not many
    halves = many or kernels.MULTIPLIES_BFLOAT16
    parts = [plain(part, torch.bfloat16 if many else torch.float64).double() for part in expert.projections]
    if is_low_bit:
        parts[: 2 + expert.has_gate] = [
            part.dequantised(torch.float64) for part in expert.projections[: 2 + expert.has_gate]
        ]
    matrices, biases = parts[: 2 + expert.has_gate], parts[2 + expert.has_gate :]
    *ins, down = matrices
    x = rounded_to_8_bits(x_D) if is_low_bit else x_D.double()
    units = [matrix @ x + (biases[place] if biases else 0) for place, matrix in enumerate(ins)]
    middle = gated(*units, expert.swiglu) if expert.has_gate else units[0].clamp_min(0.0) ** 2
    middle = rounded_to_8_bits(middle) if is_low_bit else middle.bfloat16().double() if halves else middle
    return down @ middle + (biases[2] if biases else 0)


def check(experts: list[Expert], tokens: int, kind: str) -> None:
    """Compare chosen experts of some tokens with the formula, and tokens of one slot with the expert by itself, bit by bit.

    No token chooses the last expert, which is NaN. Some slots are empty, and the first token has no expert.
    """
    many, hidden, count = tokens > DECODING.max_few_rows, experts[0].hidden_size, len(experts) - 1
    for weight in experts[-1].projections:
        (weight.scales_OC if isinstance(weight, QuantizedWeight) else weight.data).fill_(torch.nan)
    x_TD, weights_TS = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 3)
    chosen_TS = torch.stack([torch.randperm(count)[:3] for _ in range(tokens)])
    if tokens > 1:
        chosen_TS[::3, 1], chosen_TS[1::4, 1:], chosen_TS[0] = NO_EXPERT, NO_EXPERT, NO_EXPERT
    weights_TS[1::4] = 1.0
    scales_TS = torch.rand(tokens, 3) if kind == SCALED else None
    compiled = CompiledExperts()
    with torch.no_grad():
        y_TD = compiled(x_TD, experts, Selection(chosen_TS, weights_TS), scales_TS, DECODING)
    assert y_TD is not None and y_TD.isfinite().all()
    expected_TD = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, (row, weights) in enumerate(zip(chosen_TS.tolist(), weights_TS.tolist(), strict=True)):
        for slot, (index, weight) in enumerate(zip(row, weights, strict=True)):
            if index != NO_EXPERT:
                x_D = x_TD[token] if scales_TS is None else x_TD[token].float() * scales_TS[token, slot]
                expected_TD[token] += weight * exact(experts[index], x_D.bfloat16() if many else x_D, many=many)
    assert torch.allclose(y_TD.double(), expected_TD, rtol=2**-7, atol=4e-3 * float(expected_TD.abs().max()))
    if kind != SCALED and tokens > 1:
        for index in set(chosen_TS[1::4, 0].tolist()):
            own_T = (chosen_TS[1::4, 0] == index).nonzero()[:, 0] * 4 + 1
            alone = Selection(torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
            with torch.no_grad():
                own_TD = CompiledExperts()(x_TD, (experts[index],), alone, choice=DECODING)
            assert own_TD is not None and torch.equal(own_TD[own_T], y_TD[own_T])


@needs_numba
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [PLAIN, SCALED, BIASED, UNGATED])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_a_few_tokens(tokens: int, kind: str, threads: int) -> None:
    torch.manual_seed(tokens)
    kernels.use_threads(threads)
    check(some_experts(200, (*ODD, 9), kind=kind), tokens, kind)


@needs_integers
@pytest.mark.parametrize("form", LOW_BIT)
@pytest.mark.parametrize("kind", [PLAIN, SCALED, BIASED, UNGATED])
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_few_tokens_and_low_bit_weights(tokens: int, kind: str, form: tuple[int, int]) -> None:
    """Widths are less than a chunk of 512, a chunk with a rest, and whole chunks, in whole groups."""
    torch.manual_seed(tokens)
    widths = [units * max(form[1], 32) for units in ((3, 1, 20, 2, 16, 5) if form[1] == 32 else (1, 5, 4, 2, 8))]
    check(some_experts(256, (*widths, form[1]), form, kind), tokens, kind)


@needs_numba
def test_widths_of_a_few_units_share_blocks_of_rows() -> None:
    torch.manual_seed(0)
    check(some_experts(64, (1, 2, 3, 5, 1, 90, 1, 1)), 40, PLAIN)


@contextmanager
def replaced(address_1: Any, function: Any) -> Iterator[None]:
    """Put a function's address into a table of kernels for a while."""
    before = address_1.copy()
    address_1[:] = cast(function, c_void_p).value
    try:
        yield
    finally:
        address_1[:] = before


@needs_numba
def test_every_weight_of_the_chosen_experts_is_read_once_in_equal_blocks() -> None:
    """Python functions stand in for the loop over blocks and for the product, and write down what they are given."""
    from engine.kernels.compiler.compiling import TABLE
    from engine.kernels.stored.forms import _record

    form, blocks, read = _record(kernels.PLAIN), [], []
    multiply = CFUNCTYPE(None, *[c_int64] * 9)(int(form["multiply"][0]))

    def loop(block: int, job: int, count: int) -> None:
        for index in range(count):
            blocks.append((block, index))
            CFUNCTYPE(None, c_int64, c_int64)(block)(job, index)

    def product(*given: int) -> None:
        read.append((blocks[-1], given[0], given[3], given[4]))
        multiply(*given)

    experts, x_TD = some_experts(40, ODD), torch.randn(2, 40).bfloat16()
    chosen = Selection(torch.tensor([[5, 0, 2], [2, 3, NO_EXPERT]]), torch.rand(2, 3))
    compiled = CompiledExperts()
    with torch.no_grad():
        expected_TD = compiled(x_TD, experts, chosen, choice=DECODING)
        of_blocks, of_products = CFUNCTYPE(None, *[c_int64] * 3)(loop), CFUNCTYPE(None, *[c_int64] * 9)(product)
        with replaced(TABLE["serial_for"], of_blocks), replaced(form["multiply"], of_products):
            made_TD = compiled(x_TD, experts, chosen, choice=DECODING)
    assert expected_TD is not None and made_TD is not None and torch.equal(made_TD, expected_TD)
    every = [weight for index in (0, 2, 3, 5) for weight in experts[index].projections]
    places = sorted(place for _, first, rows, inputs in read for place in range(first, first + 2 * rows * inputs, 2))
    assert places == sorted(weight.data_ptr() + 2 * index for weight in every for index in range(weight.shape.numel()))
    rows: Counter[tuple[int, int]] = Counter()
    for block, _, count, inputs in read:
        rows[block] += count if inputs == 40 else 0
    units = [count // 2 for count in rows.values() if count]
    assert units[:-1] == [32] * (len(units) - 1) and 0 < units[-1] <= 32 and sum(units) == sum(ODD[i] for i in (0, 2, 3, 5))


@needs_numba
@pytest.mark.parametrize("form", [(16, 1), *LOW_BIT])
@pytest.mark.parametrize("kind", [PLAIN, SCALED, BIASED, UNGATED])
def test_many_tokens(kind: str, form: tuple[int, int]) -> None:
    torch.manual_seed(0)
    widths = OF_FOUR if form[0] == 16 else [units * form[1] for units in (3, 1, 5, 2)]
    check(some_experts(256, (*widths, form[1] * 4), form, kind), 150, kind)


@needs_numba
def test_one_width_that_panels_do_not_take_leaves_many_tokens_to_torch() -> None:
    """The kernels for many tokens multiply four rows at once. Every expert's width counts, and not only the first one's."""
    torch.manual_seed(0)
    experts, x_TD = some_experts(64, (32, 30, 16)), torch.randn(90, 64).bfloat16()
    chosen = Selection(torch.randint(0, 3, (90, 2)), torch.rand(90, 2))
    with torch.no_grad():
        assert CompiledExperts()(x_TD, experts, chosen, choice=DECODING) is None
        assert (
            CompiledExperts()(x_TD, [experts[0], experts[2]], Selection(*(part % 2 for part in chosen)), choice=DECODING)
            is not None
        )
        few = Selection(*(part[:9] for part in chosen))
        assert CompiledExperts()(x_TD[:9], experts, few, choice=DECODING) is not None


@needs_numba
def test_low_bit_experts_whose_groups_differ_with_their_width_go_through_torch() -> None:
    """One scale for a whole row is a form of its own for each width."""
    torch.manual_seed(0)
    experts, x_TD = some_experts(128, (128, 32, 96), (8, -1)), torch.randn(3, 128).bfloat16()
    chosen = Selection(torch.tensor([[0, 1], [2, 0], [1, NO_EXPERT]]), torch.rand(3, 2))
    block = MoeBlock(torch.randn(3, 128).bfloat16(), experts, TopK(2, True))
    with torch.no_grad():
        assert CompiledExperts()(x_TD, experts, chosen, choice=DECODING) is None
        assert torch.allclose(block(x_TD, DECODING).float(), block(x_TD).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kind", [PLAIN, SCALED, BIASED, UNGATED])
@pytest.mark.parametrize("tokens", [1, 3, 20, 100])
def test_blocks_of_every_kind_equal_torch(tokens: int, kind: str, bits: int) -> None:
    """Compare decoding and a prompt with torch's two paths, which compute expert by expert."""
    torch.manual_seed(tokens)
    widths, form = ((48, 7, 160, 33, 90), (16, 1)) if bits == 16 else ((96, 32, 160, 32, 64), (bits, 32))
    experts = some_experts(64, widths, form, kind)
    router_ND = torch.randn(len(experts), 64).bfloat16()
    block = MoeBlock(router_ND, experts, TopK(2, True), scales_inputs=kind == SCALED)
    x_TD = torch.randn(tokens, 64).bfloat16()
    with torch.no_grad():
        logits_TN = block.logits(x_TD)
        selection, scales_TN = block.routing(logits_TN), block.input_scales(logits_TN)
        scales_TS = None if scales_TN is None else scales_TN.gather(1, selection.experts)
        by_torch = [path(x_TD, selection, block.experts, scales_TS=scales_TS) for path in (grouped, sparse)]
        made = [block(x_TD, choice) for choice in (TORCH, PROMPT, DECODING)]
    for y_TD in made:
        for other_TD in by_torch:
            assert (y_TD.double() - other_TD.double()).norm() < 0.02 * other_TD.double().norm()


@needs_numba
def test_blocks_of_units_by_hand() -> None:
    """Expert 1 has four blocks, expert 0 two, expert 3 one that is short, and no token chose expert 2."""
    from engine.kernels.expert_panels import unit_blocks

    widths_N = np.array([64, 128, 96, 4])
    made_K2 = unit_blocks.py_func(np.array([0, 1, 3]), widths_N, 32)
    assert made_K2.tolist() == [[0, 0], [1, 0], [1, 32], [3, 0], [0, 32], [1, 64], [1, 96]]
    equal = unit_blocks.py_func(np.array([0, 2]), np.full(3, 80), 32)
    assert equal.tolist() == [[0, 0], [2, 0], [0, 32], [2, 32], [0, 64], [2, 64]]


@needs_numba
def test_blocks_of_units_are_each_there_once_and_spread_evenly() -> None:
    """Any run of consecutive blocks has nearly its share of each expert's units."""
    from engine.kernels.expert_panels import unit_blocks

    generator = np.random.default_rng(0)
    for _ in range(20):
        widths_N, size = generator.integers(1, 100, 12) * 4, 32
        used_U = generator.permutation(12)[:7]
        blocks = unit_blocks.py_func(used_U, widths_N, size).tolist()
        assert sorted(blocks) == sorted([expert, first] for expert in used_U for first in range(0, widths_N[expert], size))
        half = blocks[: len(blocks) // 2]
        for expert in used_U:
            own = sum(each == expert for each, _ in half)
            assert abs(own - sum(each == expert for each, _ in blocks) / 2) <= 1
