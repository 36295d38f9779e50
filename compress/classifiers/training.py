"""Training of a classifier: by default SGD with momentum and a step schedule of the learning rate (MoE-KD §5.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.options.training import TrainingOptions
from compress.training.training import Loss, State, Trainer
from engine.files.safetensors_file import SafetensorsFile

BUFFER = "buffer."


class ClassifierTrainer(Trainer):
    """The loop of training.py with this schedule, and with buffers that forward passes update (running norms)."""

    unit = "examples"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        loss: Loss,
        options: TrainingOptions,
        examples: int,
        momentum: float | None = 0.9,
        falls: Sequence[float] = (),
    ) -> None:
        """Create the trainer.

        buffers: updated in place by the loss's forward passes, and saved with the parameters.

        momentum: of SGD; None for AdamW.

        falls: numbers of steps after each of which the learning rate is divided by 10.
        """
        super().__init__(parameters, loss, options, examples, 1)
        self.falls = falls
        self.buffers = dict(buffers)
        if momentum is not None:
            self.optimiser = torch.optim.SGD(
                self.masters.values(), lr=options.learning_rate, momentum=momentum, weight_decay=options.weight_decay
            )

    def update(self, step: int) -> None:
        """Update the parameters against the gradients."""
        passed = sum(step >= fall for fall in self.falls)
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.learning_rate * 0.1**passed
        self.optimiser.step()
        self.take(self.masters)

    def state(self, step: int) -> State:
        """Return the state of the base class, with the buffers."""
        tensors, header = super().state(step)
        return tensors | {f"{BUFFER}{name}": own.to("cpu", copy=True) for name, own in self.buffers.items()}, header

    def _restore(self, file: SafetensorsFile, header: Mapping[str, Any], prefix: str) -> None:
        super()._restore(file, header, prefix)
        for name, own in self.buffers.items():
            own.copy_(file.tensor(f"{prefix}{BUFFER}{name}"))
