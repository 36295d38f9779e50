"""Activation-aware scales of input channels, which reduce the error of weight quantization (AWQ).

AWQ, section 3.2: s* = argmin_s L(s), L(s) = ‖Q(W·diag(s))·(diag(s)⁻¹·X) − W·X‖ (eq. 4), with s = s_X^α, where s_X is the
mean magnitude of each channel's activations and α is from a grid over [0, 1] (eq. 5). diag(s)⁻¹ is folded into the
preceding operation, where that is exact:

- the norm before attention: query, key and value share one s;
- the norm before a feed-forward block: gate and up of all its experts share one s. Routers and the shared expert's gate,
  which are not rounded, have their columns multiplied by s. Where the shared expert and the router have norms of their own,
  the shared expert has an s of its own, and the router's input does not change;
- the rows of up before down: each expert has its own s, because silu(gate) ⊙ up is linear in up, as is gelu(gate) ⊙ up.

Inputs of attention's other matrices are not scaled, for example mixtures of values that several heads share; neither is the
input of down where up is clamped or has a bias.

A choice of this project: L is summed over the matrices that share an s, each on the sampled tokens that reach it. The
tokens of an expert are those that the unquantized model routes to it.

Shape suffixes: T tokens, D inputs, O outputs, F width, A exponents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import DecoderLayer
from engine.decoder.parameters import attention_parameters
from engine.decoder.routing import select
from engine.families.config import DecoderConfig
from engine.families.tensor_names import (
    NEVER_ROUNDED,
    attention_prefix,
    dense_tensor,
    expert_tensor,
    ffn_parts,
    shared_gate_tensor,
    shared_tensor,
)
from engine.families.tensor_shapes import noise_tensors, router_tensors
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.kernels.linear import linear
from engine.kernels.stored.quantized_weight import as_tensor, quantise
from engine.kernels.stored.scheme import Scheme
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_layers

EXPONENTS = tuple(step / 10 for step in range(11))
"""Grid of α. With α = 0 nothing is scaled, so the result is never worse than without scales on the sample."""
READ_THE_NORM = (
    *("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj"),
)
"""Matrices of attention of any kind whose input is the output of the norm before it."""
SAMPLE_TOKENS = 2048
"""Number of tokens whose activations are kept, for one layer at a time."""


class Fold(NamedTuple):
    """One s and the tensors that it changes."""

    before: tuple[str, ...]
    """Tensors whose rows, or entries for a norm, are divided by s."""
    readers: tuple[str, ...]
    """Tensors whose columns are multiplied by s."""
    s_D: Tensor
    zero_centered: bool = False
    """Whether the entries of `before` are stored as their differences from 1."""


@dataclass
class Rescaling:
    """Factors by which tensors are multiplied before rounding; tensors without a factor stay unchanged."""

    folds: list[Fold] = field(default_factory=list)
    exponents: dict[int, list[float]] = field(default_factory=dict)
    """By decoder layer: α of attention's input, α of the feed-forward block's input, and the mean α of its down
    projections.
    """
    errors: list[tuple[float, float]] = field(default_factory=list)
    """For each s, the squared error of the outputs with α = 0, and with the selected α."""

    @cached_property
    def _rows(self) -> dict[str, Tensor]:
        return {name: 1.0 / fold.s_D for fold in self.folds for name in fold.before}

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        return {name: fold.s_D for fold in self.folds for name in fold.readers}

    def factor(self, name: str, like: Tensor) -> Tensor | None:
        """Return the factor of a tensor, in its shape or in one that broadcasts to it."""
        rows, columns = self._rows.get(name), self._columns.get(name)
        if rows is not None and like.dim() == 2:
            rows = rows[:, None]
        if rows is None or columns is None:
            return columns if rows is None else rows
        return rows * columns

    @cached_property
    def _zero_centered(self) -> frozenset[str]:
        return frozenset(name for fold in self.folds if fold.zero_centered for name in fold.before)

    def rescaled(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that keeps its dtype, times the factor that was folded into it."""
        factor = self.factor(name, tensor)
        if factor is None:
            return tensor
        one = 1.0 if name in self._zero_centered else 0.0
        return ((tensor.float() + one) * factor - one).to(tensor.dtype)

    def save(self, path: Path) -> None:
        """Write the file. An existing file is replaced only when the new one is complete."""
        names = [[fold.before, fold.readers, fold.zero_centered] for fold in self.folds]
        about = json.dumps({"names": names, "exponents": list(self.exponents.items()), "errors": self.errors})
        tensors = {f"s.{number}": fold.s_D for number, fold in enumerate(self.folds)}
        write_state(path, tensors, {"activation_scales": about}, "scales of activations")


def load_rescaling(path: Path) -> Rescaling:
    """Read a file that `save` of this project has written."""
    with SafetensorsFile(path) as file:
        check_digest(file)
        about = json.loads(file.metadata["activation_scales"])
        folds = [
            Fold(tuple(before), tuple(readers), file.tensor(f"s.{number}").clone(), *zero_centered)
            for number, (before, readers, *zero_centered) in enumerate(about["names"])
        ]
    return Rescaling(folds, dict(about["exponents"]), [(before, after) for before, after in about["errors"]])


def activation_scales(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    scheme: Scheme,
    *,
    experts_only: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Rescaling:
    """Return s of every layer, with one layer in memory at a time."""
    chosen = torch.randperm(tokens_SL.numel(), generator=torch.Generator().manual_seed(seed))
    sample_T = chosen[:SAMPLE_TOKENS].sort().values.to(device)
    found = Rescaling()

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None]:
        attention, block = layer.attention, layer.feed_forward
        of_attention = None if attention is None else Inputs(attention, sample_T)
        of_block = None if block is None else Inputs(block, sample_T)
        has_own_norms = isinstance(block, MoeBlock) and block.own_norms is not None
        of_hidden = Inputs(block, sample_T, place=2) if block is not None and has_own_norms else None

        def finish() -> None:
            search = LayerSearch(checkpoint, index, scheme, found, budget)
            exponents = [0.0]
            if attention is not None and of_attention is not None and not experts_only:
                exponents = [search.attention(layer, attention, of_attention.sample_TD)]
            if block is not None and of_block is not None and (isinstance(block, MoeBlock) or not experts_only):
                hidden = None if of_hidden is None else of_hidden.sample_TD
                exponents += search.feed_forward(block, of_block.sample_TD, hidden)
            found.exponents[index] = exponents

        return finish

    stream_layers(checkpoint, tokens_SL, visit, dtype=dtype, device=device, budget=budget, progress=progress).close()
    return found


class Inputs:
    """Records a module's inputs for a sample of tokens."""

    def __init__(self, module: nn.Module, sample_T: Tensor, place: int = 0) -> None:
        """Create the recorder. sample_T: sorted indices into the flat sequence of all tokens. place: of the argument."""
        self.sample_T, self.seen, self._place = sample_T, 0, place
        self._kept: list[Tensor] = []
        module.register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        x_TD = given[self._place].flatten(0, -2)
        here = self.sample_T[(self.sample_T >= self.seen) & (self.sample_T < self.seen + len(x_TD))]
        self._kept.append(x_TD[here - self.seen])
        self.seen += len(x_TD)

    @property
    def sample_TD(self) -> Tensor:
        """The recorded rows, in order."""
        return torch.cat(self._kept)


_Ffn = tuple[list[str], Expert, Tensor]
"""An FFN of a layer: the names of its matrices, its module, and the tokens that reach it."""


class LayerSearch:
    """The search for one layer's s, which it stores in a Rescaling."""

    def __init__(
        self, checkpoint: Checkpoint, index: int, scheme: Scheme, found: Rescaling, budget: MemoryBudget = UNLIMITED
    ) -> None:
        self.checkpoint, self.index, self.scheme, self.found = checkpoint, index, scheme, found
        self._budget = budget

    @property
    def config(self) -> DecoderConfig:
        """The model's config."""
        return self.checkpoint.config

    def attention(self, layer: DecoderLayer, attention: nn.Module, x_TD: Tensor) -> float:
        """Return α of attention's input."""
        if layer.residuals is not None:
            return 0.0  # the residual connection reads the norm too
        prefix = attention_prefix(self.config, self.index)
        own = {f"{prefix}.{name}": weight for name, weight in attention_parameters(attention)}
        rounded = [f"{prefix}.{name}.weight" for name in READ_THE_NORM]
        rounded = [name for name in rounded if name in own]
        others = [name for name in (f"{prefix}.{each}" for each in NEVER_ROUNDED) if name in self.checkpoint.shapes]
        alpha, s_D = self._best(x_TD, [(own[name], x_TD) for name in rounded], rounded[0])
        self._fold(self._norm("input_layernorm"), [*rounded, *others], s_D, self.config.zero_centered)
        return alpha

    def feed_forward(self, block: MoeBlock | Expert, x_TD: Tensor, hidden_TD: Tensor | None = None) -> list[float]:
        """Return α of the input of gate and up, and the mean α of the inputs of down projections.

        hidden_TD: the hidden states, for a block with norms of its own.
        """
        every = list(self._ffns(block, x_TD, hidden_TD))
        used = [each for each in every if len(each[2])]
        if self.config.layers[self.index].residuals is not None:
            return [0.0, sum(self._down(*each) for each in used) / len(used)]
        if isinstance(block, MoeBlock) and block.own_norms is not None and block.shared is not None:
            own = every.pop()
            self._input("shared_input_norm", [own], own[2], [])
            alpha = self._input("post_attention_layernorm", every, x_TD, [])
        else:
            alpha = self._input("post_attention_layernorm", every, x_TD, self._unrounded())
        return [alpha, sum(self._down(*each) for each in used) / len(used)]

    def _input(self, norm: str, ffns: Sequence[_Ffn], x_TD: Tensor, others: Sequence[str]) -> float:
        """Return α of the input of gate and up of the FFNs that read one norm. others: further readers of the norm."""
        used = [each for each in ffns if len(each[2])]
        matrices = [
            (as_tensor(weight), rows_TD) for names, ffn, rows_TD in used for weight in ffn.projections[: len(names) - 1]
        ]
        alpha, s_D = self._best(x_TD, matrices, used[0][0][0])
        readers = [name for names, _, _ in ffns for name in names[:-1]]
        self._fold(self._norm(norm), [*readers, *others], s_D, self.config.zero_centered)
        return alpha

    def _norm(self, name: str) -> list[str]:
        parts = ("weight", "bias") if self.config.layer_norm else ("weight",)
        return [f"model.layers.{self.index}.{name}.{part}" for part in parts]

    def _down(self, names: list[str], ffn: Expert, x_TD: Tensor) -> float:
        if not ffn.is_linear_in_up:
            return 0.0
        *_, up, down = names
        middle_TF = ffn.units(x_TD)
        alpha, s_F = self._best(middle_TF, [(as_tensor(ffn.down_DF), middle_TF)], down)
        if ffn.has_gate:
            self._fold([up], [down], s_F)
        else:  # relu(u / √s)² = relu(u)² / s
            self._fold([up], [], s_F.sqrt())
            self._fold([], [down], s_F)
        return alpha

    def _ffns(self, block: MoeBlock | Expert, x_TD: Tensor, hidden_TD: Tensor | None) -> Iterator[_Ffn]:
        """Yield each FFN of the layer with the names of its matrices, and the tokens that reach it."""
        row, index = self.config.architecture, self.index
        if isinstance(block, Expert):
            yield [dense_tensor(index, projection) for projection in ffn_parts(row)], block, x_TD
            return
        chosen_TS = select(block.routing, x_TD, block.logits(x_TD, hidden_TD=hidden_TD)).experts
        for number, expert in enumerate(block.experts):
            assert isinstance(expert, Expert)
            names = [expert_tensor(row, index, number, projection) for projection in ffn_parts(row)]
            yield names, expert, x_TD[(chosen_TS == number).any(dim=1)]
        if block.shared is not None:
            names = [shared_tensor(row, index, projection) for projection in ffn_parts(row)]
            yield names, block.shared, block.shared_input(x_TD, hidden_TD)

    def _unrounded(self) -> list[str]:
        """Return the names of unrounded tensors that also read the norm before the feed-forward block."""
        moe = self.config.layers[self.index].moe
        if moe is None:
            return []
        router, *_ = router_tensors(self.config, self.index)  # for a gate network, the first layer
        gate = shared_gate_tensor(self.config.architecture, self.index) if moe.shared_width else None
        return [router, *noise_tensors(self.config, self.index), *([] if gate is None else [gate])]

    def _best(self, x_TD: Tensor, matrices: list[tuple[Tensor, Tensor]], name: str) -> tuple[float, Tensor]:
        """Return (α, s) with the least L."""
        s_AD = candidates(x_TD)
        scale_dtype = self.checkpoint.dtype(name)
        error_A = torch.zeros(len(s_AD), dtype=torch.float64, device=s_AD.device)
        for weight_OD, rows_TD in matrices:
            self._budget.relieve(self.checkpoint.release)
            error_A += errors(weight_OD, rows_TD, s_AD, self.scheme, scale_dtype)
        best = int(error_A.argmin())
        self.found.errors.append((float(error_A[0]), float(error_A[best])))
        return EXPONENTS[best], s_AD[best].cpu()

    def _fold(self, before: Iterable[str], readers: Iterable[str], s_D: Tensor, zero_centered: bool = False) -> None:
        """Record that rows of `before` are divided by s, and columns of `readers` multiplied by it."""
        self.found.folds.append(Fold(tuple(before), tuple(readers), s_D, zero_centered))


def candidates(x_TD: Tensor) -> Tensor:
    """Return s of each exponent, [A, D]: s_X^α, scaled so that the product of largest and smallest entry is 1."""
    size_D = x_TD.float().abs().mean(0)
    size_D = size_D.clamp_min(float(size_D.mean()) * 1e-4 or 1.0)
    s_AD = torch.stack([size_D**alpha for alpha in EXPONENTS])
    return s_AD / (s_AD.amax(1, keepdim=True) * s_AD.amin(1, keepdim=True)).sqrt()


def errors(weight_OD: Tensor, x_TD: Tensor, s_AD: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Tensor:
    """Return L(s)² of each s, [A]."""
    wide_OD, x_TD = weight_OD.float(), x_TD.float()
    found = []
    for s_D in s_AD:
        rounded_OD = quantise(wide_OD * s_D, *scheme, scale_dtype).dequantised(torch.float32) / s_D
        found.append(linear(x_TD, rounded_OD - wide_OD).square().sum(dtype=torch.float64))
    return torch.stack(found)
