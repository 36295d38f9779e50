"""`compress prune` of a GGUF file to a GGUF file: what is checked before any work begins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compress.options.export import check_packages
from compress.options.prune import PruneOptions
from compress.plans.gguf_plan import planned_file
from compress.plans.plan import Plan, granularity, pruning_plan
from compress.plans.selection import Budget, groups_of
from compress.plans.unit_selection import select_units, units_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.tensor_names import common_tensor, expert_tensor, ffn_tensor

_EXPORT = "give a directory, and then `compress export --format gguf`"


def fitting_widths(options: PruneOptions, checkpoint: Checkpoint, include: tuple[str, ...]) -> Callable[[int], bool]:
    """Return whether so many hidden units fill the blocks of a result's down projections."""
    if checkpoint.gguf is None or not options.makes_file:
        return lambda units: True
    config, views = checkpoint.config, checkpoint.gguf.views(checkpoint.config)
    widths = config.ffn_widths(include)
    names = (ffn_tensor(config, layer, number, DOWN) for layer, own in widths.items() for number in range(len(own)))
    sizes = {views[name].stored.type.numbers for name in names}
    return lambda units: not any(units % size for size in sizes)


def check_file_result(options: PruneOptions, checkpoint: Checkpoint, budget: Budget | None, plan: Plan | None) -> None:
    """Raise a CompressError unless the result can be a GGUF file; nothing where it is to be a directory."""
    if not options.makes_file:
        return
    if checkpoint.gguf is None:
        raise OptionError(f"{options.output}: a GGUF file is made of a GGUF file, and {options.model} is none; {_EXPORT}")
    checkpoint.gguf.check_output(options.output)
    if options.merge != "none":
        raise OptionError(f"{options.output}: its experts are those of {options.model} as stored, not merged; {_EXPORT}")
    if options.recover.steps or options.distill.steps:
        raise OptionError(f"{options.output}: its weights are those of {options.model} as stored, not trained; {_EXPORT}")
    if options.quantiser is not None:
        raise OptionError(f"{options.output}: its types are those of {options.model}; leave out --bits, or {_EXPORT}")
    if budget is not None:
        _check_even(options, budget, checkpoint.config)
        plan = _trial(budget, checkpoint.config)
    assert plan is not None
    loses_units = granularity(plan) == "unit"
    rounded = loses_units or options.refit.corrects(loses_units)
    if rounded:
        check_packages(("gguf",), extra="gguf")
    planned_file(plan, checkpoint, _stand_ins(plan, checkpoint.config) if rounded else {})


def _check_even(options: PruneOptions, budget: Budget, config: DecoderConfig) -> None:
    is_even = budget.scope == "uniform"
    if budget.granularity == "expert" and budget.scope == "layer":
        is_even = len(set(budget.kept_per_layer(config.experts_by_layer).values())) == 1
    if not is_even:
        raise OptionError(
            f"{options.output}: a GGUF file has one number of experts and one width of experts for all layers; add --uniform"
        )


def _trial(budget: Budget, config: DecoderConfig) -> Plan:
    """Return a plan with the sizes of the result, which no method has decided."""
    if budget.granularity == "expert":
        scores = {layer: torch.zeros(count) for layer, count in config.experts_by_layer.items()}
        return pruning_plan(budget.select(scores, groups_of(config)))
    assert budget.unit_multiple is not None and budget.sparsity is not None
    units = {layer: [torch.zeros(width) for width in own] for layer, own in config.ffn_widths(budget.include).items()}
    found = select_units(units, budget.sparsity, budget.scope, budget.unit_multiple, routed=config.experts_by_layer)
    return units_plan(found, config.ffn_widths(), config.common_widths)


def _stand_ins(plan: Plan, config: DecoderConfig) -> dict[str, Tensor]:
    """Return down projections, which are to be rounded, without their numbers."""
    row, counts = config.architecture, {layer: len(experts) for layer, experts in plan.layers.items()}
    names = [expert_tensor(row, layer, expert, DOWN) for layer, count in counts.items() for expert in range(count)]
    return dict.fromkeys([*names, *(common_tensor(config, layer, DOWN) for layer in plan.common)], torch.empty(0))
