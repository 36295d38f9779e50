"""Optimizer moments and their parameters in one file, from which a search or a training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.files.safetensors_file import SafetensorsFile

STEP = "step"
MOMENTS = (STEP, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of Adam's state and, last, of the state of stochastic gradient descent."""
Change = Callable[[str, Tensor], Tensor]
"""A function applied to a parameter, by its name, and to its moments, when they are written to the file or read from it."""


def copied(name: str, tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own."""
    return tensor.clone()


def with_moments(
    parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, change: Change = copied
) -> dict[str, Tensor]:
    """Return each parameter by its name and, after the first step, its moments as NAME.exp_avg and so on."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[name] = change(name, parameter.detach())
        for key, moment in optimiser.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = moment.clone() if key == STEP else change(name, moment.detach())
    return tensors


@torch.no_grad()
def restore(
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    file: SafetensorsFile,
    change: Change = copied,
    prefix: str = "",
) -> None:
    """Load the output of `with_moments` into the parameters in place. `prefix`: precedes all names in the file."""
    for name, parameter in parameters.items():
        key_of = f"{prefix}{name}"
        parameter.copy_(change(name, file.tensor(key_of)))
        found = {key: file.tensor(f"{key_of}.{key}") for key in MOMENTS if f"{key_of}.{key}" in file.entries}
        moments = {
            # Adam keeps its step count on the CPU, whatever the device.
            key: moment.clone() if key == STEP else change(name, moment).to(parameter.device, copy=True)
            for key, moment in found.items()
        }
        if moments:
            optimiser.state[parameter] = moments
