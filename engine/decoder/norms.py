"""Norms over the last dimension, and those of an MoE block whose parts each have norms of their own.

Shape suffixes: T tokens, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.gpu.launching import rms_norm_on_gpu
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import as_bfloat16


class BlockNorms(nn.Module):
    """Norms of an MoE block whose router and shared expert read the hidden state through a norm each.

    The outputs of the shared expert and of the routed experts are normed before they are added. The norm before the routed
    experts is the layer's.
    """

    def __init__(self, weights: tuple[nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter], epsilon: float) -> None:
        """weights: of the norms before the router, before and after the shared expert, and after the routed experts."""
        super().__init__()
        self.router_D, self.shared_D, self.after_shared_D, self.after_routed_D = weights
        self.epsilon = epsilon

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weights in the order of their arguments."""
        return self.router_D, self.shared_D, self.after_shared_D, self.after_routed_D

    def router_input(self, hidden_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the normed hidden state over √D, [T, D], which the router's matrix is multiplied with."""
        root: float = hidden_TD.shape[-1] ** -0.5
        return rms_norm(hidden_TD, self.router_D, self.epsilon, choice) * root

    def shared_input(self, hidden_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the input of the shared expert."""
        return rms_norm(hidden_TD, self.shared_D, self.epsilon, choice)

    def shared_output(self, y_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return what the shared expert adds."""
        return rms_norm(y_TD, self.after_shared_D, self.epsilon, choice)

    def routed_output(self, y_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return what the routed experts add."""
        return rms_norm(y_TD, self.after_routed_D, self.epsilon, choice)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    choice: KernelChoice = TORCH,
    zero_centered: bool = False,
) -> Tensor:
    """Return a layer norm if there is a bias (Ba et al. 2016), otherwise `rms_norm`."""
    if bias is None:
        return rms_norm(x, weight, epsilon, choice, zero_centered)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, choice: KernelChoice = TORCH, zero_centered: bool = False) -> Tensor:
    """Return x / rms(x) · weight over the last dimension, the mean square in float32 or better (Zhang & Sennrich 2019).

    zero_centered: whether the weight is stored as its difference from 1. It is then multiplied by in float32 or better,
    because half precision would round the sum.
    """
    if (kernels := choice.for_any(x, weight)) is not None:
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        made = kernels.rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, rows, size, zero_centered=zero_centered)
        return as_bfloat16(made).view(x.shape)
    if zero_centered:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), weight.shape, 1.0 + weight.to(dtype), epsilon).to(x.dtype)
    if choice.may_compile and (normed := rms_norm_on_gpu(x, weight, epsilon)) is not None:
        return normed
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, epsilon)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
