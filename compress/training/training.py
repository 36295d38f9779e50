"""The training loop: trains parameters on a loss, batch by batch, and resumes from a saved state.

AdamW updates float32 master weights, whatever the model's dtype. A step's sequences are split into groups that fit in
memory, whose gradients accumulate in float32. The learning rate has a short warm-up and then falls, by default as a cosine;
gradients are clipped by norm. Every `validate_every` steps a validation metric is measured, and the training returns the
best state.

Several processes (processes.py) train as one process does with a batch that is as many times larger: they share a step's
sequences and sum the gradients, and the first process writes the states.

A saved state is the state before a step whose loss was found to be finite, so a training can always continue from it. The
order of the data and all random numbers of a loss depend on seed and step alone, so a resumed training has bit-identical
results.

Shape suffixes: B sequences of a step, G of a group.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.options.training import SCHEDULE_NAMES, TrainingOptions
from compress.report.figures import TrainingFigures
from compress.training.moments import restore, with_moments
from engine.errors import CheckpointError, DataError, TrainingError
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.progress import note

BEST, FIRST = "best.", "first."
"""Prefixes of tensor names in a state file: the best state, and the state of the training that steps first."""
State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and all other values as JSON."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a loss."""

    step: int
    rows_B: Tensor
    """Indices of all sequences of the step, in all processes."""
    group_G: Tensor
    """Indices of the sequences of the group, for which the loss is computed."""
    generator: torch.Generator
    """Source of the random numbers of the loss; its seed depends on seed, step and group alone."""
    turn: int = 0
    """Number of the batch, which is equal for all steps on the same batch."""


Loss = Callable[[Batch], Mapping[str, Tensor]]
"""Returns a group's part of the named terms of the step's loss. The loss is the sum over terms and groups, so each term is
divided by the number of sequences or tokens in the whole step, `rows_B`.
"""


class Validated(NamedTuple):
    """Result of a validation that has further figures."""

    value: float
    """The metric by which the best state is chosen; lower is better."""
    further: Mapping[str, float]
    """Further figures by name, which are recorded."""


Validation = Callable[[], float | Validated]


class Trainer:
    """One training of some parameters."""

    unit = "tokens"
    """Unit of a sequence's length."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss: Loss,
        options: TrainingOptions,
        sequences: int,
        length: int,
        first: Trainer | None = None,
    ) -> None:
        """Create the trainer.

        parameters: by any names. sequences: the number of sequences to draw from; length: tokens of one.

        first: another training that takes each of its steps before this one's, on the same sequences; its states are stored
        in this one's. Raises DataError where several processes have no full step to share.
        """
        self.parameters, self.loss, self.options = dict(parameters), loss, options
        self.sequences, self.length, self.first = sequences, length, first
        self.step_size = options.batch_size * processes.count()
        if processes.count() > 1 and sequences < self.step_size:
            raise DataError(
                f"{sequences} sequences to train on are fewer than the {self.step_size} of a step of all processes; lower "
                "--batch-size, or give more text"
            )
        for parameter in self.parameters.values():
            if not processes.is_sharded(parameter):
                # Copies: a decoder's tensors may be views of the mapped checkpoint, which is never written to.
                parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
        self.masters = {
            name: processes.piece(parameter.detach()).float().clone() for name, parameter in self.parameters.items()
        }
        """Master weights in float32; for a sharded parameter, this process's shard."""
        self.optimiser: torch.optim.Optimizer = torch.optim.AdamW(
            self.masters.values(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.history: list[dict[str, float]] = []
        """For each step, its loss terms and their sum, `loss`."""
        self.validations: list[tuple[int, float]] = []
        """Pairs of (steps taken, validation metric); lower is better."""
        self.further: dict[str, list[tuple[int, float]]] = {}
        """Pairs of (steps taken, figure) for each further figure of the validations."""
        self.best: dict[str, Tensor] = {}
        self.tokens_per_second = 0.0
        self._saved: Path | None = None

    def run(
        self,
        *,
        state_path: Path | None = None,
        resume: bool = False,
        validate: Validation | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> dict[str, Tensor]:
        """Take all steps; return the trained tensors by name, float32, on the CPU: the best state with `validate`.

        `state_path`: where the state is saved during training; `resume` continues from it. Raises TrainingError where the
        loss is not finite; the saved state is then the last finite one.
        """
        steps, every = self.options.steps, self.options.validate_every
        first = self.load(state_path) if resume and state_path is not None and state_path.exists() else 0
        started, bar = time.monotonic(), progress(range(first, steps))
        for step in bar:
            if validate is not None and every and step % every == 0:
                self._validate(validate, step)
            saves = state_path is not None and step > first and step % self.options.save_every == 0
            state = self.state(step) if saves else None
            if self.first is not None:
                self.first.history.append(self.first.gradients(step))
                self.first.update(step)
            terms = self.gradients(step)
            if state_path is not None and state is not None:
                self.save(state_path, state)
            self.update(step)
            self.history.append(terms)
            taken = (step + 1 - first) * self.step_size * self.length
            self.tokens_per_second = taken / max(time.monotonic() - started, 1e-9)
            note(bar, f"loss {terms['loss']:.4f}, {self.tokens_per_second:,.0f} {self.unit}/s")
        if validate is not None and every and first < steps:
            self._validate(validate, steps)
        self.take(self.best)
        if state_path is not None and first < steps:
            self.save(state_path, self.state(steps))
        return {name: self._whole(name, master.detach()).cpu() for name, master in self.masters.items()}

    def gradients(self, step: int) -> dict[str, float]:
        """Set the masters' gradients of a step, clipped; return its loss and loss terms.

        Raises TrainingError unless loss and gradients are finite.
        """
        turn = (step + self.options.earlier_steps) // self.options.steps_per_batch
        rows_B = batch_rows(self.sequences, self.step_size, turn, self.options.seed)
        own_B = rows_B.tensor_split(processes.count())[processes.rank()]
        groups = own_B.split(self.options.group_size)
        self.optimiser.zero_grad()
        total: dict[str, float] = {}
        for place, group_G in enumerate(groups, len(groups) * processes.rank()):
            terms = self._terms(Batch(step, rows_B, group_G, self._generator(step, place), turn))
            loss = torch.stack([term.float() for term in terms.values()]).sum()
            loss.backward()
            self._accumulate()
            for name, term in (*terms.items(), ("loss", loss)):
                total[name] = total.get(name, 0.0) + float(term.detach())
        self._add_up_processes()
        total = dict(zip(total, processes.added_up(total.values()), strict=True))
        if not math.isfinite(total["loss"]):
            raise self._broken(step, f"the loss is {total['loss']}")
        length = self._gradient_length()
        if not bool(length.isfinite()):
            raise self._broken(step, f"the gradient's length is {float(length)}")
        if float(length) > self.options.clip_norm:
            nn.utils.clip_grads_with_norm_(self.masters.values(), self.options.clip_norm, length)
        return total

    def _terms(self, batch: Batch) -> Mapping[str, Tensor]:
        try:
            return self.loss(batch)
        except CheckpointError as error:  # NaN in a model in training does not mean a damaged file
            raise self._broken(batch.step, str(error)) from error

    def update(self, step: int) -> None:
        """Update the parameters by the gradients."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.learning_rate * rate_at(step, self.options)
        self.optimiser.step()
        self.take(self.masters)

    def state(self, step: int) -> State:
        """Return the current state for `load`, on the CPU: masters, moments, the best state and all measurements."""
        tensors = with_moments(self.masters, self.optimiser, self._copy)
        tensors |= {f"{BEST}{name}": self._copy(name, own) for name, own in self.best.items()}
        header: dict[str, Any] = {"step": step, "history": list(self.history), "validations": list(self.validations)}
        header["further"] = {name: list(pairs) for name, pairs in self.further.items()}
        if self.first is not None:
            others, header["first"] = self.first.state(step)
            tensors |= {f"{FIRST}{name}": tensor for name, tensor in others.items()}
        return tensors, header

    def save(self, path: Path, state: State) -> None:
        """Write a state as one safetensors file. An existing file is replaced when the new one is complete."""
        if processes.is_first():
            write_state(path, state[0], {"training": json.dumps(state[1])}, "the state of the training")
        self._was_saved(path)

    def _was_saved(self, path: Path) -> None:
        self._saved = path
        if self.first is not None:
            self.first._was_saved(path)

    @torch.no_grad()
    def load(self, path: Path) -> int:
        """Load a state of `save`; return the step to continue with. Raises DataError for any other file."""
        with SafetensorsFile(path) as file:
            if "training" not in file.metadata or not set(self.masters) <= set(file.entries):
                raise DataError(f"{path}: is not the state of this training; leave out --resume")
            check_digest(file)
            header = json.loads(file.metadata["training"])
            self._restore(file, header, "")
        self._was_saved(path)
        return int(header["step"])

    def _restore(self, file: SafetensorsFile, header: Mapping[str, Any], prefix: str) -> None:
        restore(self.masters, self.optimiser, file, self._piece, prefix)
        self.best = {
            name: self._piece(name, file.tensor(f"{prefix}{BEST}{name}")).cpu().clone()
            for name in self.masters
            if f"{prefix}{BEST}{name}" in file.entries
        }
        self.take(self.masters)
        self.history = header["history"]
        self.validations = [(step, value) for step, value in header["validations"]]
        self.further = {name: [(step, value) for step, value in pairs] for name, pairs in header.get("further", {}).items()}
        if self.first is not None:
            self.first._restore(file, header["first"], f"{prefix}{FIRST}")

    def _accumulate(self) -> None:
        """Add the parameters' gradients to the masters'."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master, grad = self.masters[name], processes.piece(parameter.grad).float()
            if processes.is_sharded(parameter):
                grad = grad * processes.count()  # FSDP averages gradients over processes
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    @torch.no_grad()
    def _add_up_processes(self) -> None:
        """Sum the gradients of unsharded tensors over all processes; a gradient is zero where no token used the tensor."""
        for master in self.masters.values():
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        whole = [name for name, parameter in self.parameters.items() if not processes.is_sharded(parameter)]
        processes.add_up([grad for name in whole if (grad := self.masters[name].grad) is not None])

    @torch.no_grad()
    def _gradient_length(self) -> Tensor:
        """Return the norm of all gradients as one vector."""
        lengths = []
        for sharded in (False, True):
            names = [name for name, parameter in self.parameters.items() if processes.is_sharded(parameter) == sharded]
            gradients = [grad for name in names if (grad := self.masters[name].grad) is not None]
            length = nn.utils.get_total_norm(gradients)
            if sharded and names:
                length = length.square()
                processes.add_up([length])
                length = length.sqrt()
            lengths.append(length)
        return torch.hypot(*lengths) if float(lengths[1]) else lengths[0]

    def _whole(self, name: str, own: Tensor) -> Tensor:
        """Return a parameter's whole master or moment, of which `own` is this process's shard."""
        return processes.whole(own, self.parameters[name])

    def _copy(self, name: str, own: Tensor) -> Tensor:
        """Return the whole tensor on the CPU for a file; an empty one in a process that does not write."""
        full = self._whole(name, own)
        if not processes.is_first():
            return full.new_empty(0, device="cpu")
        return full.to("cpu", copy=True)

    def _piece(self, name: str, full: Tensor) -> Tensor:
        """Return this process's shard of a tensor."""
        return processes.cut(full, self.parameters[name])

    def take_whole(self, tensors: Mapping[str, Tensor]) -> None:
        """Call `take` with whole tensors, as `run` returns them."""
        self.take({name: self._piece(name, tensor) for name, tensor in tensors.items()})

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the masters, and the parameters from them; for sharded parameters, to this process's shards."""
        for name, tensor in tensors.items():
            if tensor is not self.masters[name]:
                self.masters[name].copy_(tensor)
            processes.piece(self.parameters[name]).copy_(self.masters[name])

    @torch.no_grad()
    def _validate(self, measure: Validation, step: int) -> None:
        if self.validations and self.validations[-1][0] == step:
            return  # taken before the interruption
        try:
            own = measure()
        except CheckpointError as error:
            raise self._broken(step, str(error)) from error
        value, further = own if isinstance(own, Validated) else (own, {})
        value, *others = (total / processes.count() for total in processes.added_up([value, *further.values()]))
        if not math.isfinite(value):
            raise self._broken(step, f"the measure of validation is {value}")
        if value < min((old for _, old in self.validations), default=math.inf):
            self.best = {name: master.detach().cpu().clone() for name, master in self.masters.items()}
        self.validations.append((step, value))
        for name, other in zip(further, others, strict=True):
            self.further.setdefault(name, []).append((step, other))

    def _generator(self, step: int, place: int) -> torch.Generator:
        mixed = (self.options.seed * 1_000_003 + step + self.options.earlier_steps) * 1_009 + place
        return torch.Generator().manual_seed(mixed % 2**63)

    def _broken(self, step: int, what: str) -> TrainingError:
        kept = f"the last good state is in {self._saved}" if self._saved else "no step before it was saved"
        return TrainingError(
            f"training stopped at step {step}: {what}; {kept}; try a lower learning rate, or --dtype float32"
        )


@dataclass
class Trained:
    """The result of a training."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Trained tensors by name, float32."""
    parts: dict[str, TrainingFigures] = field(default_factory=dict)
    """Figures of each part, such as "distill" and "finetune"."""
    histories: dict[str, tuple[list[dict[str, float]], list[tuple[int, float]]]] = field(default_factory=dict)
    """For each part, the loss terms of each step, and (step, perplexity) of each validation."""
    further: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    """For each part, (step, figure) of each validation for each further figure."""


def figures(trainer: Trainer) -> TrainingFigures:
    """Return the figures of a training, as JSON."""
    first, last = trainer.history[0], trainer.history[-1]
    values: dict[str, Any] = {"steps": len(trainer.history), "learning_rate": trainer.options.learning_rate}
    for name in first:
        values |= {f"{name}_first": first[name], f"{name}_last": last[name]}
    values["tokens_per_second"] = trainer.tokens_per_second or None
    values["validation_perplexity"] = [list(pair) for pair in trainer.validations]
    values |= {f"validation_{name}": [list(pair) for pair in pairs] for name, pairs in trainer.further.items()}
    values["best_step"] = min(trainer.validations, key=lambda pair: pair[1])[0] if trainer.validations else None
    return cast(TrainingFigures, values)


def rate_at(step: int, options: TrainingOptions) -> float:
    """Return the factor of the learning rate: a linear warm-up, and the fall of the schedule."""
    rise = min(1.0, (step + 1) / options.warm_up_steps)
    return rise * SCHEDULES[options.schedule](step, options.steps, options.warm_up_steps)


def _linear(step: int, steps: int, warm_up_steps: int) -> float:
    """Return a linear fall from 1 at the end of the warm-up to 0 after the last step (Cruz Salinas et al. §4.2)."""
    return min(1.0, (steps - step) / max(1, steps - warm_up_steps + 1))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "cosine": lambda step, steps, warm_up_steps: 0.5 * (1.0 + math.cos(math.pi * step / steps)),
    "linear": _linear,
    "constant": lambda step, steps, warm_up_steps: 1.0,
}
"""Functions from (step, number of steps, steps of the warm-up) to a factor of the learning rate."""
assert tuple(SCHEDULES) == SCHEDULE_NAMES


def batch_rows(count: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Return the sequences of a step: each epoch has a new order, which depends only on seed and epoch."""
    per_epoch = max(1, count // batch_size)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 7919 * epoch))
    return order[place * batch_size : (place + 1) * batch_size]
