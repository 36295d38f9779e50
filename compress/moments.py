"""The moments of an Adam optimiser beside its parameters in one file, so that a search or a training can be gone on with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.safetensors_file import SafetensorsFile


def with_moments(parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Each parameter by its name and, once there was a step, its moments as NAME.exp_avg and so on."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach().clone()
        for key, moment in optimiser.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = moment.detach().clone()
    return tensors


@torch.no_grad()
def restore(parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, file: SafetensorsFile) -> None:
    """The inverse, into the parameters as they are."""
    for name, parameter in parameters.items():
        parameter.copy_(file.tensor(name))
        moments = {
            # Adam keeps its count of steps on the CPU, whatever the device.
            key: file.tensor(f"{name}.{key}").clone().to("cpu" if key == "step" else parameter.device)
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{name}.{key}" in file.entries
        }
        if moments:
            optimiser.state[parameter] = moments
