"""Plan: how the experts of every MoE layer of the result are made from source experts.

An expert of the result is one or more parts, concatenated along the hidden units (MoE→dense). Each part is a weighted
sum of source experts, whose hidden units may be permuted first (merging), or a selection of the sum's hidden units. The
expert also has a weighted sum of source router rows. Pruning is the one-hot case. In JSON an unchanged expert is its
number, so a pruning plan reads `"0": [0, 3, 5]`; a permutation or a selection of units is one string of numbers.

A plan may also select hidden units of the FFN that every token of a layer uses: its shared expert or, in a dense layer, the
only FFN.

A plan is small and readable, and it is part of the artifact's provenance. `apply` (apply.py) executes any plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from engine.errors import PlanError
from engine.families.layer_config import MoeConfig
from engine.files.json_file import shown

SCHEMA_VERSION = 1
MAX_DIGITS = 9
"""Most digits of a layer's number; Python refuses to parse integers of thousands of digits."""
SHARED_EXPERT = "shared"
"""Name of the layer's shared expert as a source."""


@dataclass(frozen=True)
class Source:
    """One source expert in a weighted sum."""

    expert: int | str
    coefficient: float = 1.0
    permutation: tuple[int, ...] | None = None
    """Unit j of the result adds hidden unit `permutation[j]` of the source; None keeps the order."""


@dataclass(frozen=True)
class Part:
    """Σ coefficient · source, with the sources' width; `scale` multiplies the part's columns of the down projection."""

    sources: tuple[Source, ...]
    scale: float = 1.0
    units: tuple[int, ...] | None = None
    """Hidden units of the sum that stay, in ascending order, numbered after the permutations; None keeps all."""


@dataclass(frozen=True)
class PlannedExpert:
    """One expert of the result: its concatenated parts, and the router row that it has (None in a dense result)."""

    parts: tuple[Part, ...]
    router: tuple[Source, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether this is an unchanged source expert with its own router row, as in pruning."""
        return self.origin is not None and self.parts[0].units is None

    @property
    def origin(self) -> int | str | None:
        """The source expert whose hidden units, all or some, and router row this expert has; None for any other expert."""
        if len(self.parts) != 1 or len(self.parts[0].sources) != 1:
            return None
        source = Source(self.parts[0].sources[0].expert)
        is_pruned = replace(self.parts[0], units=None) == Part((source,)) and self.router == (source,)
        return source.expert if is_pruned else None

    @property
    def copied_row(self) -> int | None:
        """The expert whose router row this expert has unchanged; None for any other sum of rows."""
        if len(self.router) != 1 or self.router[0].coefficient != 1.0:
            return None
        return int(self.router[0].expert)


@dataclass(frozen=True)
class Plan:
    """The experts of every MoE layer by decoder layer index. `kind` is "moe", or "dense" for one expert per layer."""

    layers: Mapping[int, tuple[PlannedExpert, ...]]
    kind: str = "moe"
    common: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Hidden units that stay of the FFN that every token uses (DecoderConfig.common_widths), ascending, by decoder layer
    index; a layer that is not named keeps all."""
    prediction: tuple[int, ...] | None = ()
    """Experts that the first layer for multi-token prediction keeps, ascending; empty for those of the last MoE layer, and
    None for a result without such layers."""

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Number of experts of each MoE layer, in the order of the layers."""
        return tuple(len(self.layers[layer]) for layer in sorted(self.layers))


def granularity(plan: Plan) -> str:
    """Return whether a plan removes whole experts or hidden units ("unit")."""
    experts = [expert for own in plan.layers.values() for expert in own]
    loses_units = any(part.units is not None for expert in experts for part in expert.parts)
    return "unit" if plan.common or loses_units else "expert"


def kept_expert(expert: int) -> PlannedExpert:
    """Return a source expert unchanged, with its router row."""
    return PlannedExpert((Part((Source(expert),)),), (Source(expert),))


def narrowed_expert(expert: int, units: Sequence[int]) -> PlannedExpert:
    """Return a source expert that keeps these hidden units (ascending), with its router row."""
    return PlannedExpert((Part((Source(expert),), units=tuple(units)),), (Source(expert),))


def pruning_plan(kept: Mapping[int, Iterable[int]]) -> Plan:
    """Return a plan that keeps these experts of each layer (one-hot rows), in the order of their indices."""
    return Plan({layer: tuple(kept_expert(expert) for expert in sorted(experts)) for layer, experts in kept.items()})


def same_plan(experts: Mapping[int, int]) -> Plan:
    """Return a plan that keeps every expert. experts: number of experts by decoder layer index."""
    return pruning_plan({layer: range(count) for layer, count in experts.items()})


def concatenation_plan(selected: Mapping[int, Sequence[tuple[int | str, float]]]) -> Plan:
    """Return a MoE→dense plan: each layer becomes one FFN, the concatenation of (expert, scale a_i) pairs."""
    return Plan(
        {
            layer: (PlannedExpert(tuple(Part((Source(expert),), scale) for expert, scale in experts)),)
            for layer, experts in selected.items()
        },
        kind="dense",
    )


def source_width(source: Source, moe: MoeConfig) -> int:
    """Return the number of hidden units of a source expert of this layer."""
    return moe.shared_width if source.expert == SHARED_EXPERT else moe.widths[int(source.expert)]


def part_width(part: Part, moe: MoeConfig) -> int:
    """Return the number of hidden units of a part that is made of this layer's experts."""
    return source_width(part.sources[0], moe) if part.units is None else len(part.units)


def expert_width(expert: PlannedExpert, moe: MoeConfig) -> int:
    """Return the number of hidden units of an expert of the result that is made of this layer's experts."""
    return sum(part_width(part, moe) for part in expert.parts)


def check_plan(plan: Plan, layers: Mapping[int, MoeConfig], common: Mapping[int, int]) -> None:
    """Raise PlanError unless the plan fits a model with these MoE layers, by decoder layer index.

    common: the widths of the FFNs that every token uses (DecoderConfig.common_widths).
    """
    if plan.kind not in ("moe", "dense"):
        raise PlanError(f"plan kind is {plan.kind!r}; it must be 'moe' or 'dense'")
    if set(plan.layers) != set(layers):
        raise PlanError(
            f"the plan is for layers {sorted(plan.layers)} and the model's MoE layers are {sorted(layers)}; "
            "make the plan from this model"
        )
    for layer, planned in plan.layers.items():
        where = f"plan, layer {layer}"
        if not planned:
            raise PlanError(f"{where}: no expert is kept; every layer needs at least one")
        if plan.kind == "dense" and (len(planned) != 1 or planned[0].router):
            raise PlanError(f"{where}: a dense plan has exactly one expert a layer and no router row")
        for index, expert in enumerate(planned):
            _check_expert(expert, f"{where}, expert {index}", layers[layer], plan.kind)
    _check_common(plan, common)
    _check_prediction(plan, layers)
    widest = max((moe.expert_width for moe in layers.values()), default=0)
    for layer, planned in plan.layers.items() if plan.kind == "moe" else ():
        if (width := max(expert_width(expert, layers[layer]) for expert in planned)) > widest:
            raise PlanError(
                f"plan, layer {layer}: has an expert that is {width} hidden units wide; the model's are {widest} at most"
            )


def _check_prediction(plan: Plan, layers: Mapping[int, MoeConfig]) -> None:
    if not plan.prediction:
        return
    last, where = max(plan.layers), "plan, layer for multi-token prediction"
    if list(plan.prediction) != sorted(set(plan.prediction)) or not 0 <= plan.prediction[0] <= plan.prediction[-1] < (
        layers[last].experts
    ):
        raise PlanError(f"{where}: name experts from 0 to {layers[last].experts - 1} once each, in ascending order")
    if len(plan.prediction) != len(plan.layers[last]):
        raise PlanError(f"{where}: keeps {len(plan.prediction)} experts, and layer {last} {len(plan.layers[last])}")


def _check_common(plan: Plan, widths: Mapping[int, int]) -> None:
    if plan.common and plan.kind == "dense":
        raise PlanError("the plan selects hidden units beside the experts; only a plan of kind 'moe' does")
    for layer, units in plan.common.items():
        where = f"plan, common FFN of layer {layer}"
        if layer not in widths:
            raise PlanError(f"{where}: this model has neither a shared expert nor a dense FFN there")
        if not units:
            raise PlanError(f"{where}: keeps no hidden unit; every layer needs at least one")
        _check_units(units, widths[layer], where, "this FFN has")


def _check_expert(expert: PlannedExpert, where: str, moe: MoeConfig, kind: str) -> None:
    if not expert.parts or any(not part.sources for part in expert.parts):
        raise PlanError(f"{where}: has no source; name at least one expert of the model")
    if kind == "moe" and len(expert.parts) != 1:
        raise PlanError(f"{where}: routed experts are not wider than the model's, so only a dense plan concatenates")
    if kind == "moe" and not expert.router:
        raise PlanError(f"{where}: keeps no router row, so no token could reach it")
    for source in (*expert.router, *(source for part in expert.parts for source in part.sources)):
        _check_source(source, where, moe)
    for part in expert.parts:
        _check_part(part, where, moe)
    if any(source.permutation is not None or source.expert == SHARED_EXPERT for source in expert.router):
        raise PlanError(f"{where}: router rows come from routed experts and have nothing to permute")
    if not all(math.isfinite(part.scale) for part in expert.parts):
        raise PlanError(f"{where}: a scale is not finite")


def _check_source(source: Source, where: str, moe: MoeConfig) -> None:
    if source.expert == SHARED_EXPERT:
        if not moe.shared_width:
            raise PlanError(f"{where}: names the shared expert, and this model has none")
    elif not isinstance(source.expert, int) or not 0 <= source.expert < moe.experts:
        raise PlanError(f"{where}: names expert {source.expert}; the layer has experts 0 to {moe.experts - 1}")
    if not math.isfinite(source.coefficient):
        raise PlanError(f"{where}: the coefficient of expert {source.expert} is not finite")
    width = source_width(source, moe)
    if source.permutation is not None and sorted(source.permutation) != list(range(width)):
        raise PlanError(f"{where}: the permutation of expert {source.expert} is not one of {width} hidden units")


def _check_part(part: Part, where: str, moe: MoeConfig) -> None:
    widths = sorted({source_width(source, moe) for source in part.sources})
    if len(widths) > 1:
        raise PlanError(f"{where}: adds up experts that are {widths} hidden units wide")
    if part.units is None:
        return
    if not part.units:
        raise PlanError(f"{where}: keeps no hidden unit; leave the expert out of the plan, so that its router row goes too")
    _check_units(part.units, widths[0], where, "its sources have")


def _check_units(units: Sequence[int], width: int, where: str, sources: str) -> None:
    if (unit := next((unit for unit in units if not 0 <= unit < width), None)) is not None:
        raise PlanError(f"{where}: keeps hidden unit {unit}; {sources} units 0 to {width - 1}")
    for before, unit in pairwise(units):
        if unit == before:
            raise PlanError(f"{where}: keeps hidden unit {unit} twice; name each unit once")
        if unit < before:
            raise PlanError(f"{where}: keeps hidden unit {unit} after {before}; name units in ascending order")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON; `plan_from_json` is the inverse."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": plan.kind,
        "layers": {str(layer): [_expert_to_json(e) for e in plan.layers[layer]] for layer in sorted(plan.layers)},
        **(
            {"common": {str(layer): _in_one_line(plan.common[layer]) for layer in sorted(plan.common)}}
            if plan.common
            else {}
        ),
        **({"prediction": plan.prediction and _in_one_line(plan.prediction)} if plan.prediction != () else {}),
    }


def _expert_to_json(expert: PlannedExpert) -> Any:
    if expert.is_copy:
        return expert.parts[0].sources[0].expert
    parts = [
        {"sources": [_source_to_json(source) for source in part.sources]}
        | ({} if part.scale == 1.0 else {"scale": part.scale})
        | ({} if part.units is None else {"units": _in_one_line(part.units)})
        for part in expert.parts
    ]
    return {"parts": parts} | ({"router": [_source_to_json(row) for row in expert.router]} if expert.router else {})


def _source_to_json(source: Source) -> Any:
    values: dict[str, Any] = {"expert": source.expert}
    if source.coefficient != 1.0:
        values["coefficient"] = source.coefficient
    if source.permutation is not None:
        values["permutation"] = _in_one_line(source.permutation)
    return values


def _in_one_line(units: Sequence[int]) -> str:
    # One string: as a list, each of thousands of hidden units would take one line of the indented file.
    return " ".join(map(str, units))


def _units(values: Any) -> tuple[int, ...] | None:
    units = values.split() if isinstance(values, str) else values
    return None if units is None else tuple(int(unit) for unit in units)


def plan_from_json(values: Any) -> Plan:
    """Read a plan. Raises PlanError with the first place that violates the schema."""
    if not isinstance(values, dict) or not isinstance(values.get("layers"), dict):
        raise PlanError("not a plan: expected an object with schema_version, kind and layers")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"plan has schema_version {shown(version)}; this version reads {SCHEMA_VERSION}; update moe-compress"
        )
    layers, common = {}, {}
    for name, experts in values["layers"].items():
        if not _is_number(name) or not isinstance(experts, list):
            raise PlanError(f"plan, layer {shown(name)}: expected a layer number and a list of experts")
        layers[int(name)] = tuple(_expert_from_json(e, f"plan, layer {name}, expert {i}") for i, e in enumerate(experts))
    named = values.get("common", {})
    for name, units in named.items() if isinstance(named, dict) else [(named, None)]:
        try:
            if not _is_number(name) or (kept := _units(units)) is None:
                raise ValueError("expected a layer number and numbers of hidden units")
            common[int(name)] = kept
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan, common FFN of layer {shown(name)}: {error}") from error
    try:
        prediction = _units(values.get("prediction", ()))
    except (TypeError, ValueError) as error:
        raise PlanError(f"plan, prediction: {error}; expected numbers of experts") from error
    return Plan(layers, values.get("kind", "moe"), common, prediction)


def _is_number(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS


def _expert_from_json(values: Any, where: str) -> PlannedExpert:
    if isinstance(values, int) and not isinstance(values, bool):
        return kept_expert(values)
    try:
        parts = tuple(
            Part(
                tuple(_source_from_json(source) for source in part["sources"]),
                float(part.get("scale", 1.0)),
                _units(part.get("units")),
            )
            for part in values["parts"]
        )
        return PlannedExpert(parts, tuple(_source_from_json(row) for row in values.get("router", ())))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"{where}: expected an expert's number, or parts of sources and a router: {error}") from error


def _source_from_json(values: Mapping[str, Any]) -> Source:
    expert = values["expert"]
    if isinstance(expert, bool) or not isinstance(expert, int | str):
        raise ValueError(f"{expert!r} is no expert")
    return Source(expert, float(values.get("coefficient", 1.0)), _units(values.get("permutation")))
