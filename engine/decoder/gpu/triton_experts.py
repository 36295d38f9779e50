"""The MoE block on a GPU, with Triton kernels for the experts where they are faster than torch.

Nothing here waits for the device: only the device knows how many slots an expert has, so each launch is sized for the
worst case. Whether the kernels are used is decided once, when a model is loaded, by a trial with its own experts.

Shape suffixes: T tokens, D hidden, F expert width, S slots (of a token), N experts, A tensors of an expert, R slots of
all tokens, M tiles.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.decoder.experts import SPARSE_MAX_TOKENS, Expert, MoeBlock, route_through
from engine.decoder.routing import NO_EXPERT, Selection, select
from engine.kernels.gpu.launching import power_of_two
from engine.kernels.kernel_choice import wanted_kernels

_log = logging.getLogger(__name__)

GATE_UP, DOWN = {"ROWS": 2, "COLUMNS": 1024}, {"ROWS": 1, "COLUMNS": 2048}
"""Block sizes for a few tokens: rows of a matrix, and most columns that are read at a time."""
SOME = {"OUTPUTS": 32, "COLUMNS": 128, "num_stages": 4}
"""Block sizes for some tokens: outputs, and columns read at a time, and how many reads are under way."""
MANY = {"ROWS": 64, "OUTPUTS": 64}
"""Block sizes for many tokens: slots of one expert, and outputs."""
BYTES = 128
"""Bytes of each row that are multiplied at a time."""
MULTIPLE = 16
"""Largest power of two by which differing widths are said to be divisible. The longest reads take 16 bytes."""
LEAST_PRODUCT = 16
"""Least size of each dimension of a product in the matrix units."""
TRIALS = 1, 512
"""Numbers of tokens in the trials: the first decides for a few tokens, the second for many."""
TRIAL_ROUNDS = 5


class TritonExperts:
    """The experts of a layer in two launches, with a table of their weights' addresses."""

    def __init__(self, serves_few: bool = True, serves_many: bool = True) -> None:
        self.serves_few, self.serves_many = serves_few, serves_many
        self._ends = 0, 0
        self._table_NA = torch.empty(0, 0, dtype=torch.int64)
        self._sizes: dict[str, Any] = {}
        self._widest = 0

    def __call__(self, x_TD: Tensor, selection: Selection, experts: Any, scales_TS: Tensor | None = None) -> Tensor | None:
        """Return Σ_s weight_s · FFN_s(scale_s · x), [T, D]; None if torch must compute it.

        `experts`: must satisfy `can_serve`.
        """
        is_few = x_TD.shape[0] <= SPARSE_MAX_TOKENS
        if not (self.serves_few if is_few else self.serves_many):
            return None
        if not selection.experts.numel():
            return torch.zeros_like(x_TD)
        self._look_up(experts)
        slots = selection.experts.shape[1]
        if scales_TS is not None:  # every slot then has its own x
            x_TD, slots = (x_TD[:, None] * scales_TS[:, :, None].to(x_TD.dtype)).flatten(0, 1), 1
        return (self.few if is_few else self.many)(x_TD.contiguous(), selection, experts[0], slots)

    def added(self, residual_TD: Tensor, factor: float, x_TD: Tensor, selection: Selection, experts: Any) -> Tensor:
        """Return residual + factor · Σ_s weight_s · FFN_s(x), [T, D], for the tokens of a step."""
        self._look_up(experts)
        tokens, slots = selection.experts.shape
        if tokens <= SPARSE_MAX_TOKENS or tokens * slots <= len(experts):
            return self.few(x_TD, selection, experts[0], slots, (residual_TD, factor))
        return self.some(residual_TD, factor, x_TD, selection, experts[0])

    def few(
        self,
        x_TD: Tensor,
        selection: Selection,
        like: Expert,
        slots: int,
        residual: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute a few tokens. slots: number of consecutive slots that share a row of x.

        residual: what is added to, [T, D], and the factor of what is added.
        """
        kernels, (tokens, per_token), hidden = _kernels(), selection.experts.shape, x_TD.shape[1]
        experts_R, weights_R = _flat(selection)
        h_RF = x_TD.new_empty(experts_R.numel(), self._sizes["F"], dtype=torch.float32)
        y_TD = x_TD.new_empty(tokens, hidden)
        grid = experts_R.numel(), programs_for(self._widest, GATE_UP["ROWS"])
        own = {**self._sizes, **narrowed(GATE_UP, hidden)}
        kernels.gate_up_of_few[grid](x_TD, self._table_NA, experts_R, h_RF, slots, **_clamp(like), **own)
        grid = tokens, programs_for(hidden, DOWN["ROWS"])
        own = {**self._sizes, **narrowed(DOWN, self._widest), "SLOTS": per_token}
        residual_TD, factor = (y_TD, 1.0) if residual is None else residual
        given = h_RF, self._table_NA, experts_R, weights_R, residual_TD, y_TD, factor
        kernels.down_of_few[grid](*given, HAS_RESIDUAL=residual is not None, **own)
        return y_TD

    def some(self, residual_TD: Tensor, factor: float, x_TD: Tensor, selection: Selection, like: Expert) -> Tensor:
        """Compute as `added` for some tokens, of which each has an expert once: each expert is read once for all of them."""
        kernels, (tokens, slots), hidden = _kernels(), selection.experts.shape, x_TD.shape[1]
        experts_R, weights_R = _flat(selection)
        h_RF = x_TD.new_empty(tokens * slots, self._sizes["F"])
        y_RD = x_TD.new_empty(tokens * slots, hidden, dtype=torch.float32)
        found = {"WIDE": power_of_two(tokens * slots), "ROWS": max(LEAST_PRODUCT, power_of_two(tokens))}
        own = {**self._sizes, **found, **SOME, "COLUMNS": SOME["COLUMNS"] * 2 // x_TD.itemsize}
        grid = len(self._table_NA), programs_for(self._widest, SOME["OUTPUTS"])
        kernels.gate_up_of_some[grid](x_TD, self._table_NA, experts_R, h_RF, slots, tokens * slots, **_clamp(like), **own)
        grid = len(self._table_NA), programs_for(hidden, SOME["OUTPUTS"])
        kernels.down_of_some[grid](h_RF, self._table_NA, experts_R, weights_R, y_RD, tokens * slots, **own)
        y_TD, columns = torch.empty_like(residual_TD), min(GATE_UP["COLUMNS"], power_of_two(hidden))
        grid = tokens, programs_for(hidden, columns)
        kernels.add_slots[grid](y_RD, experts_R, residual_TD, y_TD, factor, D=hidden, SLOTS=slots, COLUMNS=columns)
        return y_TD

    def many(self, x_TD: Tensor, selection: Selection, like: Expert, slots: int) -> Tensor:
        """Compute any number of tokens. slots: as in `few`."""
        kernels, hidden = _kernels(), x_TD.shape[1]
        experts_R, weights_R = _flat(selection)
        order_R, tiles_M3 = tiles(experts_R, len(self._table_NA), MANY["ROWS"])
        h_RF = x_TD.new_empty(experts_R.numel(), self._sizes["F"])
        y_RD = x_TD.new_zeros(experts_R.numel(), hidden)  # slots without an expert stay zero
        own = {**self._sizes, "COLUMNS": BYTES // x_TD.itemsize, **MANY}
        of_tiles = self._table_NA, order_R, tiles_M3
        grid = len(tiles_M3), programs_for(self._widest, MANY["OUTPUTS"])
        kernels.gate_up_of_many[grid](x_TD, *of_tiles, h_RF, slots, **_clamp(like), **own)
        grid = len(tiles_M3), programs_for(hidden, MANY["OUTPUTS"])
        kernels.down_of_many[grid](h_RF, *of_tiles, weights_R, y_RD, **own)
        return y_RD.view(*selection.experts.shape, hidden).sum(dim=1)

    def _look_up(self, experts: Any) -> None:
        """Update the table if the experts have changed. Weights are moved all together or not at all."""
        ends = experts[0].up_FD.data_ptr(), experts[-1].down_DF.data_ptr()
        if self._ends != ends or len(self._table_NA) != len(experts):
            rows = [[*(weight.data_ptr() for weight in expert.projections), expert.width] for expert in experts]
            self._ends, self._table_NA = ends, torch.tensor(rows, device=experts[0].up_FD.device)
            self._sizes, self._widest = sizes(experts), max(expert.width for expert in experts)


def sizes(experts: Any) -> dict[str, Any]:
    """Return the sizes for which the kernels are compiled. Differing widths are rounded, so that layers share a kernel."""
    widths, like = [expert.width for expert in experts], experts[0]
    made = {"D": like.hidden_size, "A": len(like.projections)}
    if len(set(widths)) == 1:
        return made | {"F": widths[0], "MULTIPLE": None}
    return made | {"F": 1 << (max(widths) - 1).bit_length(), "MULTIPLE": math.gcd(MULTIPLE, *widths)}


def narrowed(sizes: dict[str, int], columns: int) -> dict[str, int]:
    """Return block sizes for a matrix with so many columns."""
    return sizes | {"COLUMNS": min(sizes["COLUMNS"], power_of_two(columns))}


def _flat(selection: Selection) -> tuple[Tensor, Tensor]:
    return selection.experts.reshape(-1).contiguous(), selection.weights.reshape(-1).float().contiguous()


def programs_for(size: int, block: int) -> int:
    """Return how many programs compute so much, a block each."""
    return -(-size // block)


def _clamp(like: Expert) -> dict[str, float | None]:
    swiglu = like.swiglu
    return {"ALPHA": None, "LIMIT": None} if swiglu is None else {"ALPHA": swiglu.alpha, "LIMIT": swiglu.limit}


def tiles(experts_R: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the slots sorted by expert, [R], and tiles of up to `rows` slots: expert, first slot, last slot + 1, [M, 3].

    M is the number for the worst distribution. Unused tiles come last and have no expert.
    """
    slots = experts_R.numel()
    sorted_R, order_R = experts_R.sort(stable=True)
    begins = torch.searchsorted(sorted_R, torch.arange(count + 1, device=experts_R.device))
    tiles_N = (begins.diff() + rows - 1) // rows
    ends_N = tiles_N.cumsum(0)
    tile_M = torch.arange(min(slots, slots // rows + count), device=experts_R.device)
    expert_M = torch.searchsorted(ends_N, tile_M, right=True)
    is_used_M, expert_M = expert_M < count, expert_M.clamp_max(count - 1)
    first_M = begins[expert_M] + (tile_M - (ends_N - tiles_N)[expert_M]) * rows
    parts = expert_M.masked_fill(~is_used_M, NO_EXPERT), first_M, begins[expert_M + 1]
    return order_R, torch.stack(parts, dim=1)


def can_serve(experts: Any) -> bool:
    """Return whether the kernels support these experts: plain matrices of one dtype, aligned to 16 bytes."""
    weights = [weight for expert in experts for weight in expert.projections]
    if not weights or not experts[0].has_gate or not all(isinstance(weight, Tensor) for weight in weights):
        return False
    kinds = {(weight.dtype, weight.device, weight.is_contiguous()) for weight in weights}
    parts = {len(expert.projections) for expert in experts}
    aligned = all(weight.data_ptr() % 16 == 0 for expert in experts for weight in expert.projections[:3])
    first, largest = weights[0], max(weight.numel() for weight in weights)
    known = first.dtype in (torch.bfloat16, torch.float16, torch.float32) and first.is_contiguous() and largest < 2**31
    return len(kinds) == len(parts) == 1 and known and aligned


@cache
def _kernels() -> Any:
    from engine.kernels.gpu import triton_kernels

    return triton_kernels


def use_triton(blocks: Sequence[MoeBlock]) -> None:
    """Use Triton kernels for the experts of a model on a GPU if they are supported, correct and faster than torch.

    Layers that use the same compiled kernels share one trial. If the kernels fail, one line of the log gives the reason, and
    torch computes instead.

    Raises:
        OptionError: `COMPRESS_KERNELS` has an unknown value.
    """
    wanted = wanted_kernels()
    if wanted == "torch":
        return
    decided: dict[Any, tuple[bool, bool]] = {}
    for block in filter(lambda block: can_serve(block.experts), blocks):
        first: Any = block.experts[0]
        kind = tuple(sizes(block.experts).items()), first.up_FD.dtype, first.swiglu
        try:
            if kind not in decided:
                few, many = (_pays(block, tokens, wanted == "auto") for tokens in TRIALS)
                decided[kind] = few, many
        except ImportError:
            _log.warning("experts run through torch: `pip install triton` installs kernels for the GPU")
            return
        except Exception as error:  # raised by Triton, its C compiler, ptxas or the driver, none of which torch needs
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            _log.warning("experts run through torch: Triton's kernels failed on this GPU (%s)", reason)
            return
        if any(decided[kind]):
            block.on_gpu = TritonExperts(*decided[kind])


@torch.inference_mode()
def _pays(block: MoeBlock, tokens: int, is_timed: bool) -> bool:
    """Return whether the kernels give torch's results for this many random tokens, and are faster. Compiles the kernels."""
    like = block.router_ND
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(tokens, block.hidden_size, generator=generator).to(like.device, like.dtype)
    logits_TN = block.logits(x_TD, hidden_TD=x_TD)
    selection, scales_TN = select(block.routing, x_TD, logits_TN), block.input_scales(logits_TN)
    scales_TS = None if scales_TN is None else scales_TN.gather(1, selection.experts.clamp_min(0))
    kernels = TritonExperts()

    def by_kernels() -> Tensor:
        made = kernels(x_TD, selection, block.experts, scales_TS)
        assert made is not None
        return made

    def by_torch() -> Tensor:
        return route_through(x_TD, selection, block.experts, None, scales_TS)

    expected_TD = by_torch().float()
    error = (by_kernels().float() - expected_TD).norm() / expected_TD.norm()
    if not error <= max(1e-3, 4 * torch.finfo(like.dtype).eps):  # also refuses NaN
        _log.warning("experts run through torch: with %d tokens, Triton's kernels have an error of %.1e", tokens, error)
        return False
    best = {by_kernels: math.inf, by_torch: math.inf}
    for way in TRIAL_ROUNDS * list(best) if is_timed else ():
        wait(x_TD)
        started = time.perf_counter()
        way()
        wait(x_TD)
        best[way] = min(best[way], time.perf_counter() - started)
    return not is_timed or best[by_kernels] < best[by_torch]


def wait(x: Tensor) -> None:
    """Wait until a tensor on a GPU is computed."""
    if x.is_cuda:
        torch.cuda.synchronize()
