"""Whether a text gets bit-identical results from a forward pass, whatever else the pass reads.

That is so where the kernels for many rows compute every product, because they sum in one order. The order in which torch
sums depends on the number of rows. Everything else in a layer without states is computed row by row.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import Decoder
from engine.kernels.kernel_choice import KernelChoice
from engine.kernels.linear import expert_form, kernel_form, serves_rows, takes_padded
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight


def rows_are_independent(decoder: Decoder, choice: KernelChoice) -> bool:
    """Return whether each text that a pass with this choice reads gets bit-identical results in any company."""
    kernels = choice.for_products(choice.max_few_rows + 1, decoder.norm)
    return kernels is not None and all(_is_served(kernels, module) for module in decoder.layers.modules())


def _is_served(kernels: Any, module: nn.Module) -> bool:
    """Return whether the kernels for many rows compute a module's own products."""
    if isinstance(module, Expert):
        matrices = module.projections[: 3 if module.has_gate else 2]
        return expert_form(kernels, matrices) is not None and serves_rows(kernels, matrices, many=True)
    if isinstance(module, LowBitWeight):
        return _takes_many(kernels, module)
    wide = {"router_ND"} if isinstance(module, MoeBlock) and module.router_in_float32 else set()
    own = [weight for name, weight in module.named_parameters(recurse=False) if weight.dim() == 2 and name not in wide]
    return all(_takes_many(kernels, weight) for weight in own)


def _takes_many(kernels: Any, weight: Weight) -> bool:
    form = kernel_form(kernels, [weight])
    return form is not None and (serves_rows(kernels, [weight], many=True) or takes_padded(kernels, weight))
