"""Routings as ONNX nodes against engine/decoder/routing.py: each token's experts and their weights."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from engine.decoder.routing import NO_EXPERT, AllExperts, Routing, SigmoidTopK, Skipping, TopK
from engine.decoder.routing import select as choose
from engine.errors import UnsupportedError
from engine.onnx.graph import FLOAT, Graph
from engine.onnx.routing import expert_weights, select

EXPERTS = 8
BIAS = torch.tensor([0.0, 0.9, -0.4, 0.1, 0.0, -0.8, 0.3, 0.2])
GROUPS = ((0, 1, 2), (3,), (), (4, 5, 6, 7))
GAMMA1 = torch.tensor([0.9, 0.5])
GAMMA2 = 0.4 + torch.rand(EXPERTS, EXPERTS, generator=torch.Generator().manual_seed(3))
ROUTINGS: dict[str, Routing] = {
    "top-k": TopK(3, normalise=False),
    "top-k renormalized and scaled": TopK(3, normalise=True, scale=2.5),
    "top-k of more than there are": TopK(12, normalise=False),
    "sigmoid": SigmoidTopK(3, False, BIAS),
    "sigmoid renormalized and scaled": SigmoidTopK(3, True, BIAS, scale=2.5),
    "sigmoid in groups": SigmoidTopK(3, True, BIAS, groups=GROUPS, groups_per_token=2),
    "sigmoid in more groups than there are": SigmoidTopK(2, True, BIAS, groups=GROUPS, groups_per_token=9),
    "sigmoid in groups of fewer than k": SigmoidTopK(5, False, BIAS, groups=GROUPS, groups_per_token=1),
    "skipping": Skipping(TopK(3, True), GAMMA1, GAMMA2, 1.0, normalise=True),
    "skipping, not renormalized": Skipping(TopK(3, False), GAMMA1, GAMMA2, 1.5, normalise=False),
    "skipping but for two": Skipping(TopK(3, True), GAMMA1, GAMMA2, 2.0, normalise=True, keep=2),
    "skipping but for all": Skipping(TopK(3, True), GAMMA1, GAMMA2, 9.0, normalise=True, keep=3),
    "skipping of sigmoid": Skipping(SigmoidTopK(3, True, BIAS), GAMMA1, GAMMA2, 1.0, normalise=True),
    "skipping of some tokens": Skipping(TopK(3, True), GAMMA1, GAMMA2, 1.0, True, importance_1=torch.tensor([13.0])),
}


def weights_by_nodes(routing: Routing, logits_TN: Tensor, directory: Path) -> Tensor:
    """Return the weight of every expert, [T, N], computed by onnxruntime. The logits are the router's input too."""
    experts = logits_TN.shape[1]
    graph = Graph(directory, io.BytesIO(), torch.float32)
    logits = graph.input("logits", FLOAT, ("tokens", experts))
    weights = expert_weights(graph, select(graph, routing, logits, experts, logits), logits)
    graph.node("Identity", weights, name="weights")
    graph.output("weights", FLOAT, ("tokens", experts))
    graph.save("routing", {})
    onnx.checker.check_model(directory / "model.onnx")
    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"logits": logits_TN.numpy()})[0])


def weights_by_engine(routing: Routing, logits_TN: Tensor) -> Tensor:
    experts_TS, weights_TS = choose(routing, logits_TN, logits_TN)
    empty_TS = experts_TS == NO_EXPERT
    return torch.zeros_like(logits_TN).scatter_add_(
        1, experts_TS.masked_fill(empty_TS, 0), weights_TS.masked_fill(empty_TS, 0.0)
    )


@pytest.mark.parametrize("name", ROUTINGS)
def test_nodes_give_each_expert_the_weight_that_the_routing_gives(name: str, tmp_path: Path) -> None:
    logits_TN = 2.0 * torch.randn(300, EXPERTS, generator=torch.Generator().manual_seed(0))
    expected_TN = weights_by_engine(ROUTINGS[name], logits_TN)
    found_TN = weights_by_nodes(ROUTINGS[name], logits_TN, tmp_path)
    assert torch.equal(found_TN > 0, expected_TN > 0)
    assert torch.allclose(found_TN, expected_TN, atol=1e-6)
    if name.startswith("skipping") and name != "skipping but for all":
        assert not torch.equal(expected_TN > 0, weights_by_engine(ROUTINGS[name].base, logits_TN) > 0), "some were skipped"


def test_a_worked_out_example(tmp_path: Path) -> None:
    """Logits ln 1, ln 2, ln 5 give probabilities 1/8, 2/8, 5/8. The second of two is skipped below 0.5 · 1 · 5/8."""
    logits_TN = torch.tensor([[1.0, 2.0, 5.0], [1.0, 4.0, 5.0]]).log()
    rule = Skipping(TopK(2, normalise=False), torch.tensor([0.5]), torch.ones(3, 3), 1.0, normalise=False)
    found_TN = weights_by_nodes(rule, logits_TN, tmp_path)
    assert torch.allclose(found_TN, torch.tensor([[0.0, 0.0, 0.625], [0.0, 0.4, 0.5]]))


def test_a_rule_without_nodes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="AllExperts has no ONNX form"):
        weights_by_nodes(AllExperts(), torch.zeros(1, 3), tmp_path)
