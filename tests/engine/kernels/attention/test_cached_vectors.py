"""Products of queries with cached vectors, and weighted sums of these, against plain integers and float64.

Prepared queries and weights are written here by a second, plain implementation of what the kernels read.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernels_for_tests import needs_pairs, needs_quadruples
from torch import Tensor

LARGEST_QUERY, LARGEST_WEIGHT = 127 * 128 + 63, 32767


def run(name: str, *arguments: int) -> None:
    """Call a kernel by its address."""
    from engine.kernels.compiler.compiling import KERNELS

    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(KERNELS[name].address)(*arguments)


def by_fours(numbers_RE: Tensor, each: int) -> Tensor:
    """Return the numbers of four queries side by side, so many of each: [⌈R / 4⌉, E / each, 4, each]."""
    rows, size = numbers_RE.shape
    padded = torch.zeros(-(-rows // 4) * 4, size, dtype=numbers_RE.dtype)
    padded[:rows] = numbers_RE
    return padded.view(-1, 4, size // each, each).transpose(1, 2).contiguous()


def as_two_bytes(numbers_RE: Tensor, steps_R: Tensor) -> Tensor:
    """Return queries of integers as the kernel reads them: high bytes, low bytes, starts of sums and steps of each four."""
    high = (numbers_RE + 64) // 128
    levels = [by_fours(level.to(torch.int8), 16).flatten(1) for level in (high, numbers_RE - 128 * high)]
    of_chunks = by_fours(numbers_RE, 16).unflatten(3, (4, 4)).sum((1, 4))  # [Q, 4, 4]
    steps = torch.zeros(4 * len(of_chunks))
    steps[: len(steps_R)] = steps_R
    behind = (-128 * of_chunks.flatten(1)).int(), steps.view(-1, 4, 1).expand(-1, 4, 4).flatten(1).contiguous()
    return torch.cat([part.view(torch.int8) for part in (*levels, *behind)], dim=1).contiguous()


def scored(name: str, parts: list[tuple[Tensor, Tensor, Tensor]], rows: int, size: int, more: int) -> Tensor:
    """Return the products [R, K] of a kernel. parts: keys, their scales and prepared queries, once or twice."""
    registers, count = -(-rows // 4), len(parts[0][0])
    results = torch.full((4 * registers, count), float("nan"))
    pointers = [[each.data_ptr() for each in part] for part in parts] + [[0, 0, 0]]
    run(name, *pointers[0], size, *pointers[1], more, count, registers, results.data_ptr(), count)
    return results[:rows]


@needs_quadruples
@pytest.mark.parametrize("more", [0, 32])
@pytest.mark.parametrize("rows", [1, 4, 6, 9, 16, 18])
@pytest.mark.parametrize("count", [1, 16, 37])
def test_scores_of_bytes_are_those_of_integers(count: int, rows: int, more: int) -> None:
    torch.manual_seed(0)
    parts, exact, size = [], torch.zeros(rows, count, dtype=torch.float64), 96
    for own in filter(None, (size, more)):
        keys, scales = torch.randint(-127, 128, (count, own), dtype=torch.int8), torch.rand(count) + 0.1
        numbers, steps = torch.randint(-LARGEST_QUERY, LARGEST_QUERY + 1, (rows, own)), torch.rand(rows) + 0.1
        exact += (numbers.double() @ keys.double().T) * steps.double()[:, None] * scales.double()
        parts.append((keys, scales, as_two_bytes(numbers, steps)))
    found = scored("score_bytes", parts, rows, size, more)
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
    alone = [(keys[-1:].clone(), scales[-1:].clone(), queries) for keys, scales, queries in parts]
    assert torch.equal(scored("score_bytes", alone, rows, size, more), found[:, -1:]), "a key has the same bits alone"


@needs_pairs
@pytest.mark.parametrize("more", [0, 32])
@pytest.mark.parametrize("rows", [1, 4, 6, 9, 16, 18])
@pytest.mark.parametrize("count", [1, 16, 37])
def test_scores_of_pairs_are_those_of_float64(count: int, rows: int, more: int) -> None:
    torch.manual_seed(0)
    parts, exact, size = [], torch.zeros(rows, count, dtype=torch.float64), 96
    for own in filter(None, (size, more)):
        keys, queries = torch.randn(count, own).bfloat16(), torch.randn(rows, own).bfloat16()
        exact += queries.double() @ keys.double().T
        parts.append((keys, torch.empty(0), by_fours(queries, 8)))
    found = scored("score_pairs", parts, rows, size, more)
    assert torch.allclose(found.double(), exact, atol=1e-4)
    alone = [(keys[-1:].clone(), scales, queries) for keys, scales, queries in parts]
    assert torch.equal(scored("score_pairs", alone, rows, size, more), found[:, -1:]), "a key has the same bits alone"


@needs_quadruples
def test_a_query_that_is_no_number_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    keys, numbers = torch.randint(-127, 128, (20, 64), dtype=torch.int8), torch.randint(-9000, 9000, (4, 64))
    steps = torch.ones(4)
    plain = scored("score_bytes", [(keys, torch.ones(20), as_two_bytes(numbers, steps))], 4, 64, 0)
    steps[1] = torch.nan
    found = scored("score_bytes", [(keys, torch.ones(20), as_two_bytes(numbers, steps))], 4, 64, 0)
    assert torch.isnan(found[1]).all() and torch.equal(found[[0, 2, 3]], plain[[0, 2, 3]])


@needs_quadruples
def test_queries_are_rounded_to_15_bits() -> None:
    """Rounded queries have the layout and the bytes of this test's own, and a step of NaN where a number is not finite."""
    from numba import njit

    from engine.kernels.attention.scores import keep_bytes

    keep = njit(lambda x_E, place, row: keep_bytes(x_E, place, row))
    queries = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    queries[2] = 0
    made = torch.zeros(2, 2 * 4 * 48 + 128, dtype=torch.int8)
    for row, query in enumerate(queries):
        keep(query.numpy(), made.data_ptr(), row)
    steps = queries.abs().amax(1) / LARGEST_QUERY
    numbers = (queries / steps.clamp(min=1e-30)[:, None]).round().long()
    expected = as_two_bytes(numbers, steps)
    both = [(each[:, : 2 * 4 * 48].reshape(2, 2, 3, 4, 16).long()) for each in (made, expected)]
    values = [each[:, 0] * 128 + each[:, 1] for each in both]
    assert int((values[0] - values[1]).abs().max()) <= 1, "a number between two may be rounded either way"
    of_chunks = values[0].unflatten(3, (4, 4)).sum((1, 4)).flatten(1)
    assert torch.equal(made[:, 384:448].view(torch.int32).long(), -128 * of_chunks)
    assert torch.allclose(made[:, 448:].view(torch.float32), expected[:, 448:].view(torch.float32), rtol=1e-6)
    for value in (torch.nan, torch.inf, -torch.inf):
        queries[1, 5] = value
        keep(queries[1].numpy(), made.data_ptr(), 1)
        found = made[0, 448:].view(torch.float32)
        assert torch.isnan(found).tolist() == [lane // 4 == 1 for lane in range(16)]


@needs_quadruples
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_scores_fit_in_the_integers(sign: int) -> None:
    keys, numbers = torch.full((17, 1024), 127 * sign, dtype=torch.int8), torch.full((4, 1024), LARGEST_QUERY)
    found = scored("score_bytes", [(keys, torch.ones(17), as_two_bytes(numbers, torch.ones(4)))], 4, 1024, 0)
    assert torch.all(found == float(sign * 127 * 1024 * LARGEST_QUERY))


def weighed(vectors_PE: Tensor, numbers_RP: Tensor, factors_R: Tensor) -> Tensor:
    """Return the sums [R, E] of the kernel. The vectors of each four positions lie apart from the other ones."""
    (positions, size), rows = vectors_PE.shape, len(numbers_RP)
    apart = torch.full((positions // 4, 4 * size + 32), 99, dtype=torch.int8)
    apart[:, : 4 * size] = vectors_PE.reshape(positions // 4, -1)
    places = torch.tensor([own.data_ptr() for own in apart])
    levels = torch.stack((numbers_RP // 128, numbers_RP % 128), dim=1).to(torch.uint8).contiguous()
    room, results = torch.empty(64 * positions + 64, dtype=torch.uint8), torch.full((rows, size), float("nan"))
    turned = -(-room.data_ptr() // 64) * 64
    given = [levels.data_ptr(), factors_R.data_ptr(), rows, turned, results.data_ptr()]
    run("add_weighted_bytes", places.data_ptr(), len(places), size, *given)
    return results


@needs_quadruples
@pytest.mark.parametrize("size", [32, 64, 96, 192])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("positions", [4, 52])
def test_sums_of_bytes_are_those_of_integers(positions: int, rows: int, size: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randint(-127, 128, (positions, size), dtype=torch.int8)
    numbers, factors = torch.randint(0, LARGEST_WEIGHT + 1, (rows, positions)), torch.rand(rows)
    exact = (numbers @ vectors.long()).double() * factors.double()[:, None]
    assert torch.allclose(weighed(vectors, numbers, factors).double(), exact, rtol=1e-6)


@needs_quadruples
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_a_piece_fit_in_the_integers(sign: int) -> None:
    from engine.kernels.attention import grouped, latent

    positions = max(grouped.PIECE, latent.PIECE)
    vectors, numbers = torch.full((positions, 64), 127 * sign, dtype=torch.int8), torch.full((9, positions), LARGEST_WEIGHT)
    found = weighed(vectors, numbers, torch.ones(9))
    assert torch.all(found == torch.tensor(float(sign * 127 * positions * LARGEST_WEIGHT)))


@needs_quadruples
@pytest.mark.parametrize("positions", [5, 16, 37])
def test_weights_are_rounded_to_15_bits(positions: int) -> None:
    from numba import njit

    from engine.kernels.attention.byte_values import round_weights

    rounds = njit(lambda weights_RP, rounded_RLP, factor_R: round_weights(weights_RP, rounded_RLP, factor_R))
    weights = torch.rand(5, positions, generator=torch.Generator().manual_seed(0))
    weights[1], weights[2, 0], weights[3, -1] = 0, torch.nan, torch.inf
    rounded, factors = torch.full((5, 2, -(-positions // 4) * 4), 99, dtype=torch.uint8), torch.empty(5)
    rounds(weights.numpy(), rounded.numpy(), factors.numpy())
    numbers = rounded[:, 0].long() * 128 + rounded[:, 1]
    for row in (0, 1, 4):
        assert factors[row] == pytest.approx(float(weights[row].max()) / LARGEST_WEIGHT)
        apart = (numbers[row, :positions] * factors[row] - weights[row]).abs()
        assert float(apart.max()) <= 0.501 * float(factors[row]) + 1e-9
    assert not numbers[:, positions:].any() and torch.isnan(factors[2:4]).all()
