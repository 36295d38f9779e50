"""The MoE block: any Routing over a list of experts, with two paths that compute the same function.

`grouped` sorts the slots by expert and runs one product per expert: for prefill, calibration and everything with
gradients. `sparse` runs the few experts of a few tokens as views without copies: for decoding. A test holds them equal.
If the compiled kernels support the experts, decoding is one call. Experts of one block may differ in width.

Shape suffixes: T tokens, D hidden, F expert width, S slots, N experts, R real (not skipped) slots, H hidden units of a
gate network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.decoder.norms import BlockNorms
from engine.decoder.routing import NO_EXPERT, Routing, Selection, select
from engine.families.layer_config import Activation, GatedGelu
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import (
    addresses,
    as_taken,
    as_tensor,
    expert_form,
    kernel_form,
    linear,
    linears,
    places_of,
    plain,
    serves_rows,
    wide_linear,
)
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor
from engine.kernels.torch_products import linear_by_blocks, multiplies_bfloat16

ExpertObserver = Callable[[int, Tensor, Tensor], None]


class UnitObserver(Protocol):
    """Sees the hidden units and the output of a layer's feed-forward block; gradients pass through what it returns."""

    def units(self, number: int, h_RF: Tensor) -> Tensor:
        """Take the input of an FFN's down projection, [R, F] for the tokens that use it, and return it.

        number: that of the routed expert; the FFN that every token uses comes after all routed experts.
        """

    def output(self, y_TD: Tensor) -> Tensor:
        """Take the output of the routed experts, or of a dense layer's FFN, and return it."""


class Residency(Protocol):
    """Knows which experts of a block are in memory (engine/expert_cache)."""

    def __call__(self, x_TD: Tensor, selection: Selection, logits_TN: Tensor) -> Selection:
        """Bring the chosen experts into memory. Returns the selection with which the block goes on."""

    places_N: Any
    """Where each expert is, int64, as engine/kernels/expert_places.py names it. Kernels read it in place, like the next."""
    awaits_1: Any
    """Whether predictions of this block's choices are worth their time, int64 [1]."""
    following_K: Any
    """The next layers whose choices can be predicted from this one's input, the nearest first, int64 [DISTANCES]; -1 where
    one cannot."""

    def begin_step(self) -> None:
        """Begin a step of all layers. Called on one residency of a model."""

    def require(self, chosen_TS: Any, weights_TS: Any, predicted_KM: Any, logits: Callable[[], Tensor]) -> None:
        """As `__call__`, on arrays of NumPy, which may be changed in place.

        predicted_KM: experts that each following layer will probably choose, int64, negative for none. logits: returns the
        router's logits [T, N], which are not always needed.
        """

    def note(self, chosen_TS: Any) -> None:
        """Note the choices of a step that found all of them in memory, and therefore did not ask."""


SPARSE_MAX_TOKENS = 4
"""Maximum number of tokens for the sparse path, if no gradient is needed; with more tokens, experts are often shared."""

MULTIPLE_OF_TOKENS = 16
"""Divisor to which the tokens of an expert are padded with zeros in a prefill."""
MULTIPLE_IN_TRAINING = 64
"""Divisor to which they are padded in training, where the backward pass has more products of each shape."""
TRANSPOSED_FROM_TOKENS = 16
"""Minimum number of tokens for which bfloat16 products have the weight on the left.

oneDNN rearranges its right operand in each call, and rearranging the tokens is cheaper than rearranging the weight.
"""


class Expert(nn.Module):
    """A SwiGLU feed-forward network: down(silu(gate·x) ⊙ up·x). Also used for the dense FFN and the shared expert.

    With biases, all three products have one. `swiglu` replaces silu(g) ⊙ u.
    """

    has_gate: ClassVar[bool] = True
    """Whether the hidden units have a gate."""

    def __init__(
        self,
        gate_FD: Weight,
        up_FD: Weight,
        down_DF: Weight,
        gate_F: Weight | None = None,
        up_F: Weight | None = None,
        down_D: Weight | None = None,
        *,
        swiglu: Activation | None = None,
    ) -> None:
        super().__init__()
        self.gate_FD, self.up_FD, self.down_DF = frozen(gate_FD), frozen(up_FD), frozen(down_DF)
        self.gate_F, self.up_F, self.down_D = _frozen(gate_F), _frozen(up_F), _frozen(down_D)
        self.swiglu = swiglu
        self.is_plain = swiglu is None and gate_F is None
        """Whether the expert has neither biases nor another activation than silu(g) ⊙ u."""
        self.unit_observer: UnitObserver | None = None
        """Observer of a dense layer's FFN."""
        self._compiled = CompiledExperts()

    @property
    def is_linear_in_up(self) -> bool:
        """Whether the hidden units are a linear function of up·x."""
        return self.gate_F is None and (self.swiglu is None or isinstance(self.swiglu, GatedGelu))

    @property
    def width(self) -> int:
        """Number of hidden units F."""
        return self.up_FD.shape[0]

    @property
    def hidden_size(self) -> int:
        """Hidden size D."""
        return self.up_FD.shape[1]

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """Gate, up and down, followed by their biases if there are any, in the order of their indices."""
        biases = (self.gate_F, self.up_F, self.down_D)
        return self.gate_FD, self.up_FD, self.down_DF, *(bias for bias in biases if bias is not None)

    def units(self, x_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the hidden units h, the input of the down projection, [T, F]."""
        gate_TF, up_TF = linears(x_TD, (self.gate_FD, self.up_FD), (self.gate_F, self.up_F), choice)
        return gated(gate_TF, up_TF, self.swiglu)

    def forward(
        self, x_TD: Tensor, choice: KernelChoice = TORCH, observe: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Map [T, D] to [T, D]. observe: is given the hidden units, and returns those that are multiplied."""
        if self.unit_observer is not None:
            h_TF = self.unit_observer.units(0, self.units(x_TD, choice))
            return self.unit_observer.output(linear(h_TF, self.down_DF, self.down_D, choice))
        if observe is not None:
            return linear(observe(self.units(x_TD, choice)), self.down_DF, self.down_D, choice)
        tokens = x_TD.shape[0]
        if choice.for_products(tokens, x_TD) is not None:
            alone = Selection(torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
            if (y_TD := self._compiled(x_TD, (self,), alone, choice=choice)) is not None:
                return y_TD
        is_large = x_TD.shape[0] >= TRANSPOSED_FROM_TOKENS and choice.observer is None
        if not is_large or not multiplies_bfloat16(x_TD):
            return linear(self.units(x_TD, choice), self.down_DF, self.down_D, choice)
        # Without padding, each number of tokens would be a new shape, for which oneDNN compiles code.
        if torch.is_grad_enabled():
            x_TD = F.pad(x_TD, (0, 0, 0, -tokens % MULTIPLE_IN_TRAINING))
        elif self.is_plain:
            x_DT, dtype = F.pad(x_TD, (0, 0, 0, -tokens % MULTIPLE_OF_TOKENS)).T, x_TD.dtype
            return (plain(self.down_DF, dtype) @ self._plain_units(x_DT)).T[:tokens]
        return linear(self.units(x_TD, choice), self.down_DF, self.down_D, choice)[:tokens]

    def _plain_units(self, x_DT: Tensor) -> Tensor:
        """Return the hidden units of a plain expert, [F, T]."""
        gate_FT = F.silu(plain(self.gate_FD, x_DT.dtype) @ x_DT, inplace=True)
        return gate_FT.mul_(plain(self.up_FD, x_DT.dtype) @ x_DT)


class ExpertWithoutGate(Expert):
    """down(relu(up·x)²) (arXiv 2109.08668), without biases."""

    has_gate = False

    def __init__(self, up_FD: Weight, down_DF: Weight) -> None:
        super().__init__(up_FD, up_FD, down_DF)
        del self.gate_FD

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """Up and down, in the order of their indices."""
        return self.up_FD, self.down_DF

    def units(self, x_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the hidden units h, the input of the down projection, [T, F]."""
        return linear(x_TD, self.up_FD, choice=choice).relu().square()

    def _plain_units(self, x_DT: Tensor) -> Tensor:
        return (plain(self.up_FD, x_DT.dtype) @ x_DT).relu_().square()


def expert_of(projections: Iterable[Weight], swiglu: Activation | None = None) -> Expert:
    """Return the expert with these projections, in the order of their indices: two are up and down, without a gate."""
    own = tuple(projections)
    return ExpertWithoutGate(*own) if len(own) == 2 else Expert(*own, swiglu=swiglu)


def gated(gate_TF: Tensor, up_TF: Tensor, swiglu: Activation | None) -> Tensor:
    """Return the input of an expert's down projection, [T, F]."""
    if swiglu is None:
        return F.silu(gate_TF) * up_TF
    if isinstance(swiglu, GatedGelu):
        return F.gelu(gate_TF, approximate="tanh") * up_TF
    gate_TF, up_TF = gate_TF.clamp(max=swiglu.limit), up_TF.clamp(-swiglu.limit, swiglu.limit)
    return (up_TF + 1.0) * gate_TF * torch.sigmoid(swiglu.alpha * gate_TF)


def table_rows(
    kernels: Any, experts: Sequence[Expert], form: tuple[int | str, int]
) -> tuple[list[tuple[list[tuple[int, int]], int]], Any]:
    """Return the addresses of each expert's weights and its width, as the kernels need them for a call in this form.

    The second value must live as long as the addresses are used.
    """
    matrices = [[*expert.projections[: 3 if expert.has_gate else 2]] for expert in experts]
    places, kept = places_of(kernels, [weight for own in matrices for weight in own], form)
    rows, first = [], 0
    for expert, own in zip(experts, matrices, strict=True):
        gate = [] if expert.has_gate else [(0, 0)]
        biases = [addresses(weight) for weight in expert.projections[len(own) :]]
        rows.append((gate + places[first : first + len(own)] + biases, expert.width))
        first += len(own)
    return rows, kept


class CompiledExperts:
    """All chosen experts of a few tokens in one compiled call, with a table of their weights' addresses."""

    def __init__(self) -> None:
        self._experts: Any = None
        self._weights: list[Weight] = []
        self._table: Any = None
        self._kept: Any = None
        """Records to which the table has addresses."""
        self._ends = (0, 0)
        """Where the first and the last weight lie."""
        self._clamp: tuple[float, float] | None = None
        self._form: tuple[int | str, int] | None = None
        """Storage form of the weights; None for experts that the kernels do not support."""
        self._takes_many = False
        """Whether the kernels for many tokens support all matrices."""

    def __call__(
        self,
        x_TD: Tensor,
        experts: Any,
        selection: Selection,
        scales_TS: Tensor | None = None,
        choice: KernelChoice = TORCH,
    ) -> Tensor | None:
        """Return Σ_s weight_s · FFN_s(scale_s · x), [T, D]; None if torch must compute it.

        experts: a list of modules, or a tuple.
        """
        tokens, hidden = x_TD.shape
        kernels, many = choice.for_products(tokens, x_TD), choice.takes_many(tokens)
        if kernels is None:
            return None
        if not self._knows(experts):
            self._look_up(kernels, experts, x_TD.dtype)
        if self._form is None or (many and not self._takes_many):
            return None
        kind = self._form, self._clamp
        chosen, weights = (np.ascontiguousarray(part.detach().numpy()) for part in selection)
        scales = None if scales_TS is None else np.ascontiguousarray(scales_TS.detach().float().numpy())
        taken_TD = as_taken(x_TD)
        made = kernels.swiglu(taken_TD.data_ptr(), self._table, chosen, weights, hidden, *kind, scales, many=many)
        return as_tensor(made, x_TD.dtype)

    def _knows(self, experts: Any) -> bool:
        """Return whether the table belongs to these experts. Weights are moved all together or not at all."""
        if self._experts != experts or not self._weights:
            return False
        return self._ends == (addresses(self._weights[0])[0], addresses(self._weights[-1])[0])

    def _look_up(self, kernels: Any, experts: Any, dtype: torch.dtype) -> None:
        every = [weight for expert in experts for weight in expert.projections]
        self._experts, self._weights = experts, every
        self._ends = addresses(every[0])[0], addresses(every[-1])[0]
        swiglu: Activation | None = experts[0].swiglu
        of_gate = None if swiglu is None else (swiglu.alpha, swiglu.limit)
        self._clamp = of_gate if experts[0].has_gate else kernels.WITHOUT_GATE
        matrices = [weight for expert in experts for weight in expert.projections[:3]]
        biases = [weight for expert in experts for weight in expert.projections[3:]]
        served = not biases or kernel_form(kernels, biases) == kernels.PLAIN
        self._form = expert_form(kernels, matrices, dtype) if served else None
        if self._form is not None:
            rows, self._kept = table_rows(kernels, experts, self._form)
            self._table = kernels.expert_table(rows)
        self._takes_many = serves_rows(kernels, matrices, many=True)


class MoeBlock(nn.Module):
    """Router, routed experts and, depending on the family, a shared expert with an optional gate.

    `routing` is the layer's Routing and may be replaced at any time; `own_routing` is the model's own. `observer`, if
    set, is called with (x_TD, logits_TN, selection) in each forward pass, for calibration and reports. `noise_ND` is a
    parameter of noisy top-k in training (routing.Noisy); it is not read here.
    """

    def __init__(
        self,
        router_ND: Tensor,
        experts: list[Expert],
        routing: Routing,
        shared: Expert | None = None,
        shared_gate_1D: Tensor | None = None,
        gate_hidden_HD: Tensor | None = None,
        noise_ND: Tensor | None = None,
        router_in_float32: bool = False,
        logit_bias_N: Tensor | None = None,
        scales_inputs: bool = False,
        own_norms: BlockNorms | None = None,
    ) -> None:
        """router_ND: one row for each expert; [N, H] if `gate_hidden_HD` is the first layer of a gate network.

        own_norms: norms of the router and of the shared expert, which then read the hidden state.
        """
        super().__init__()
        self.own_norms = own_norms
        self.router_in_float32, self.scales_inputs = router_in_float32, scales_inputs
        self.router_ND = nn.Parameter(router_ND, requires_grad=False)
        self.experts = nn.ModuleList(experts)
        self.routing = self.own_routing = routing
        self.shared = shared
        self.shared_gate_1D = _frozen(shared_gate_1D)
        self.gate_hidden_HD = _frozen(gate_hidden_HD)
        self.noise_ND = _frozen(noise_ND)
        self.logit_bias_N = _frozen(logit_bias_N)
        self.observer: Callable[[Tensor, Tensor, Selection], None] | None = None
        self.expert_observer: ExpertObserver | None = None
        self.unit_observer: UnitObserver | None = None
        self.residency: Residency | None = None
        """Brings the chosen experts into memory before they run; None if the whole model is mapped."""
        self.on_gpu: Callable[..., Tensor | None] | None = None
        """Function that runs the routed experts on a GPU in place of torch (triton_experts.TritonExperts), or None."""
        self._compiled = CompiledExperts()

    @property
    def is_observed(self) -> bool:
        """Whether something sees what the experts compute, which compiled kernels do not show."""
        return self.expert_observer is not None or self.unit_observer is not None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.router_ND.device

    @property
    def hidden_size(self) -> int:
        """Hidden size D."""
        return (self.router_ND if self.gate_hidden_HD is None else self.gate_hidden_HD).shape[1]

    def forward(self, x_TD: Tensor, choice: KernelChoice = TORCH, hidden_TD: Tensor | None = None) -> Tensor:
        """Map [T, D] to [T, D].

        x_TD: the input of the routed experts. hidden_TD: the hidden state, for a block with norms of its own.
        """
        logits_TN = self.logits(x_TD, choice, hidden_TD)
        selection = select(self.routing, x_TD, logits_TN)
        if self.observer is not None:
            self.observer(x_TD, logits_TN, selection)
        if self.residency is not None:
            selection = self.residency(x_TD, selection, logits_TN)
        y_TD = self._routed(x_TD, selection, self.input_scales(logits_TN), choice)
        if self.own_norms is not None:
            y_TD = self.own_norms.routed_output(y_TD, choice)
        if self.shared is None:
            return y_TD
        observe = None if self.unit_observer is None else partial(self.unit_observer.units, len(self.experts))
        shared_TD: Tensor = self.shared(self.shared_input(x_TD, hidden_TD, choice), choice, observe)
        if self.own_norms is not None:
            return y_TD + self.own_norms.shared_output(shared_TD, choice)
        weight_T1 = self.shared_weights(x_TD, choice)
        return y_TD + (shared_TD if weight_T1 is None else weight_T1 * shared_TD)

    def shared_weights(self, x_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor | None:
        """Return the factors of the shared expert's output, [T, 1]; None for ones."""
        if self.shared_gate_1D is None:
            return None
        return torch.sigmoid(linear(x_TD, self.shared_gate_1D, choice=choice))

    def shared_input(self, x_TD: Tensor, hidden_TD: Tensor | None = None, choice: KernelChoice = TORCH) -> Tensor:
        """Return the input of the shared expert, [T, D], given the arguments of `forward`."""
        if self.own_norms is None:
            return x_TD
        assert hidden_TD is not None, "a shared expert with a norm of its own reads the hidden state"
        return self.own_norms.shared_input(hidden_TD, choice)

    def router_input(self, x_TD: Tensor, hidden_TD: Tensor | None = None, choice: KernelChoice = TORCH) -> Tensor:
        """Return what the router's matrix is multiplied with, [T, D], given the arguments of `forward`."""
        if self.own_norms is None:
            return x_TD
        assert hidden_TD is not None, "a router with a norm of its own reads the hidden state"
        return self.own_norms.router_input(hidden_TD, choice)

    def logits(self, x_TD: Tensor, choice: KernelChoice = TORCH, hidden_TD: Tensor | None = None) -> Tensor:
        """Return the router's logits, [T, N], given the arguments of `forward`."""
        x_TD = self.router_input(x_TD, hidden_TD, choice)
        if not self.router_in_float32:
            return router_logits(x_TD, self.router_ND, self.gate_hidden_HD, self.logit_bias_N, choice)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias_N = None if self.logit_bias_N is None else self.logit_bias_N.to(wide)
        if (kernels := choice.for_few(len(x_TD), x_TD, self.router_ND)) is not None and self.gate_hidden_HD is None:
            logits_TN = wide_linear(kernels, x_TD, self.router_ND)
            return logits_TN if bias_N is None else logits_TN + bias_N
        if choice.for_any(x_TD) is not None:
            return linear_by_blocks(x_TD.to(wide), self.router_ND.to(wide), bias_N)
        return router_logits(x_TD.to(wide), self.router_ND.to(wide), self.gate_hidden_HD, bias_N, choice)

    def input_scales(self, logits_TN: Tensor) -> Tensor | None:
        """Return the factors of each expert's input, [T, N]; None for no factors."""
        if not self.scales_inputs:
            return None
        return logits_TN.to(torch.promote_types(logits_TN.dtype, torch.float32)).sigmoid().to(logits_TN.dtype)

    def outputs(self, x_TD: Tensor) -> Iterator[Tensor]:
        """Yield each expert's output for all tokens, [T, D], with a weight of one."""
        scales_TN = self.input_scales(self.logits(x_TD)) if self.scales_inputs else None
        for index, expert in enumerate(self.experts):
            yield expert(x_TD if scales_TN is None else x_TD * scales_TN[:, index, None].to(x_TD.dtype))

    def _routed(self, x_TD: Tensor, selection: Selection, scales_TN: Tensor | None, choice: KernelChoice = TORCH) -> Tensor:
        scales_TS = None if scales_TN is None else scales_TN.gather(1, selection.experts.clamp_min(0))
        if self.unit_observer is not None:
            units = self.unit_observer.units
            return self.unit_observer.output(grouped(x_TD, selection, self.experts, None, scales_TS, choice, units))
        may_compile = choice.may_compile and not self.is_observed and selection.experts.is_cpu
        compiled = self._compiled if may_compile else None
        if compiled is not None and (y_TD := compiled(x_TD, self.experts, selection, scales_TS, choice)) is not None:
            return y_TD
        on_gpu = None if self.expert_observer is not None or torch.is_grad_enabled() else self.on_gpu
        if on_gpu is not None and (y_TD := on_gpu(x_TD, selection, self.experts, scales_TS)) is not None:
            return y_TD
        return route_through(x_TD, selection, self.experts, self.expert_observer, scales_TS, choice)


def router_logits(
    x_TD: Tensor,
    router_ND: Tensor,
    gate_hidden_HD: Tensor | None = None,
    logit_bias_N: Tensor | None = None,
    choice: KernelChoice = TORCH,
) -> Tensor:
    """Return W·x + b, [T, N]; for a gate network W2·tanh(W1·x), where W2 [N, H] is the router and W1 its hidden layer."""
    if gate_hidden_HD is None:
        return linear(x_TD, router_ND, logit_bias_N, choice)
    return linear(torch.tanh(linear(x_TD, gate_hidden_HD, choice=choice)), router_ND, choice=choice)


def _frozen(weight: Weight | None) -> nn.Parameter | None:
    return None if weight is None else frozen_tensor(weight)


def route_through(
    x_TD: Tensor,
    selection: Selection,
    experts: nn.ModuleList,
    observer: ExpertObserver | None = None,
    scales_TS: Tensor | None = None,
    choice: KernelChoice = TORCH,
) -> Tensor:
    """Return the routed output Σ_slots weight · FFN_expert(scale · x), [T, D]. Empty slots cost nothing.

    scales_TS: factors of the experts' inputs; None for ones.
    """
    if x_TD.shape[0] <= SPARSE_MAX_TOKENS and observer is None and not torch.is_grad_enabled():
        return sparse(x_TD, selection, experts, scales_TS, choice)
    return grouped(x_TD, selection, experts, observer, scales_TS, choice)


def sparse(
    x_TD: Tensor,
    selection: Selection,
    experts: nn.ModuleList,
    scales_TS: Tensor | None = None,
    choice: KernelChoice = TORCH,
) -> Tensor:
    """Return the routed output, computed token by token; only the chosen experts' weights are read."""
    rows = []
    for row, (indices, weights) in enumerate(zip(selection.experts.tolist(), selection.weights.tolist(), strict=True)):
        x_1D = x_TD[row : row + 1]
        x_SD = x_1D if scales_TS is None else x_1D * scales_TS[row, :, None].to(x_1D.dtype)
        slots = zip(indices, weights, x_SD.expand(len(indices), -1).split(1), strict=True)
        outputs = [experts[index](x, choice) * weight for index, weight, x in slots if index != NO_EXPERT]
        rows.append(sum(outputs[1:], outputs[0]) if outputs else torch.zeros_like(x_1D))
    return torch.cat(rows)


def grouped(
    x_TD: Tensor,
    selection: Selection,
    experts: nn.ModuleList,
    observer: ExpertObserver | None = None,
    scales_TS: Tensor | None = None,
    choice: KernelChoice = TORCH,
    units: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the routed output with one product per expert over its tokens. units: UnitObserver.units, if there is one.

    Slots are sorted by expert once, and the results are restored by the inverse permutation: gathers in both directions
    have a far cheaper backward pass than a scatter-add into the output.
    """
    tokens, slots = selection.experts.shape
    flat = selection.experts.reshape(-1)
    order = flat.argsort(stable=True)
    empty, *counts = torch.bincount(flat + 1, minlength=len(experts) + 1).tolist()
    order_R = order[empty:]
    x_RD = x_TD[order_R // slots]
    if scales_TS is not None:
        x_RD = x_RD * scales_TS.reshape(-1)[order_R, None].to(x_RD.dtype)
    pieces = x_RD.split(counts)
    weights = selection.weights.reshape(-1)[order_R].to(x_TD.dtype).split(counts)
    outputs = [x_TD.new_zeros(empty, x_TD.shape[1])]
    for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        if piece.shape[0]:
            output = experts[index](piece, choice, None if units is None else partial(units, index))
            if observer is not None:
                observer(index, output, weight)
            outputs.append(output * weight[:, None])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return torch.cat(outputs)[inverse].view(tokens, slots, -1).sum(dim=1)
