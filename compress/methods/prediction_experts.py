"""The experts that a model's layer for multi-token prediction keeps: the best ones by REAP's score on their own statistics.

REAP's score needs no gradients and no other layer, so it serves whatever method chose the experts of the decoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from calibrate.prediction import prediction_statistics
from compress.methods.inputs import MethodRun
from compress.methods.saliency import reap
from compress.plans.plan import Plan
from compress.plans.prediction_layers import kept_prediction
from compress.plans.selection import Budget, moe_configs
from engine.checkpoint.prediction_layer import PredictionTensors
from engine.errors import CheckpointError


def with_prediction(run: MethodRun, plan: Plan) -> Plan:
    """Return the plan with the experts that the first layer for multi-token prediction keeps.

    The plan is returned unchanged where no whole experts leave, where layers keep different numbers of experts, where
    weights are rounded, where transformers runs the model, and where the result keeps no such layer with all its tensors.
    """
    checkpoint, counts = run.prepared.checkpoint, set(plan.experts_per_layer)
    is_even = len(counts) == 1 and counts != set(checkpoint.config.experts_per_layer)
    if not checkpoint.has_own_decoder or not is_even or run.options.quantiser or not kept_prediction(plan, checkpoint):
        return plan
    try:
        config = PredictionTensors(checkpoint).config
    except CheckpointError:
        return plan
    scores = {0: torch.tensor(run.work.once("prediction-scores", lambda: _scores(run), shared=True), dtype=torch.float64)}
    groups = {layer: moe.groups for layer, moe in moe_configs(config).items() if moe.groups}
    budget = Budget(experts=max(counts), scope="uniform", min_experts=1)
    return replace(plan, prediction=tuple(budget.select(scores, groups)[0]))


def _scores(run: MethodRun) -> Any:
    prepared, options = run.prepared, run.options
    statistics = prediction_statistics(
        prepared.checkpoint,
        prepared.tokens_SL,
        dtype=prepared.dtype,
        device=options.device,
        seed=options.calibration.seed,
        budget=run.memory_budget,
        progress=run.bar("calibrating the layer for multi-token prediction (layers)"),
    )
    return reap(statistics).tolist()
