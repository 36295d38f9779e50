"""The experts of a layer for multi-token prediction are chosen by REAP's score on what that layer itself reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from predicting_models import FORMS, save_predicting
from safetensors.torch import load_file
from tokenizers_for_tests import VOCABULARY
from torch import Tensor

from calibrate.options import CalibrationOptions
from calibrate.prediction import prediction_statistics
from compress.methods.saliency import reap
from compress.options.prune import PruneOptions
from compress.plans.plan import Plan, kept_expert, plan_from_json, plan_to_json
from compress.plans.selection import Budget
from compress.prune import prepare_pruning, prune
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.prediction_layer import PredictionTensors
from engine.decoder.experts import MoeBlock
from engine.decoder.model import Decoder, positions_for
from engine.decoder.prediction import PredictionLayer
from engine.errors import PlanError

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next")


def naive_scores(checkpoint: Checkpoint, tokens_SL: Tensor) -> tuple[Tensor, Tensor]:
    """Return REAP's score of each expert, token by token and expert by expert, and how many tokens chose each."""
    config, tensors = checkpoint.config, PredictionTensors(checkpoint)
    decoder = Decoder(config, checkpoint.weights(torch.float32)).eval()
    layer = PredictionLayer(tensors.config, tensors.source(torch.float32, "cpu")).layer
    block = layer.feed_forward
    assert isinstance(block, MoeBlock)
    inputs: list[Tensor] = []
    block.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    stored = load_file(checkpoint.directory / "model.safetensors")
    _, around, names, _ = FORMS[config.architecture.model_type]
    embedding, state, projection = (stored[f"{around}{name}.weight"] for name in names[:3])

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        shift = 1.0 if config.zero_centered else 0.0
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) * (weight + shift)

    for tokens_L in tokens_SL:
        states = decoder.hidden_states(tokens_L[None])[0, :-1]
        following = decoder.embedding_VD[tokens_L[1:]].clone()
        following[0] = 0.0
        x = torch.cat([normed(following, embedding), normed(states, state)], -1) @ projection.T
        layer(x[None], positions_for(tensors.config, decoder.rotary, tokens_L[None, 1:], None, 0, torch.float32))
    total, count = torch.zeros(len(block.experts)), torch.zeros(len(block.experts))
    for x_TD in inputs:
        experts_TK, weights_TK = block.routing(block.logits(x_TD))
        outputs = list(block.outputs(x_TD))
        for token, (experts, weights) in enumerate(zip(experts_TK.tolist(), weights_TK.tolist(), strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                total[expert] += weight * outputs[expert][token].norm()
                count[expert] += 1
    return total / count.clamp_min(1), count


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_scores_are_those_of_the_layer_s_own_inputs(family: str, tmp_path: Path) -> None:
    checkpoint = save_predicting(family, tmp_path / "model")
    tokens_SL = torch.randint(3, VOCABULARY, (5, 12), generator=torch.Generator().manual_seed(1))
    found = prediction_statistics(checkpoint, tokens_SL, dtype=torch.float32)
    expected, count = naive_scores(checkpoint, tokens_SL)
    assert found.tokens_routed.tolist() == count.tolist() and int(found.tokens) == 5 * 11
    torch.testing.assert_close(reap(found).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prune_keeps_the_best_of_them(family: str, tmp_path: Path) -> None:
    checkpoint = save_predicting(family, tmp_path / "model")
    budget = Budget(experts=8 if family == "deepseek_v3" else 4, scope="uniform", min_experts=0)
    text = CalibrationOptions(data="stdlib", samples=3, sequence_length=24, evaluation_samples=2)
    options = PruneOptions(
        model=str(tmp_path / "model"), output=tmp_path / "pruned", calibration=text, method="reap", budget=budget
    )
    figures = prune(options)
    assert "REAP's score on their own statistics" in figures["prediction_note"]
    pruned = Checkpoint(tmp_path / "pruned")
    kept = plan_from_json(json.loads((tmp_path / "pruned" / "compression.json").read_text())["plan"]).prediction
    assert len(kept) == pruned.config.experts_per_layer[-1] < checkpoint.config.experts_per_layer[-1]
    scores = naive_scores(checkpoint, prepare_pruning(options).tokens_SL)[0]
    groups = scores.view(4, 3) if family == "deepseek_v3" else scores[None]  # as many of each group stay
    best = groups.topk(len(kept) // len(groups), dim=1).indices.sort().values
    assert list(kept) == (best + torch.arange(len(groups))[:, None] * groups.shape[1]).flatten().tolist()
    PredictionTensors(pruned)


def test_a_plan_names_them(tmp_path: Path) -> None:
    checkpoint = save_predicting("glm4_moe", tmp_path / "model")
    layers = {layer: tuple(kept_expert(expert) for expert in range(4)) for layer in checkpoint.config.moe_layers}
    plan = Plan(layers, prediction=(1, 2, 4, 5))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    with pytest.raises(PlanError, match=r"plan, prediction: .*expected numbers of experts"):
        plan_from_json(plan_to_json(plan) | {"prediction": "1 two"})
