"""The cost of miss thresholds, measured layer by layer, against the expert cache in decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_reference
from test_expert_cache import limited

from compress.cost.misses import measured_losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.miss_costs import MissCost, cost_of, miss_costs_in
from engine.decoder.routing import TopK
from engine.errors import CheckpointError
from engine.expert_cache import places
from engine.expert_cache.figures import totals
from engine.expert_cache.missing import LayerCache, LimitedRouting
from engine.generation.generate import Engine

COST = MissCost(0.5, 0.2, 3.0, 0.25, 9.0, 1.01)


@pytest.mark.parametrize("threshold", [0.1, 0.2])
def test_one_layer_costs_what_it_costs_in_decoding(
    threshold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one layer, the layer's part of the cache is the whole cache."""
    monkeypatch.setattr(places, "SMALL_BYTES", 64)
    save_reference("mixtral", tmp_path / "model", num_hidden_layers=1, hidden_size=128, intermediate_size=64)
    tokens_SL = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    checkpoint = Checkpoint(tmp_path / "model")
    (cost,), losses = measured_losses(checkpoint, tokens_SL, dtype=torch.float32, shares=[0.5], thresholds=[threshold])

    decoder, cache = limited(tmp_path / "model", reads_ahead=False, miss_threshold=threshold)
    cache.limit -= cache.capacity - int(3.5 * cache.expert_bytes / 6)  # three of six, with room for pages of their ends
    engine = Engine(checkpoint, decoder)
    summed_S = torch.zeros(2, dtype=torch.float64)
    for row, tokens_L in enumerate(tokens_SL):
        kept = engine.new_cache(1, len(tokens_L))
        for token, following in pairwise([*tokens_L, None]):
            logits_V = engine.step(token[None], None, kept)[0].double()
            if following is not None:
                summed_S[row] += logits_V.logsumexp(-1) - logits_V[following]
    cache.close()
    torch.testing.assert_close(losses[1].summed_S, summed_S, rtol=1e-5, atol=0)
    found = totals(cache.figures.values())
    assert found.replaced > 0 and cost.experts_read_per_token == found.read / tokens_SL.numel()
    assert cost.perplexity_ratio == pytest.approx(losses[1].perplexity / losses[0].perplexity)
    assert cost.perplexity_ratio != 1 and 0 < cost.reads_saved < 1


def test_readings_do_not_change_each_other() -> None:
    """Reading the text with several thresholds gives what each gives alone; without one, the base's choice."""
    logits_TN = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    base = TopK(3, True)
    settings = (0.0, 0.1, 0.2)
    together = LimitedRouting(base, [[LayerCache(3, threshold)] for threshold in settings], tokens=60)
    found = [together(each) for each in logits_TN.repeat(3, 1).split(25)]
    experts_RTS = torch.cat([own.experts for own in found]).view(3, 60, 3)
    weights_RTS = torch.cat([own.weights for own in found]).view(3, 60, 3)
    for place, threshold in enumerate(settings):
        alone = LimitedRouting(base, [[LayerCache(3, threshold)]], tokens=60)(logits_TN)
        assert torch.equal(experts_RTS[place], alone.experts) and torch.equal(weights_RTS[place], alone.weights)
    assert torch.equal(experts_RTS[0], base(logits_TN).experts)
    assert not torch.equal(experts_RTS[1], experts_RTS[0]) and not torch.equal(experts_RTS[2], experts_RTS[1])


def test_tokens_of_a_layer_by_hand() -> None:
    """Room for two of four experts. In the third token, 0 takes the place of 3, with a quarter of its weight of 0.2."""
    cache = LayerCache(2, threshold=0.16, policy="lru")
    shares_N = np.array([0.1, 0.3, 0.2, 0.4], np.float32)
    for chosen, weights in (([0, 1], [0.5, 0.5]), ([1, 0], [0.9, 0.1]), ([1, 3], [0.8, 0.2]), ([2, 1], [0.6, 0.4])):
        chosen_S, weights_S = np.array(chosen), np.array(weights, np.float32)
        cache.decode(chosen_S, weights_S, shares_N)
        if chosen == [1, 3]:
            assert chosen_S.tolist() == [1, 0] and weights_S.tolist() == pytest.approx([0.8 / 0.85, 0.05 / 0.85])
    assert (cache.uses, cache.reads, cache.changed) == (8, 3, 1)


def test_rows_are_read_and_the_nearest_one_is_found(tmp_path: Path) -> None:
    assert miss_costs_in(tmp_path, None) == miss_costs_in(tmp_path, {"figures": {}}) == []
    costs = [COST, replace(COST, memory_share=0.25), replace(COST, threshold=0.4, reads_saved=None)]
    assert miss_costs_in(tmp_path, {"figures": {"miss_costs": [vars(own) for own in costs]}}) == costs
    assert cost_of(costs, 0.22, 0.3) == costs[1] and cost_of(costs, 0.9, 0.3) == costs[2] and cost_of([], 0.2, 0.5) is None


@pytest.mark.parametrize(
    "rows",
    [None, [1], [{"threshold": 0.1}], [{**vars(COST), "perplexity": "9"}], [{**vars(COST), "perplexity": None}]],
)
def test_damaged_rows_are_refused(rows: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the file is damaged"):
        miss_costs_in(tmp_path, {"figures": {"miss_costs": rows}})
