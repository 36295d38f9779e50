"""Our expert kernels inside transformers: an experts implementation, which any program can choose by its name.

transformers calls the experts of a layer with hidden states [T, D], the chosen experts [T, S] and their weights [T, S]
(`transformers/integrations/moe.py`). This implementation reads the weights of the chosen experts where they lie, without a
copy, and no other weights:

- in one call of the compiled kernels, if the experts are bfloat16 and the kernels have their gate;
- expert by expert, through views into the stacked weights, for all other experts on a CPU.

Where `obstacle` finds a reason (a GPU, gradients, torch.compile), an implementation of transformers computes the experts.
A slot whose index is not the number of an expert is empty: it adds nothing, and on a CPU it costs nothing.

Shape suffixes: T tokens, D hidden, F expert width, S slots, N experts, P outputs of the first product (2F with a gate, F
without), O I outputs and inputs of any product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from engine.adapted.low_bit_weights import LowBitStack
from engine.decoder.experts import gated, grouped, sparse
from engine.decoder.routing import NO_EXPERT, Selection
from engine.errors import UnsupportedError
from engine.families.layer_config import Activation, ClampedSwiglu, GatedGelu
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, TORCH, KernelChoice, is_served, prepare_decoding
from engine.kernels.linear import as_bfloat16, expert_form, linear, places_of, serves_rows
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight
from engine.kernels.torch_products import transposed_linear

NAME = "moe-compress"
"""Name of the implementation, for `experts_implementation=` of transformers."""
GROUPED = "grouped_mm"
"""Name of transformers' default implementation, which computes what this one does not on a GPU and in a compiled model."""
CLAMPS = (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit"))
"""Attributes in which modules of transformers keep α and the limit of a clamped SwiGLU."""
FEW_ROWS = 32
"""Maximum number of tokens of an expert for the kernels for few rows; with more, widening the weights once is faster."""
CHOICE = KernelChoice(may_compile=True, max_few_rows=FEW_ROWS)
Stacked = Tensor | LowBitStack
"""The weights of one product of all experts of a layer."""
logger = logging.getLogger(__name__)


def register() -> None:
    """Make `NAME` known to transformers. Registering again changes nothing."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    # Experts that transformers keeps in FP8 have a registry of their own, and only transformers' kernels read them.
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, ALL_FP8_EXPERTS_FUNCTIONS[GROUPED])


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return Σ_s weight_s · FFN_s(x), [T, D], in the dtype of the hidden states.

    self: a module of transformers with stacked experts. transformers calls this function in place of the module's forward.
    """
    experts = StackedExperts(self)
    reason = obstacle(experts, hidden_states, top_k_index, top_k_weights)
    if reason is not None:
        return _by_transformers(self, reason, hidden_states, top_k_index, top_k_weights)
    if not hidden_states.shape[0]:
        return torch.empty_like(hidden_states)
    is_empty = (top_k_index < 0) | (top_k_index >= len(experts))
    selection = Selection(top_k_index.masked_fill(is_empty, NO_EXPERT), top_k_weights)
    with torch.no_grad():
        return _routed(experts, hidden_states.detach().contiguous(), selection)


def prepare(module: Any) -> None:
    """Load the compiled kernels that compute these experts, so that their first call does not wait for them."""
    experts = StackedExperts(module)
    kernels = CHOICE.for_any(experts.sample)
    if kernels is not None:
        _table_of(kernels, experts)


class StackedExperts:
    """The experts of one module of transformers, as views into its stacked weights: a list of functions."""

    def __init__(self, module: Any) -> None:
        """module: experts that transformers has decorated with `use_experts_implementation`."""
        self.module = module
        # A parametrized module computes a weight anew at each access, so that each is accessed once.
        self.first_NPD: Stacked = module.gate_up_proj if module.has_gate else module.up_proj
        self.down_NDF: Stacked = module.down_proj
        self.first_NP: Tensor | None = None
        self.down_ND: Tensor | None = None
        if module.has_bias:
            self.first_NP = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
            self.down_ND = module.down_proj_bias

    def __len__(self) -> int:
        return self.first_NPD.shape[0]

    def __getitem__(self, index: int) -> StackedExpert:
        return StackedExpert(self, index)

    def __iter__(self) -> Iterator[StackedExpert]:
        return (self[index] for index in range(len(self)))

    @property
    def weights(self) -> list[Stacked]:
        """All stacked weights and biases."""
        every = (self.first_NPD, self.down_NDF, self.first_NP, self.down_ND)
        return [each for each in every if each is not None]

    @property
    def is_low_bit(self) -> bool:
        """Whether some weights are low-bit."""
        return any(isinstance(each, LowBitStack) for each in self.weights)

    @property
    def sample(self) -> Tensor:
        """A tensor with the dtype and the device of the weights, or of the scales of low-bit ones."""
        first = self.first_NPD
        return first.scales if isinstance(first, LowBitStack) else first[0]

    @property
    def width(self) -> int:
        """Number of hidden units of an expert."""
        is_swapped = self.module.is_transposed and not isinstance(self.down_NDF, LowBitStack)
        return self.down_NDF.shape[1 if is_swapped else 2]

    def first(self, x_TD: Tensor, index: int, choice: KernelChoice) -> Tensor:
        """Return the product of one expert's first matrix, [T, P]."""
        return self._product(x_TD, index, self.first_NPD, self.first_NP, choice)

    def down(self, h_TF: Tensor, index: int, choice: KernelChoice) -> Tensor:
        """Return the product of one expert's down projection, [T, D]."""
        return self._product(h_TF, index, self.down_NDF, self.down_ND, choice)

    def _product(
        self, x_TI: Tensor, index: int, weight_NOI: Stacked, bias_NO: Tensor | None, choice: KernelChoice
    ) -> Tensor:
        bias_O = None if bias_NO is None else bias_NO[index]
        if isinstance(weight_NOI, LowBitStack):
            y_TO = weight_NOI.product(x_TI, index, choice)
            return y_TO if bias_O is None else y_TO + bias_O
        if self.module.is_transposed:
            return transposed_linear(x_TI, weight_NOI[index], bias_O)
        return linear(x_TI.contiguous(), weight_NOI[index], bias_O, choice)


@dataclass(frozen=True)
class StackedExpert:
    """One expert of a module, as a function."""

    experts: StackedExperts
    index: int

    @property
    def width(self) -> int:
        """Number of hidden units F."""
        return self.experts.width

    def units(self, x_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the hidden units h, the input of the down projection, [T, F]."""
        module, made_TP = self.experts.module, self.experts.first(x_TD, self.index, choice)
        h_TF: Tensor = module._apply_gate(made_TP) if module.has_gate else module.act_fn(made_TP)
        return h_TF

    def __call__(
        self, x_TD: Tensor, choice: KernelChoice = TORCH, observe: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the output for all tokens, [T, D]. observe: is given the hidden units, and returns those to multiply."""
        h_TF, module = self.units(x_TD, choice), self.experts.module
        y_TD = self.experts.down(h_TF if observe is None else observe(h_TF), self.index, choice)
        return module.post_expert_norm(y_TD) if module.has_post_expert_norm else y_TD


def obstacle(experts: StackedExperts, x_TD: Tensor, indices_TS: Tensor, weights_TS: Tensor) -> str | None:
    """Return why transformers must compute these experts, or None if this implementation does."""
    stored = [each for each in experts.weights if not isinstance(each, LowBitStack)]
    given = (x_TD, indices_TS, weights_TS)
    if _makes_graph():
        return "the model is being compiled or exported"
    if any(type(each) not in (Tensor, nn.Parameter) for each in (*stored, *given)):
        return "some weights or inputs are not plain tensors"
    if not all(each.is_cpu for each in (*stored, *given)):
        return "the experts are not on the CPU"
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*stored, x_TD, weights_TS)):
        return "gradients are enabled (torch.inference_mode() and generate() disable them)"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is enabled"
    if not x_TD.is_floating_point() or any(each.dtype != x_TD.dtype for each in stored):
        return "the experts and their inputs have different dtypes"
    if x_TD.dim() != 2 or indices_TS.dim() != 2 or experts.first_NPD.dim() != 3:
        return "the inputs or the stacked weights have another number of dimensions"
    if experts.module._is_expert_parallel:
        return "the experts are spread over several processes"
    return None


_reported: set[str] = set()


def _by_transformers(module: Any, reason: str, x_TD: Tensor, indices_TS: Tensor, weights_TS: Tensor) -> Tensor:
    """Return the output that transformers computes. A reason is logged when it first occurs."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if StackedExperts(module).is_low_bit:
        raise UnsupportedError(f"transformers does not compute experts with low-bit weights, and here it must: {reason}")
    is_graph = _makes_graph()
    if reason not in _reported and not is_graph:
        _reported.add(reason)
        logger.warning("experts_implementation %r: %s; transformers computes the experts", NAME, reason)
    if not module._is_expert_parallel:  # its empty slots have a meaning of their own
        is_empty = (indices_TS < 0) | (indices_TS >= module.down_proj.shape[0])
        indices_TS, weights_TS = indices_TS.masked_fill(is_empty, 0), weights_TS.masked_fill(is_empty, 0.0)
    # The module's own forward loops over experts of any shape. Torch's grouped products on a CPU refuse bfloat16 rows whose
    # size is not a multiple of 16 bytes.
    may_loop = x_TD.is_cpu and not is_graph and not module._is_expert_parallel
    eager = getattr(type(module).forward, "__wrapped__", None) if may_loop else None
    made: Tensor = (eager or ALL_EXPERTS_FUNCTIONS[GROUPED])(module, x_TD, indices_TS, weights_TS)
    return made


def _makes_graph() -> bool:
    """Return whether torch records this call instead of only computing it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


# The compiled kernels


@dataclass(frozen=True)
class Table:
    """Where the experts of a module lie, as the compiled kernels need it."""

    origin: tuple[Any, ...]
    """State of the module for which the table is valid."""
    rows: Any
    """`expert_table` of the kernels; None if the kernels do not compute these experts."""
    clamp: tuple[float, float] | None = None
    """α and limit of a clamped SwiGLU."""
    form: tuple[int | str, int] | None = None
    """Form of the weights, as the kernels need it."""
    takes_many: bool = False
    """Whether the kernels for many tokens support the shapes."""
    kept: Any = None
    """Records to which the rows have addresses."""


_tables: WeakKeyDictionary[nn.Module, Table] = WeakKeyDictionary()
"""The table of each module that has been called. A table takes 80 bytes for each expert."""


def _routed(experts: StackedExperts, x_TD: Tensor, selection: Selection) -> Tensor:
    """Return the output of the experts, [T, D]. The kernels compute as much of it as they do fastest."""
    kernels, tokens = CHOICE.for_any(x_TD), x_TD.shape[0]
    table = None if kernels is None else _table_of(kernels, experts)
    if table is None or table.rows is None:
        return _through_views(experts, x_TD, selection)
    if table.takes_many and tokens > COMPILED_MAX_ROWS and CHOICE.for_products(tokens, x_TD) is not None:
        return _compiled(kernels, table, x_TD, selection, many=True)
    if tokens <= FEW_ROWS:
        return _compiled(kernels, table, x_TD, selection, many=False)
    counts_N = torch.bincount(selection.experts.reshape(-1) + 1, minlength=len(experts) + 1)[1:]
    is_crowded_TS = (counts_N > FEW_ROWS)[selection.experts.clamp_min(0)]
    few, rest = (
        selection._replace(experts=selection.experts.masked_fill(left_out_TS, NO_EXPERT))
        for left_out_TS in (is_crowded_TS, ~is_crowded_TS)
    )
    parts = []
    if bool((few.experts != NO_EXPERT).any()):
        parts.append(_compiled(kernels, table, x_TD, few, many=False))
    if not parts or bool((rest.experts != NO_EXPERT).any()):
        parts.append(_through_views(experts, x_TD, rest))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _through_views(experts: StackedExperts, x_TD: Tensor, selection: Selection) -> Tensor:
    """Return the output of the experts, computed one after another."""
    compute = sparse if x_TD.shape[0] == 1 else grouped  # several tokens may choose one expert, which is then read once
    return compute(x_TD, selection, cast("nn.ModuleList", experts), choice=CHOICE)


def _compiled(kernels: Any, table: Table, x_TD: Tensor, selection: Selection, *, many: bool) -> Tensor:
    """Return the output that the kernels compute in one call. many: whether to use the kernels for many tokens."""
    chosen_TS = np.ascontiguousarray(selection.experts.to(torch.int64).numpy())
    weights_TS = np.ascontiguousarray(selection.weights.detach().float().numpy())
    given = (x_TD.data_ptr(), table.rows, chosen_TS, weights_TS, x_TD.shape[1])
    return as_bfloat16(kernels.swiglu(*given, table.form, table.clamp, many=many))


def _table_of(kernels: Any, experts: StackedExperts) -> Table:
    """Return the table of a module's experts, a new one if the weights or the gate have been replaced."""
    table, origin = _tables.get(experts.module), _origin(experts)
    if table is None or table.origin != origin:
        table = _tables[experts.module] = _new_table(kernels, experts, origin)
    return table


def _origin(experts: StackedExperts) -> tuple[Any, ...]:
    """Return what a table is made from: the places and shapes of the weights, and the attributes of the gate."""
    module = experts.module
    weights = (experts.first_NPD, experts.down_NDF)
    places = [each if isinstance(each, LowBitStack) else (each.data_ptr(), each.shape, each.stride()) for each in weights]
    return *places, getattr(module, "act_fn", None), *(getattr(module, name, None) for pair in CLAMPS for name in pair)


def _new_table(kernels: Any, experts: StackedExperts, origin: tuple[Any, ...]) -> Table:
    """Return the table of these experts, and load the kernels that compute them."""
    module, width = experts.module, experts.width
    is_plain = module.has_gate and not (module.has_bias or module.has_post_expert_norm)
    matrices = _matrices(experts) if is_plain else []
    every = [each for own in matrices for each in own]
    form = expert_form(kernels, every)
    gate = None if form is None else compiled_gate(module, width)
    if form is None or gate is None:
        return Table(origin, None)
    kinds = sorted({each.kind for each in every if isinstance(each, LowBitWeight)}, key=str)
    prepare_decoding(torch.bfloat16, experts.sample.device, lambda loaded: loaded.needed(kinds, is_whole=False))
    places, kept = places_of(kernels, every, form)
    starts = range(0, len(places), len(matrices[0]))
    rows = kernels.expert_table((places[start : start + len(matrices[0])], width) for start in starts)
    return Table(origin, rows, gate[0], form, serves_rows(kernels, matrices[0], many=True), kept)


def _matrices(experts: StackedExperts) -> list[tuple[Weight, ...]]:
    """Return gate, up and down of each expert, as the kernels multiply them; none of experts that they do not multiply."""
    first, down, width = experts.first_NPD, experts.down_NDF, experts.width
    if isinstance(first, LowBitStack) and isinstance(down, LowBitStack):
        return [(*own, *last) for own, last in zip(first.experts, down.experts, strict=True)]
    if isinstance(first, LowBitStack) or isinstance(down, LowBitStack) or experts.module.is_transposed:
        return []
    if not (is_served(first[0]) and is_served(down[0])):
        return []
    return [(first_PD[:width], first_PD[width:], down_DF) for first_PD, down_DF in zip(first, down, strict=True)]


def compiled_gate(module: Any, width: int) -> tuple[tuple[float, float] | None] | None:
    """Return α and limit of the module's gate, in a tuple: (None,) for a plain SwiGLU. None: the kernels lack the gate.

    The module's own function decides: it must agree with the kernels' formula on numbers of all magnitudes and both signs.
    """
    number_F, magnitude_F = torch.arange(width), torch.logspace(-3, 4, width)
    gate_F = torch.where(number_F % 2 == 0, magnitude_F, -magnitude_F)
    up_F = torch.where(number_F % 4 < 2, magnitude_F, -magnitude_F).roll(width // 3 // 4 * 4)
    candidates: list[Activation | None] = [None, GatedGelu()]
    for names in CLAMPS:
        alpha, limit = (getattr(module, name, None) for name in names)
        if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)) and limit > 0:
            candidates.append(ClampedSwiglu(float(alpha), float(limit)))
    try:
        made_F = module._apply_gate(torch.cat([gate_F, up_F])[None])[0]
    except (RuntimeError, TypeError):  # the gate has parameters of another dtype
        return None
    for each in candidates:
        expected_F = gated(gate_F, up_F, each)
        if made_F.shape == expected_F.shape and torch.allclose(made_F, expected_F, rtol=1e-5, atol=1e-7):
            return (None,) if each is None else ((each.alpha, each.limit),)
    return None
