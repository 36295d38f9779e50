"""The MoE block of a layer that transformers runs, as calibration and criteria see it: router, experts and observers.

The router is a module of transformers, and so is everything around the experts. The experts run here, expert by expert, so
that each one's outputs can be observed and its weights changed.

Shape suffixes: T tokens, D size of the experts' input, S slots, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.adapted.expert_layers import ExpertLayer, is_routing, replaced_forwards
from engine.adapted.experts_implementation import StackedExperts, experts_forward
from engine.decoder.experts import MoeBlock, grouped, route_through
from engine.decoder.routing import NO_EXPERT, Gate, Selection, ShiftedLogits, Skipping, select, sigmoid_shares, softmax
from engine.errors import UnsupportedError
from engine.kernels.kernel_choice import TORCH, KernelChoice

_OWN_ERROR = 1e-4
"""Allowed relative error of this module's functions of logits, because transformers' own round at other places."""
_ROUNDINGS = 4
"""Most roundings of a weight by which a router's result may differ: scores, sum, quotient and scale."""

_INPUT_SIZES = {0.1: 1.0, 1.0: 1.0, 10.0: 0.95}
"""Standard deviations of the inputs that a router is asked about, and the share of tokens whose sums must agree. A router
that divides by a sum plus ε gives less where all scores are tiny, as large inputs make them."""
_ASKED_TOKENS = 128
"""Number of tokens of each size, at least."""
_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
"""Functions by which routers multiply their input by a matrix."""


Ask = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Function that runs a router again with numbers added to its logits, [N]; returns logits, weights and indices."""


class OwnRouting:
    """The choice of the layer's router for the tokens that it has just seen, as a Routing.

    Slots are sorted by weight, largest first. Routings that only change a Selection, such as `Gated` and `Skipping`, can
    have this one as their base, and so can those that add numbers to logits (`shifted`); those that change logits in other
    ways cannot.
    """

    def __init__(self, experts: int, router: str = "the router") -> None:
        """experts: their number. router: its name, for messages."""
        self.experts = experts
        self.logits_TN = torch.empty(0)
        self.selection = Selection(torch.empty(0), torch.empty(0))
        self._router, self._gate = router, cast("Gate | None", None)
        self._seen = (torch.empty(0), torch.empty(0), torch.empty(0))
        self.normalises: bool | None = None
        """Whether the weights of every token have one sum; None until a block has found out for a routing that asks."""
        self.ask: Ask | None = None
        """Runs the router again on the tokens that it has just seen, while a block needs it."""

    def see(self, logits: Tensor, weights: Tensor, indices: Tensor) -> None:
        """Take the outputs of the router. Logits after those of the experts, such as that of an empty slot, are left out."""
        self._seen = logits.reshape(-1, logits.shape[-1]), weights, indices
        self.logits_TN = self._seen[0][:, : self.experts]
        self.selection = self._sorted(weights, indices)

    def use(self, weights: Tensor, indices: Tensor) -> None:
        """Take what the experts are called with as the selection: a block may change the weights that its router returns."""
        if weights is not self._seen[1] or indices is not self._seen[2]:
            self.selection = self._sorted(weights, indices)

    def _sorted(self, weights: Tensor, indices: Tensor) -> Selection:
        experts_TS = indices.reshape(-1, indices.shape[-1]).long()
        weights_TS = weights.reshape(experts_TS.shape).to(torch.promote_types(weights.dtype, torch.float32))
        is_empty_TS = (experts_TS < 0) | (experts_TS >= self.experts)
        if self._seen[0].shape[-1] > self.experts:  # zaya gives expert 0 and a weight of 0 to the slots that it skips
            is_empty_TS |= weights_TS == 0.0
        weights_TS, order_TS = weights_TS.sort(dim=-1, descending=True, stable=True)
        return Selection(experts_TS.masked_fill(is_empty_TS, NO_EXPERT).gather(-1, order_TS), weights_TS)

    def __call__(self, logits_TN: Tensor) -> Selection:
        """Return the router's selection. Raises UnsupportedError for other logits than the router's."""
        if logits_TN is not self.logits_TN:
            raise UnsupportedError("the router of a model that transformers runs cannot choose by other logits than its own")
        return self.selection

    def shifted(self, shift_N: Tensor) -> Selection:
        """Return the router's choice with these numbers added to its logits.

        Raises UnsupportedError for a router whose logits are not one product of its input, or whose weights change before
        they reach the experts.
        """
        assert self.ask is not None
        seen, used = self._sorted(*self._seen[1:]), self.selection
        if not (torch.equal(seen.experts, used.experts) and torch.equal(seen.weights, used.weights)):
            raise UnsupportedError(
                f"the weights of {self._router} change before they reach the experts, so that numbers cannot be added to "
                "its logits; choose another relaxation"
            )
        return self._sorted(*self.ask(shift_N)[1:])

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Return the router's probability of each expert, [T, N].

        The function of the logits is the one that the weights of the first tokens are proportional to. Raises
        UnsupportedError if they are proportional to none of the known functions.
        """
        if self._gate is None:
            logits, weights, indices = self._seen
            selection, precision = self._sorted(weights, indices), torch.finfo(weights.dtype)
            self._gate = _gate_of(logits, selection, precision)
            if self._gate is None:
                raise UnsupportedError(
                    f"the weights of {self._router} are proportional to no function of its logits that is known here "
                    "(softmax, sigmoid, root of softplus), so the probabilities of its experts are not known"
                )
        return self._gate(logits_TN)


def _gate_of(logits_TN: Tensor, selection: Selection, precision: torch.finfo) -> Gate | None:
    """Return the function from logits to probabilities of a router whose outputs are known; None if no function fits.

    The weights of a token's slots are compared with its scores: the smallest spread of their quotients wins. With one
    slot for each token, the weights of all tokens are compared instead; if these are equal, because the router divides by
    their sum, nothing tells the functions apart, and softmax is taken. precision: of the weights that the router returns.
    """
    wide_TN = logits_TN.to(torch.promote_types(logits_TN.dtype, torch.float32))
    if bool((wide_TN >= 0).all()) and torch.allclose(wide_TN.sum(-1), torch.ones(()).to(wide_TN), atol=1e-2):
        return _shares  # the router returns probabilities in the place of logits
    is_judged_TS = (selection.experts != NO_EXPERT) & (selection.weights.abs() >= precision.tiny)
    tolerance, weights_TS = _ROUNDINGS * precision.eps + _OWN_ERROR, selection.weights
    if weights_TS.shape[-1] == 1 and _spread(weights_TS.T, is_judged_TS.T) <= tolerance:
        return softmax
    candidates: tuple[tuple[Gate, Gate], ...] = (
        (softmax, softmax),
        (torch.sigmoid, sigmoid_shares),
        (_root_softplus, _shares_of_root),
    )
    spreads: list[float] = []
    for scores, _ in candidates:
        chosen_TS = scores(wide_TN).gather(-1, selection.experts.clamp_min(0))
        tiny = torch.finfo(torch.float32).tiny
        ratios_TS, is_known_TS = weights_TS / chosen_TS.clamp_min(tiny), is_judged_TS & (chosen_TS >= tiny)
        if weights_TS.shape[-1] == 1:
            ratios_TS, is_known_TS = ratios_TS.T, is_known_TS.T
        spreads.append(_spread(ratios_TS, is_known_TS))
    best = min(range(len(candidates)), key=lambda index: spreads[index])
    return candidates[best][1] if spreads[best] <= tolerance else None


def _spread(values: Tensor, is_known: Tensor) -> float:
    """Return the largest relative difference of two known values in a row; 0 without rows of two values."""
    least = values.masked_fill(~is_known, torch.inf).amin(-1)
    most = values.masked_fill(~is_known, -torch.inf).amax(-1)
    sizes = values.masked_fill(~is_known, 0.0).abs().amax(-1)
    is_pair = (is_known.sum(-1) > 1) & (sizes > 0.0)
    return float(((most - least) / sizes)[is_pair].amax()) if bool(is_pair.any()) else 0.0


def _shares(logits: Tensor) -> Tensor:
    """Return numbers that are not negative divided by their sum."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide / (wide.sum(dim=-1, keepdim=True) + 1e-20)


def _root_softplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits).sqrt()


def _shares_of_root(logits: Tensor) -> Tensor:
    return _shares(_root_softplus(logits.to(torch.promote_types(logits.dtype, torch.float32))))


class AdaptedBlock(MoeBlock):
    """The router and the experts of one layer of a model of transformers.

    `routing`, `observer` and `expert_observer` work as those of a MoeBlock. `running` puts the block into the model.
    """

    def __init__(self, model: Any, layer: ExpertLayer, own: OwnRouting | None = None) -> None:
        """model: of transformers, with the weights of this layer. own: the router's choice, to be kept up to date."""
        nn.Module.__init__(self)
        self.layer, self.own = layer, own or OwnRouting(layer.count, layer.router)
        self.routing = self.own
        self.router, self.module = model.get_submodule(layer.router), model.get_submodule(layer.experts)
        self.asked: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        """The arguments that the router was called with last; kept while an observer runs."""
        self.experts = cast("nn.ModuleList", StackedExperts(self.module))
        self.observer = self.expert_observer = self.unit_observer = None
        self.scales_inputs, self.own_norms = False, None

    @property
    def hidden_size(self) -> int:
        """Size of the experts' input, D."""
        return self.layer.hidden_size

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = self.module.down_proj.device
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run this block in the place of the layer's experts during the body."""
        handle = self.router.register_forward_hook(self._saw_router, with_kwargs=True)
        try:
            with replaced_forwards({self.module: self._run_experts}):
                yield
        finally:
            handle.remove()

    def _saw_router(self, module: nn.Module, given: Any, options: Any, made: Any) -> None:
        assert is_routing(made)
        self.own.see(*made[:3])
        if self.observer is not None:
            self.asked = given, options
        if self.own.normalises is None and isinstance(self.routing, Skipping):
            self.own.normalises = _normalises(module, given, options)
        if isinstance(self.routing, ShiftedLogits):
            self.own.ask = partial(_asked_with, self.layer.router, module, given, options, made[0].shape[-1])

    def _run_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.own.use(top_k_weights, top_k_index)
        logits_TN = self.own.logits_TN
        selection = select(self.routing, x_TD, logits_TN)
        self.own.ask = None
        assert len(selection.experts) == len(x_TD), "kernels read a row of the input for each row of the selection"
        if self.observer is not None:
            self.observer(x_TD, logits_TN, selection)
            self.asked = ((), {})
        return self._computed(x_TD, selection).view_as(hidden_states)

    def _computed(self, x_TD: Tensor, selection: Selection) -> Tensor:
        """Return the output of the chosen experts, [T, D]."""
        if self.unit_observer is None:
            return route_through(x_TD, selection, self.experts, self.expert_observer)
        return self.unit_observer.output(grouped(x_TD, selection, self.experts, units=self.unit_observer.units))

    def outputs(self, x_TD: Tensor) -> Iterator[Tensor]:
        """Yield each expert's output for all tokens, [T, D], with a weight of one."""
        for index in range(len(self.experts)):
            yield self.experts[index](x_TD, TORCH)

    def forward(self, x_TD: Tensor, choice: KernelChoice = TORCH, hidden_TD: Tensor | None = None) -> Tensor:
        """Raise UnsupportedError: the model of transformers runs this block."""
        raise UnsupportedError("the block of a model that transformers runs is run by that model")


class KernelBlock(AdaptedBlock):
    """A block whose experts our kernels compute; only the weights of chosen experts are read."""

    @property
    def _is_plain(self) -> bool:
        """Whether the router's choice is that of the model, and nothing sees it."""
        return self.routing is self.own and self.observer is None

    def _saw_router(self, module: nn.Module, given: Any, options: Any, made: Any) -> None:
        if not self._is_plain:
            super()._saw_router(module, given, options, made)

    def _run_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._is_plain:
            return experts_forward(self.module, hidden_states, top_k_index, top_k_weights)
        return super()._run_experts(hidden_states, top_k_index, top_k_weights)

    def _computed(self, x_TD: Tensor, selection: Selection) -> Tensor:
        return experts_forward(self.module, x_TD, selection.experts, selection.weights)


class _ShiftedProduct(TorchFunctionMode):
    """Adds numbers to the products of a router that have an entry for each expert, and counts these products."""

    def __init__(self, shift_N: Tensor) -> None:
        super().__init__()
        self.shift_N, self.found = shift_N, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and made.shape[-1] == len(self.shift_N):
            self.found, made = self.found + 1, made + self.shift_N.to(made.dtype)
        return made


def _asked_with(
    name: str, router: nn.Module, given: Sequence[Any], options: Mapping[str, Any], size: int, shift_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a router returns for these arguments with numbers added to its logits. size: number of its logits."""
    with _ShiftedProduct(nn.functional.pad(shift_N, (0, size - len(shift_N)))) as mode:
        logits, weights, indices, *_ = type(router).forward(router, *given, **options)
    if mode.found != 1:
        raise UnsupportedError(
            f"the logits of {name} are not one product of its input, so that numbers cannot be added to them; choose "
            "another relaxation"
        )
    return logits, weights, indices


@torch.no_grad()
def _normalises(router: nn.Module, given: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether the weights of all tokens have one sum: the router is asked about random inputs of several sizes.

    given, options: what the router was called with.
    """
    generator, sums = torch.Generator().manual_seed(0), dict[float, Tensor]()
    numbers = [value for value in (*given, *options.values()) if isinstance(value, Tensor) and value.is_floating_point()]
    shape = numbers[0].shape  # the hidden states; other arguments, such as a selection bias, stay as they are

    def noise(value: Any, size: float) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != shape:
            return value
        return (torch.randn(shape, generator=generator) * size).to(value)

    def asked(size: float) -> Tensor:
        inputs = [noise(value, size) for value in given]
        made = type(router).forward(router, *inputs, **{name: noise(value, size) for name, value in options.items()})
        weights: Tensor = made[1]
        return weights.reshape(-1, weights.shape[-1])

    for size in _INPUT_SIZES:
        weights_TS = torch.cat([asked(size) for _ in range(-(-_ASKED_TOKENS // shape[:-1].numel()))])
        tolerance, sums[size] = 2 * torch.finfo(weights_TS.dtype).eps + _OWN_ERROR, weights_TS.double().sum(-1)
    usual = torch.cat([*sums.values()]).median()
    agreeing = {size: ((sums_T - usual).abs() <= tolerance * usual.abs()).double().mean() for size, sums_T in sums.items()}
    return all(float(agreeing[size]) >= least for size, least in _INPUT_SIZES.items())
