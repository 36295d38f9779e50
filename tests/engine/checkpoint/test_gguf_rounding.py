"""K types: blocks decode to what was meant, with an error that a naive search does not beat."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.checkpoint.gguf import rounding
from engine.checkpoint.gguf.blocks import dequantized
from engine.checkpoint.gguf.rounding import K_TYPES, rounded_to_k
from engine.checkpoint.gguf.writer import encoded
from engine.errors import UnsupportedError
from engine.files.gguf_types import BLOCK_TYPES
from engine.kernels.kernel_choice import KERNELS

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}
LEVELS = {"Q2_K": (3, 15), "Q4_K": (15, 63), "Q5_K": (31, 63)}
"""The largest number, and the largest scale, of types with minimums."""
HALVES = {"Q3_K": (4, 32), "Q6_K": (32, 128)}
"""The lowest number and scale, both negative, of types without."""


def numbers(rows: int = 6, inputs: int = 512, seed: int = 0) -> Tensor:
    """Return rows with a few large numbers, and one of zeros."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 0.02
    x[1] *= torch.rand(inputs, generator=torch.Generator().manual_seed(1)) ** 4 * 10
    x[2], x[3] = 0, x[3].abs() + 0.5
    return x


def read(blocks: Tensor, name: str) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))


def error(x: Tensor, y: Tensor, w: Tensor | float = 1.0) -> Tensor:
    """Return the weighted squared error of each block of 256."""
    return (w * (x - y).double() ** 2).reshape(-1, 256).sum(-1)


def naive(x: Tensor, name: str, w: Tensor) -> np.ndarray:
    """Return what the type keeps of one block of 256 numbers: for each sub-block the best of 21 scales, one by one."""
    size = 32 if name in ("Q4_K", "Q5_K") else 16
    chosen = [best(*each, name) for each in zip(x.numpy().reshape(-1, size), w.numpy().reshape(-1, size), strict=True)]
    found = []
    if name in LEVELS:
        levels, largest = LEVELS[name]
        d, m = (np.float32(np.float16(max(own[part] for own in chosen) / largest)) for part in (0, 1))
        for own, (scale, least) in zip(x.numpy().reshape(-1, size), chosen, strict=True):
            s, o = d * round(scale / (d or 1)), m * round(least / (m or 1))
            found.append(s * np.clip(np.round((own + o) / (s or 1)), 0, levels) - o)
    else:
        half, largest = HALVES[name]
        d = np.float32(np.float16(max((scale for scale, _ in chosen), key=abs) / -largest))
        for own, (scale, _) in zip(x.numpy().reshape(-1, size), chosen, strict=True):
            s = d * np.clip(round(scale / (d or 1)), -largest, largest - 1)
            found.append(s * np.clip(np.round(own / (s or 1)), -half, half - 1))
    return np.concatenate(found)


def best(x: np.ndarray, w: np.ndarray, name: str) -> tuple[float, float]:
    """Return the scale and the minimum with the least error."""
    stretches = np.linspace(0.8, 1.2, 21)
    if name in LEVELS:
        least = max(0.0, -float(x.min()))
        levels = LEVELS[name][0]
        scales = [(float(x.max()) + least) / levels * stretch for stretch in stretches]
        rounded = [s * np.clip(np.round((x + least) / (s or 1)), 0, levels) - least for s in scales]
    else:
        least, half = 0.0, HALVES[name][0]
        scales = [float(x[np.abs(x).argmax()]) / -half * stretch for stretch in stretches]
        rounded = [s * np.clip(np.round(x / (s or 1)), -half, half - 1) for s in scales]
    return scales[int(np.argmin([(w * (x - own) ** 2).sum() for own in rounded]))], least


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", K_TYPES)
def test_the_error_is_below_that_of_a_naive_search(name: str, weighted: bool) -> None:
    x = numbers()
    w = torch.rand(512, generator=torch.Generator().manual_seed(2)) ** 3 + 0.01 if weighted else torch.ones(512)
    found = error(x, read(rounded_to_k(x, KINDS[name], w), name), w)
    every = zip(x.reshape(-1, 256), w.repeat(len(x)).reshape(-1, 256), strict=True)
    expected = error(x, torch.from_numpy(np.stack([naive(each[0], name, each[1]) for each in every])).view(x.shape), w)
    assert found.sum() <= expected.sum() and bool((found <= expected * 1.2 + 1e-12).all())


@pytest.mark.parametrize("name", K_TYPES)
def test_blocks_keep_what_can_be_kept_exactly(name: str) -> None:
    """Numbers that were read from blocks are found again, almost without an error, and zeros are zeros."""
    x = numbers()
    first = read(rounded_to_k(x, KINDS[name]), name)
    assert bool((first[2] == 0).all())
    again = read(rounded_to_k(first, KINDS[name]), name)
    assert error(first, again).sum() <= error(x, first).sum() / 10
    assert torch.equal(dequantized(rounded_to_k(x, KINDS[name]), KINDS[name]), first)


@pytest.mark.parametrize("name", K_TYPES)
def test_weights_lower_the_error_that_they_weigh(name: str) -> None:
    x, w = numbers(), torch.rand(512, generator=torch.Generator().manual_seed(3)) ** 4 * 100
    plain, weighted = (read(rounded_to_k(x, KINDS[name], own), name) for own in (None, w))
    assert error(x, weighted, w).sum() < error(x, plain, w).sum() and error(x, plain).sum() < error(x, weighted).sum()


def test_more_bits_have_smaller_errors() -> None:
    x = numbers()
    errors = [float(error(x, read(rounded_to_k(x, KINDS[name]), name)).sum()) for name in sorted(K_TYPES)]
    assert errors == sorted(errors, reverse=True)


def test_pieces_do_not_depend_on_how_many_blocks_are_rounded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers(), torch.arange(512.0)
    whole = rounded_to_k(x, KINDS["Q4_K"], w)
    monkeypatch.setattr(rounding, "_BLOCKS_AT_ONCE", 3)
    assert torch.equal(rounded_to_k(x, KINDS["Q4_K"], w), whole)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", K_TYPES)
def test_compiled_kernels_find_what_torch_finds(name: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a number of blocks that fills no register, some of zeros, and a row of several blocks.

    Where two candidates have nearly equal errors, or a number lies between two integers, each may choose another one.
    """
    pytest.importorskip("numba")
    x = torch.cat([numbers(30, 768, seed) for seed in range(3)])[:-1]
    w = torch.rand(768, generator=torch.Generator().manual_seed(5)) + 0.01 if weighted else None
    compiled = rounded_to_k(x, KINDS[name], w)
    monkeypatch.setenv(KERNELS, "torch")
    plain = rounded_to_k(x, KINDS[name], w)
    assert (compiled == plain).float().mean() > 0.95
    sums = [error(x, read(blocks, name), 1.0 if w is None else w).sum() for blocks in (compiled, plain)]
    assert float(sums[0] / sums[1]) < 1.005


@pytest.mark.parametrize("name", K_TYPES)
def test_extreme_numbers_of_either_sign_have_one_scale(name: str) -> None:
    """The scales of the sub-blocks are then equally far from zero, some below it."""
    x = numbers(4, 768).sign() * 0.3 + 0.001 * torch.arange(4)[:, None]
    assert error(x, read(rounded_to_k(x, KINDS[name]), name)).sum() < 1e-3 * (x**2).sum()


def test_the_default_dtype_of_torch_plays_no_part() -> None:
    x, expected = numbers(), rounded_to_k(numbers(), KINDS["Q4_K"])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rounded_to_k(x, KINDS["Q4_K"]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K"])
def test_numbers_at_the_limit_are_rounded(name: str) -> None:
    """The best scale of such a block may be above the largest float16."""
    largest = 65504.0 * (63 * 15 if name == "Q4_K" else 32 * 4)
    for seed in range(8):
        x = torch.rand(1, 256, generator=torch.Generator().manual_seed(seed)) * 0.95 * largest
        assert bool(read(rounded_to_k(x, KINDS[name]), name).isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UnsupportedError, match="not finite"):
        rounded_to_k(torch.full((1, 256), value), KINDS["Q4_K"])


def test_numbers_that_are_too_large_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large for a K type"):
        rounded_to_k(torch.full((1, 256), 1e9), KINDS["Q4_K"])


def test_weights_without_any_input_count_equally() -> None:
    x = numbers()
    assert torch.equal(rounded_to_k(x, KINDS["Q3_K"], torch.zeros(512)), rounded_to_k(x, KINDS["Q3_K"]))


def test_numbers_of_mxfp4_keep_their_values() -> None:
    """Whatever the largest number of a block is."""
    kind = KINDS["MXFP4"]
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for most in range(8):
        numbers = sizes[torch.arange(32) % (most + 1)] * torch.tensor([1.0, -1.0] * 16) * 2.0**-9
        blocks = torch.from_numpy(encoded(numbers[None], kind, "a matrix"))
        assert torch.equal(dequantized(blocks, kind), numbers[None])
