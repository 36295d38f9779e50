"""The experts that become the dense FFN and their weights, by hand; and the reported errors against a naive computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import save_reference
from torch import Tensor

from calibrate.collect import collect
from calibrate.statistics import LayerStatistics, Statistics, effective_experts, usage_shares
from compress.dense.block_error import block_errors, shared_gates
from compress.dense.dense_plan import Chosen, check_ffns, choose, dense_plan, first_scales
from compress.methods.alignment import alignment, expert_weights
from compress.plans.apply import apply
from compress.plans.plan import SHARED_EXPERT
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import OptionError

TOKENS = torch.randint(3, 96, (5, 13), generator=torch.Generator().manual_seed(1))


def layer(**values: Any) -> LayerStatistics:
    """Return statistics of ten tokens and four experts with top-2. Values that are not given are not used."""
    known: dict[str, Tensor] = {
        "tokens": torch.tensor(10),
        "tokens_routed": torch.tensor([2, 9, 6, 3]),
        "probability_sum": torch.tensor([1.0, 5.0, 3.0, 1.0], dtype=torch.float64),
        "weight_sum": torch.tensor([1.5, 4.5, 2.5, 0.5], dtype=torch.float64),
        "weighted_norm_sum": torch.tensor([8.0, 9.0, 12.0, 9.0], dtype=torch.float64),
        "router_gram": torch.eye(4, dtype=torch.float64),
    }
    known |= {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}
    fields = LayerStatistics.__dataclass_fields__
    return LayerStatistics(**{name: known.get(name, torch.zeros(())) for name in fields})


def test_experts_are_chosen_by_hand() -> None:
    statistics = Statistics({3: layer()}, {})
    assert choose("usage", statistics, 2)[3].members == {1: [1], 2: [2]}
    # REAP: 8/2, 9/9, 12/6, 9/3
    assert choose("reap", statistics, 3)[3].members == {0: [0], 3: [3], 2: [2]}
    assert choose("reap", statistics, 3)[3].experts == [0, 2, 3]
    drawn = choose("random", statistics, 2, seed=5)[3]
    assert len(drawn.experts) == 2 and drawn == choose("random", statistics, 2, seed=5)[3]
    assert any(choose("random", statistics, 2, seed=seed)[3] != drawn for seed in range(8))
    assert choose("average", statistics, 1)[3].members == {1: [1, 0, 2, 3]}


def test_with_several_ffns_the_average_is_over_those_of_similar_logits() -> None:
    gram = [[4.0, 0.1, 3.9, 0.0], [0.1, 4.0, 0.0, 3.0], [3.9, 0.0, 4.0, 0.0], [0.0, 3.0, 0.0, 4.0]]
    chosen = choose("average", Statistics({0: layer(router_gram=gram)}, {}), 2)[0]
    assert chosen.members == {1: [1, 3], 2: [2, 0]} and chosen.experts == [0, 1, 2, 3]
    # Shares of probability 5 + 1 and 3 + 1 of 10; a token's weights add up to 9 / 10 on average.
    assert first_scales(layer(), chosen) == pytest.approx([0.9 * 0.6, 0.9 * 0.4])


def test_first_scales_are_shares_of_the_chosen_experts_probability() -> None:
    assert first_scales(layer(), Chosen({1: [1], 2: [2]})) == pytest.approx([0.9 * 5 / 8, 0.9 * 3 / 8])
    assert first_scales(layer(), Chosen({0: [0]})) == pytest.approx([0.9])
    assert first_scales(layer(probability_sum=[0.0] * 4), Chosen({0: [0], 3: [3]})) == pytest.approx([0.45, 0.45])


def test_concentration_of_usage_by_hand() -> None:
    assert usage_shares(layer()).tolist() == pytest.approx([0.1, 0.45, 0.3, 0.15])
    assert effective_experts(layer(tokens_routed=[5, 5, 5, 5])) == pytest.approx(4.0)
    assert effective_experts(layer(tokens_routed=[0, 7, 0, 0])) == pytest.approx(1.0)
    assert effective_experts(layer(tokens_routed=[0, 3, 3, 0])) == pytest.approx(2.0)
    assert usage_shares(layer(tokens_routed=[0, 0, 0, 0])).tolist() == [0.25] * 4


@pytest.mark.parametrize(("ffns", "message"), [(0, "at least one"), (4, "layer 2 has 3 experts")])
def test_more_ffns_than_a_layer_has_experts_are_refused(ffns: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_ffns(ffns, {0: 6, 2: 3})


def test_averaged_experts_are_aligned_to_the_most_used(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    chosen = choose("average", statistics, 1)
    plan = dense_plan(chosen, statistics, {}, checkpoint)
    for index, (planned,) in plan.layers.items():
        (part,) = planned.parts
        centre = int(statistics.layers[index].tokens_routed.argmax())
        assert [source.coefficient for source in part.sources] == pytest.approx([1 / 6] * 6)
        for source in part.sources:
            ours, theirs = (expert_weights(checkpoint, index, expert) for expert in (centre, int(source.expert)))
            assert source.permutation == (None if source.expert == centre else alignment(ours, theirs))
    assert plan.kind == "dense" and not planned.router


@torch.no_grad()
def naive_blocks(checkpoint: Checkpoint) -> dict[int, tuple[Any, Tensor, Tensor]]:
    """Return each MoE block with its input and output in the full model, in float64."""
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    seen: dict[int, tuple[Any, Tensor, Tensor]] = {}
    for index in checkpoint.config.moe_layers:
        decoder.layers[index].feed_forward.register_forward_hook(
            lambda block, inputs, output, index=index: seen.__setitem__(index, (block, inputs[0], output))
        )
    decoder(TOKENS)
    return seen


def ffn(expert: Any, x: Tensor) -> Tensor:
    return (F.silu(x @ expert.gate_FD.T) * (x @ expert.up_FD.T)) @ expert.down_DF.T


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_gates_and_errors_equal_the_naive_ones(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path / "full")
    checkpoint = Checkpoint(tmp_path / "full")
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    gates = shared_gates(checkpoint, TOKENS, dtype=torch.float32)
    chosen = choose("usage", statistics, 2)
    plan = dense_plan(chosen, statistics, gates, checkpoint)
    errors = block_errors(plan, checkpoint, TOKENS, dtype=torch.float32)
    assert bool(gates) == (family == "qwen2_moe")
    for index, (block, x, y) in naive_blocks(checkpoint).items():
        (planned,) = plan.layers[index]
        made = torch.zeros_like(y)
        for part in planned.parts:
            source = part.sources[0].expert
            made += part.scale * ffn(block.shared if source == SHARED_EXPERT else block.experts[source], x)
        expected = [float((made - y)[token].norm() / y[token].norm()) for token in range(len(y))]
        assert errors[index].whole == pytest.approx(sum(expected) / len(expected), rel=1e-4)
        if gates:
            gate = torch.sigmoid(x @ block.shared_gate_1D.T)
            assert gates[index] == pytest.approx(float(gate.mean()), rel=1e-5)
            off = (gate - gate.mean()) * ffn(block.shared, x)
            assert errors[index].shared_gate == pytest.approx(float((off.norm(dim=1) / y.norm(dim=1)).mean()), rel=1e-4)
        else:
            assert errors[index].shared_gate == 0.0


def test_what_is_measured_is_what_is_written(tmp_path: Path) -> None:
    """The reported block error of the separate FFNs equals the block error of the folded FFN that is read back."""
    save_reference("qwen2_moe", tmp_path / "full")
    checkpoint = Checkpoint(tmp_path / "full")
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    plan = dense_plan(
        choose("average", statistics, 2), statistics, shared_gates(checkpoint, TOKENS, dtype=torch.float32), checkpoint
    )
    errors = block_errors(plan, checkpoint, TOKENS, dtype=torch.float32)
    apply(plan, checkpoint, tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    decoder = Decoder(dense.config, dense.source(torch.float64))
    for index, (_, x, y) in naive_blocks(checkpoint).items():
        off = ffn(decoder.layers[index].feed_forward, x) - y
        assert errors[index].whole == pytest.approx(float((off.norm(dim=1) / y.norm(dim=1)).mean()), rel=1e-4)
