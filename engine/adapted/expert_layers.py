"""The MoE layers of a model of transformers, found by what its modules take and return; no weights are needed.

The model is built on torch's meta device, and one text goes through it there. Experts are known by the interface of
`transformers/integrations/moe.py`. Their router is the module that has returned the indices that the experts are called
with: (router logits, weights, indices), possibly followed by more. Nothing here names a family or reads a file.

Shape suffixes: T tokens, S slots, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import UnsupportedError
from engine.transformers_models.transformers_model import quiet_transformers

PROBE_TOKENS = 8
"""Length of the text that goes through a model without weights."""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer of a decoder."""

    index: int
    """Index of the decoder layer."""
    experts: str
    """Full name of the module of stacked experts."""
    router: str
    """Full name of the router."""
    count: int
    """Number of routed experts."""
    per_token: int
    """Number of slots of each token."""
    hidden_size: int
    """Size of the experts' input, which may be smaller than the model's hidden size."""
    width: int
    """Number of hidden units of an expert."""
    has_biases: bool = False
    """Whether the projections of an expert have biases."""


@dataclass(frozen=True)
class FoundLayers:
    """The decoder layers of a model, and its MoE layers in order."""

    layers: str
    """Full name of the list of decoder layers."""
    count: int
    """Number of decoder layers."""
    experts: tuple[ExpertLayer, ...]

    @property
    def sampled(self) -> ExpertLayer:
        """The first of the layers with the most experts, in which the layout of experts in the files is looked up."""
        return max(self.experts, key=lambda layer: layer.count)


PROJECTIONS = tuple(f"{name}_proj{end}" for name in ("gate_up", "up", "down") for end in ("", "_bias"))
"""Names of the parameters that hold the projections of stacked experts."""


def projection_names(found: FoundLayers) -> list[str]:
    """Return the names of all parameters that may hold projections of a model's experts."""
    return [f"{layer.experts}.{name}" for layer in found.experts for name in PROJECTIONS]


def unit_axes(module: Any) -> dict[str, tuple[int, int]]:
    """Return the axis of hidden units in each parameter of a module of experts, and how many numbers a unit has along it."""
    first, each = ("gate_up_proj", 2) if module.has_gate else ("up_proj", 1)
    found = {first: (2 if module.is_transposed else 1, each), "down_proj": (1 if module.is_transposed else 2, 1)}
    return found | ({f"{first}_bias": (1, each)} if module.has_bias else {})


def skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return the model on the meta device, in eval mode; only buffers that no file holds have values.

    config: is changed; give a copy. Raises UnsupportedError if transformers cannot build the model.
    """
    for part in {id(each): each for each in (config, config.get_text_config(decoder=True))}.values():
        part.output_router_logits = False
    with quiet_transformers():
        try:
            with torch.device("meta"), torch.no_grad():
                model = model_class._from_config(config, dtype=dtype).eval().requires_grad_(False)
            model._move_missing_keys_from_meta_to_device(set(), {"": "cpu"}, None, None)  # buffers that no file holds
            model._initialize_missing_keys(False)
        except Exception as error:  # any exception of transformers for a config that it cannot build
            raise UnsupportedError(
                f"transformers cannot build a model of the family {config.model_type}: {_shortened(error)}"
            ) from error
    return model


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the interface: stacked experts that are called with indices and weights."""
    return all(hasattr(module, name) for name in ("_is_expert_parallel", "is_transposed", "has_gate", "down_proj"))


def find_layers(model: Any, model_type: str) -> FoundLayers:
    """Return the decoder and MoE layers of a model without weights. Raises UnsupportedError naming what does not fit.

    model: from `skeleton`, on the meta device with all of its buffers; it is not changed.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if not any(is_experts(module) for module in model.modules()):
        raise UnsupportedError(
            f"a model of the family {model_type} has no experts with the interface of transformers' stacked experts"
        )
    calls = _calls(model, model_type, names)
    if not calls:
        raise UnsupportedError(f"text does not reach the experts of a model of the family {model_type}")
    layers = _list_of_layers(model, [call.experts for call in calls], model_type)
    found = tuple(_expert_layer(model, layers, call, model_type) for call in calls)
    _check_each_once("experts", [each.experts for each in found], model_type)
    _check_each_once("a router", [each.router for each in found], model_type)
    indices = [each.index for each in found]
    if indices != sorted(set(indices)):
        raise UnsupportedError(
            f"a model of the family {model_type} has several modules of experts in one layer, which are not read"
        )
    return FoundLayers(layers, len(model.get_submodule(layers)), found)


@dataclass
class _Call:
    """One call of experts in the probe."""

    experts: str
    router: str
    logits_TN: Tensor
    per_token: int


def _calls(model: Any, model_type: str, names: Mapping[int, str]) -> list[_Call]:
    """Return the calls of experts, in order. Raises UnsupportedError for indices that no router has returned."""
    calls: list[_Call] = []
    routed: list[tuple[str, Tensor, Tensor]] = []

    def saw_output(module: nn.Module, given: Any, made: Any) -> None:
        if is_routing(made):
            routed.append((names[id(module)], made[0], made[2]))

    def saw_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        name = names[id(module)]
        of = [(router, logits) for router, logits, indices in routed if indices is top_k_index]
        if not of:
            raise UnsupportedError(
                f"the experts {name} of a model of the family {model_type} are not called with what "
                "one module returns as (logits, weights, "
                "indices), so its router is not known"
            )
        calls.append(_Call(name, *of[0], top_k_index.shape[-1]))
        return torch.empty_like(hidden_states)

    handles = [module.register_forward_hook(saw_output) for module in model.modules() if not is_experts(module)]
    experts = [module for module in model.modules() if is_experts(module)]
    with replaced_forwards({module: partial(saw_experts, module) for module in experts}):
        try:
            probe(model, PROBE_TOKENS, use_cache=False)
        except UnsupportedError:
            raise
        except Exception as error:  # any exception of a model that computes with the values of its inputs
            reason = _shortened(error)
            raise UnsupportedError(
                f"a model of the family {model_type} cannot be examined without its weights: {reason}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    return calls


def is_routing(made: Any) -> bool:
    """Return whether a module's output is that of a router: logits, weights and indices, possibly followed by more."""
    if not isinstance(made, tuple) or len(made) < 3 or not all(isinstance(part, Tensor) for part in made[:3]):
        return False
    logits, weights, indices = made[:3]
    is_real = logits.is_floating_point() and weights.is_floating_point() and not indices.is_floating_point()
    return is_real and weights.shape == indices.shape and logits.dim() >= 2


@torch.no_grad()
def probe(model: Any, length: int, **options: Any) -> Any:
    """Run a text of so many tokens through a model on the meta device and return its output. options: of its forward."""
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    kept = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    with quiet_transformers():
        move_buffers(model, "meta")
        try:
            with torch.device("meta"), _all_nonzero(), _ZeroForValues():  # type: ignore[no-untyped-call]
                return model(input_ids=tokens, **options)
        finally:
            for name, buffer in kept.items():
                _set_buffer(model, name, buffer)


def move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Move the buffers that have values to a device."""
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta:
            _set_buffer(model, name, buffer.to(device))


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._buffers[own] = value


@contextmanager
def _all_nonzero() -> Iterator[None]:
    """Let tensors without values count as nonzero everywhere, so that their number of nonzero elements is known."""
    from torch.fx.experimental import _config

    before, _config.meta_nonzero_assume_all_nonzero = _config.meta_nonzero_assume_all_nonzero, True
    try:
        yield
    finally:
        _config.meta_nonzero_assume_all_nonzero = before


class _ZeroForValues(TorchDispatchMode):
    """Answers every question about the value of a tensor without values with zero or False."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced_forwards(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run other functions in the place of their forward method during the body."""
    for module, function in functions.items():
        module.forward = function
    try:
        yield
    finally:
        for module in functions:
            del module.forward


def same_shape(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return a tensor without values in the place of what experts compute."""
    return torch.empty_like(hidden_states)


@contextmanager
def seen_before_head(model: Any, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with the hidden states that the output head is given, during the body."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda module, given: see(given[0]) if given else None)
    try:
        yield
    finally:
        handle.remove()


def check_states(model: Any, model_type: str) -> None:
    """Raise UnsupportedError unless the output head of a model without weights is given the states of all positions."""
    seen: list[Tensor] = []
    experts = {module: same_shape for module in model.modules() if is_experts(module)}
    with seen_before_head(model, seen.append), replaced_forwards(experts):
        probe(model, PROBE_TOKENS, use_cache=False)
    if not seen or seen[-1].shape[:-1] != (1, PROBE_TOKENS):
        raise UnsupportedError(
            f"the output head of a model of the family {model_type} is not given the hidden states of all positions, which "
            "the reconstruction loss compares"
        )


def _list_of_layers(model: nn.Module, experts: Sequence[str], model_type: str) -> str:
    """Return the name of the outermost list of modules that all experts lie in, each in one of its modules."""
    parts = experts[0].split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts))]
    for prefix in prefixes:
        is_list = isinstance(model.get_submodule(prefix), nn.ModuleList)
        if is_list and all(name.startswith(f"{prefix}.") for name in experts):
            return prefix
    raise UnsupportedError(f"the experts of a model of the family {model_type} do not lie in one list of layers")


def _expert_layer(model: nn.Module, layers: str, call: _Call, model_type: str) -> ExpertLayer:
    module: Any = model.get_submodule(call.experts)
    count, *rest = module.down_proj.shape
    width, hidden = rest if module.is_transposed else reversed(rest)
    if not count <= call.logits_TN.shape[-1] <= count + 1:
        raise UnsupportedError(
            f"the router {call.router} of a model of the family {model_type} returns "
            f"{call.logits_TN.shape[-1]} logits for {count} experts"
        )
    index = int(call.experts.removeprefix(f"{layers}.").split(".")[0])
    return ExpertLayer(index, call.experts, call.router, count, call.per_token, hidden, width, module.has_bias)


def _check_each_once(what: str, names: Sequence[str], model_type: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UnsupportedError(
                f"several layers of a model of the family {model_type} share {what} ({name}), and each needs its own"
            )


def _shortened(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
