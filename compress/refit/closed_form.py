"""The refit of a run: least squares for the down projections of all FFNs that lost hidden units, and then the correction.

The moments of hidden units (calibrate/unit_statistics.py) are read one FFN at a time, and solved layer by layer
(methods/least_squares.py). The new projections are written into the work directory, from which `apply` reads them
memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from calibrate.unit_statistics import unit_moments
from compress.methods.inputs import MethodRun
from compress.methods.least_squares import Narrowed, refit_layer
from compress.methods.unit_criterion import down_projection, unit_directory
from compress.plans.plan import Plan
from compress.refit.correction import corrected
from compress.refit.narrowed import NarrowedFfn, narrowed_ffns
from compress.refit.stored import mapped_tensors
from compress.report.figures import RefitFigures
from engine.checkpoint.checkpoint import Checkpoint
from engine.files.state_file import write_state
from engine.passes import heap, processes


@dataclass(frozen=True)
class Refitted:
    """The refitted projections of a plan's result."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name, memory-mapped, in the dtype of the weights."""
    figures: RefitFigures | None = None


def refitted(run: MethodRun, plan: Plan) -> Refitted:
    """Return the refit and the correction of a run; nothing where neither was requested."""
    narrowed = narrowed_ffns(plan, run.prepared.checkpoint.config)
    found = _fitted(run, narrowed) if run.options.refit.refit and narrowed else Refitted()
    checkpoint = run.prepared.checkpoint
    can_correct = checkpoint.has_own_decoder and not checkpoint.config.output_norms
    if not run.options.refit.corrects(bool(narrowed) and can_correct):
        return found
    correction = corrected(run, plan, found.tensors)
    drifts: RefitFigures = {"drift_before_per_layer": correction.drift_before, "drift_per_layer": correction.drift}
    return Refitted(found.tensors | correction.tensors, {**(found.figures or {}), **drifts})


def _fitted(run: MethodRun, narrowed: Mapping[int, list[NarrowedFfn]]) -> Refitted:
    """Return the refit of all FFNs that lost units."""
    directory = run.work.path / "refit"
    moments = unit_directory(run, moments=True)
    layers: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for layer in run.bar("refitting (layers)")(sorted(narrowed)):
        path = directory / f"layer-{layer}.safetensors"
        layers.append(run.work.once(f"refit-{layer}", partial(_refit, run, moments, layer, narrowed[layer], path)))
        tensors |= mapped_tensors(run.prepared.checkpoint, path)
        heap.give_back()
    figures: RefitFigures = {
        "ridge_per_layer": [own["ridge"] for own in layers],
        "error_without_per_layer": [own["error_without"] for own in layers],
        "error_per_layer": [own["error"] for own in layers],
    }
    return Refitted(tensors, figures)


def _refit(run: MethodRun, moments: Path, layer: int, networks: list[NarrowedFfn], path: Path) -> dict[str, float | None]:
    """Refit one layer and write its projections; return the ridge and the errors."""
    if not processes.is_first():
        return {}
    checkpoint = run.prepared.checkpoint
    found = refit_layer(
        lambda: _narrowed(checkpoint, moments, layer, networks), run.options.refit.ridge, checkpoint.model_dtype
    )
    names = (network.name for network in networks)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, dict(zip(names, found.downs, strict=True)), {}, "the refit")
    checkpoint.release()
    return {"ridge": found.ridge, "error_without": found.error_without, "error": found.error}


def _narrowed(checkpoint: Checkpoint, moments: Path, layer: int, networks: list[NarrowedFfn]) -> Iterator[Narrowed]:
    for _, _, source, units in networks:
        yield Narrowed(unit_moments(moments, layer, source), down_projection(checkpoint, layer, source), units)
