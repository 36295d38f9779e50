"""Recovery after pruning: the kept router rows and the norms are trained for a few hundred steps, all else stays frozen.

Pruning re-routes tokens: logits that were learnt among N experts now choose among fewer. What is trained here is under a
thousandth of the weights, so neither gradients nor optimiser state of the experts exist, and the artifact keeps its shape.

Loss: KL(p ‖ p') per next token, p the full model's prediction, p' the smaller one's. The full model's final hidden states
are computed once per sequence and cached; its logits are made again from them, a chunk at a time.

Shape suffixes: S sequences, B batch, L positions, D hidden, V vocabulary, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.apply import planned_decoder
from compress.diep import full_hidden_states
from compress.losses import prediction_divergence
from compress.moments import restore, with_moments
from compress.plan import Plan
from engine.architectures import router_tensor
from engine.checkpoint import Checkpoint
from engine.errors import DataError, OptionError
from engine.experts import MoeBlock
from engine.model import Decoder
from engine.safetensors_file import SafetensorsFile, write_tensors
from engine.streaming import TOKENS_PER_BATCH, Activations

SAVE_EVERY_STEPS = 25
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class RecoverOptions:
    """How long and how fast."""

    steps: int = 0
    """0 trains nothing."""
    learning_rate: float = 5e-3
    batch_size: int = 16
    """Sequences a step."""
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        if self.steps < 0 or self.batch_size < 1 or not 0.0 < self.learning_rate < math.inf:
            raise OptionError("recover-steps must be at least 0, batch-size at least 1 and the learning rate positive")


def recover(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    options: RecoverOptions,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    state_path: Path | None = None,
    resume: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, Tensor]:
    """Train what is left by `plan`; the trained tensors by name, float32, for `apply(…, replaced=…)`.

    With `state_path` the state is saved as training goes, and `resume` goes on from it to the same result.
    """
    teacher = Decoder(checkpoint.config, checkpoint.source(dtype, device))
    with full_hidden_states(teacher, tokens_SL) as full:
        del teacher
        checkpoint.release()
        decoder = planned_decoder(plan, checkpoint, dtype, device)
        decoder.checkpoint_activations = True
        training = Training(decoder, options)
        first = training.load(state_path) if resume and state_path is not None and state_path.exists() else 0
        for step in progress(range(first, options.steps)):
            training.step(tokens_SL, full, step)
            if state_path is not None and (step + 1) % SAVE_EVERY_STEPS == 0:
                training.save(state_path, step + 1)
    return {name: master.detach().cpu() for name, master in training.masters.items()}


def trained_parameters(decoder: Decoder) -> dict[str, nn.Parameter]:
    """Routers and norms, by their names on disk."""
    found = {"model.norm.weight": decoder.norm}
    for index, layer in enumerate(decoder.layers):
        found[f"model.layers.{index}.input_layernorm.weight"] = layer.attention_norm  # type: ignore[assignment]
        found[f"model.layers.{index}.post_attention_layernorm.weight"] = layer.feed_forward_norm  # type: ignore[assignment]
        if isinstance(layer.feed_forward, MoeBlock):
            found[router_tensor(decoder.config.architecture, index)] = layer.feed_forward.router_ND
    return found


class Training:
    """AdamW on float32 copies of the trained parameters, whatever dtype the model computes in."""

    def __init__(self, decoder: Decoder, options: RecoverOptions) -> None:
        self.decoder, self.options = decoder, options
        self.parameters = trained_parameters(decoder)
        # Own copies: the decoder's tensors may be views of the mapped checkpoint, which is never written to.
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
        self.masters = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        self.optimiser = torch.optim.AdamW(self.masters.values(), lr=options.learning_rate, weight_decay=0.0)

    def step(self, tokens_SL: Tensor, full: Activations, step: int) -> float:
        """One step on the sequences that are its turn; the mean divergence per token before it."""
        rows = batch_rows(len(tokens_SL), self.options.batch_size, step, self.options.seed)
        total, device = 0.0, self.decoder.embedding_VD.device
        for group in rows.split(max(1, TOKENS_PER_BATCH // tokens_SL.shape[1])):
            target = full.select(group.tolist()).to(device)
            hidden = self.decoder.hidden_states(tokens_SL[group].to(device))
            divergence = prediction_divergence(hidden.flatten(0, 1), target.flatten(0, 1), self.decoder.head_VD)
            divergence = divergence / (len(rows) * tokens_SL.shape[1])
            divergence.backward(inputs=list(self.parameters.values()))
            total += float(divergence.detach())
        self._update(step)
        return total

    def _update(self, step: int) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.learning_rate * rate_at(step, self.options.steps)
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.optimiser.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])

    def save(self, path: Path, step: int) -> None:
        """Masters and moments as one safetensors file, replacing the last one only when whole."""
        tensors = with_moments(self.masters, self.optimiser)
        write_tensors(path, tensors, {"recovery": json.dumps({"step": step})}, "the state of the recovery")

    @torch.no_grad()
    def load(self, path: Path) -> int:
        """The inverse of `save`; the step to go on with. Raises DataError for another file."""
        with SafetensorsFile(path) as file:
            if "recovery" not in file.metadata or not set(self.masters) <= set(file.entries):
                raise DataError(f"{path}: is not the state of this recovery; leave out --resume")
            restore(self.masters, self.optimiser, file)
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
            return int(json.loads(file.metadata["recovery"])["step"])


def rate_at(step: int, steps: int) -> float:
    """The learning rate's factor: a short rise, then a cosine to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def batch_rows(count: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Which sequences a step sees: epochs of a fresh order each, the same for the same seed and step."""
    per_epoch = max(1, count // batch_size)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 7919 * epoch))
    return order[place * batch_size : (place + 1) * batch_size]
