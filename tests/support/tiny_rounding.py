"""Tiny models of families that transformers runs, with low-bit weights: a naive reference, a column of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_families import TOKENS_SL, Cell, difference, logits_of, save_tiny, through_layers
from torch import Tensor

from compress.options.quantize import QuantiserOptions
from compress.plans.apply import apply
from compress.plans.plan import same_plan
from compress.rounding.quantizer import Quantiser
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.interface_families import Family
from engine.errors import CompressError

COLUMNS = ("8 bits",)
GROUP = 16


def rounded(checkpoint: AdaptedCheckpoint, path: Path, bits: int = 8, **options: Any) -> AdaptedCheckpoint:
    """Write the model with low-bit weights into a new directory and open it."""
    path.mkdir()
    quantiser = Quantiser(QuantiserOptions(bits=bits, **({"group_size": GROUP} | options)))
    apply(same_plan(checkpoint.config.experts_by_layer), checkpoint, path, quantiser=quantiser)
    return AdaptedCheckpoint(path)


def naively_rounded(weight_OI: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Return a matrix whose groups of inputs are rounded one after the other, as docs/quantize.md says."""
    made, middle = [], 2 ** (bits - 1)
    for own_OG in weight_OI.split(group, dim=1):
        largest_O1 = own_OG.gather(1, own_OG.abs().argmax(1, keepdim=True))
        scales = [largest_O1 * (-share / middle) for share in ((1.0, 0.95, 0.9, 0.85, 0.8) if bits == 4 else (1.0,))]
        tried = [(own_OG / scale_O1).round().clamp(-middle, middle - 1) * scale_O1 for scale_O1 in scales]
        best_O = torch.stack([(values_OG - own_OG).square().sum(1) for values_OG in tried]).argmin(0)
        made.append(torch.stack([tried[best][row] for row, best in enumerate(best_O.tolist())]))
    return torch.cat(made, dim=1)


def round_naively(model: Any, result: AdaptedCheckpoint, bits: int = 8) -> None:
    """Round the weights of a model of transformers in place, those that are low-bit in a result.

    Rows are rounded by themselves, so that it does not matter how files hold gate and up.
    """
    modules = {layer.experts: model.get_submodule(layer.experts) for layer in result.found.experts}
    linears = {
        result.names.targets[name] for name in result.low_bit if not result.names.targets[name].startswith(tuple(modules))
    }
    for name in linears:
        weight_OI = model.get_parameter(name).data
        weight_OI.copy_(naively_rounded(weight_OI, bits))
    for module in modules.values():
        for stacked in ((module.gate_up_proj if module.has_gate else module.up_proj).data, module.down_proj.data):
            for own in stacked.transpose(1, 2) if module.is_transposed else stacked:
                own.copy_(naively_rounded(own, bits))


def measured_rounding(family: Family, path: Path) -> dict[str, Cell]:
    """Return the largest difference of a logit of a model with 8 bits from transformers' own, or why it is refused.

    The reference has weights that were rounded naively in memory.
    """
    model = save_tiny(family, path)
    try:
        result = rounded(AdaptedCheckpoint(path), path / "rounded")
        decoder = AdaptedDecoder(result, torch.float32)
    except CompressError as error:
        return {COLUMNS[0]: str(error).removeprefix(f"{path}: ")}
    whole = logits_of(model)
    round_naively(model, result)
    reference = logits_of(model)
    assert difference(reference, whole) > 0.0, "the model's logits do not depend on its low-bit weights"
    return {COLUMNS[0]: max(difference(decoder(TOKENS_SL), reference), difference(through_layers(result), reference))}
