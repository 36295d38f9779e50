"""Adaptive skipping in families that transformers runs, compared with the rule written out around transformers' modules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from tiny_families import TOKENS_SL, by_name, difference, logits_of, save_tiny
from tiny_generation import skipped_by_hand
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor, nn

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from compress.run.perplexity import routed_losses
from engine.adapted.adapted_block import _normalises
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_pass import routings_of
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.skip_tables import SkipTables, skipping_routings
from engine.generation.generate import Engine

CASES = others_slow(("exaone_moe", "exaone_moe without sums", "nemotron_h"), "exaone_moe", "exaone_moe without sums")
"""Families, one of them also with weights that do not sum to one number."""
NORMALISES = {"exaone_moe": True, "exaone_moe without sums": False, "nemotron_h": True}


@pytest.fixture(scope="module", params=CASES)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, SkipTables, bool]:
    """Return a model of transformers, its directory, its calibrated tables, and whether its weights have one sum."""
    path, family = tmp_path_factory.mktemp("skipping"), request.param.split()[0]
    changes: dict[str, Any] = {"norm_topk_prob": NORMALISES[request.param]} if family == "exaone_moe" else {}
    model = save_tiny(by_name(family), path, vocab_size=VOCABULARY, num_experts_per_tok=4, **changes)
    add_tokenizer(path)
    tables = skip_tables(collect(AdaptedCheckpoint(path), TOKENS_SL, dtype=torch.float32))
    tables.save(path / FILE_NAME)
    return model, path, tables, NORMALISES[request.param]


@pytest.mark.parametrize("threshold", [1.0, 0.9])
def test_skipping_equals_the_rule_by_hand(made: Any, threshold: float) -> None:
    """Whole sequences, generated tokens, and the perplexity layer by layer."""
    model, path, tables, normalises = made
    engine = Engine.open(path, skip_threshold=threshold)
    with skipped_by_hand(model, AdaptedCheckpoint(path), tables, threshold, normalises) as counts, torch.inference_mode():
        expected = logits_of(model)
        assert difference(engine.decoder(TOKENS_SL), expected) < 1e-4
    assert engine.skip_counter is not None
    assert engine.skip_counter.share == pytest.approx(counts[1] / counts[0])
    assert 0.0 < engine.skip_counter.share < 0.75
    assert difference(expected, logits_of(model)) > 1e-3
    checkpoint = AdaptedCheckpoint(path)
    own = routings_of(checkpoint, torch.float32, "cpu")
    routings = skipping_routings(checkpoint.config, tables, threshold, own=own)
    losses, share = routed_losses(checkpoint, TOKENS_SL, routings, dtype=torch.float32)
    predicted = expected[:, :-1].flatten(0, 1)
    assert losses.perplexity == pytest.approx(
        math.exp(torch.nn.functional.cross_entropy(predicted, TOKENS_SL[:, 1:].flatten()).item()), rel=1e-5
    )
    assert share == pytest.approx(counts[1] / counts[0])


def test_generated_tokens_skip_as_whole_texts_do(made: Any) -> None:
    model, path, tables, normalises = made
    engine = Engine.open(path, skip_threshold=1.0)
    engine.end_tokens = frozenset()
    prompts = ["def read(path):", "x", "class A:"]
    together = engine.generate(prompts, max_new_tokens=8)
    for prompt, got in zip(prompts, together, strict=True):
        assert engine.generate(prompt, max_new_tokens=8) == [got]
        tokens = [*engine.encode(prompt), *got.token_ids[:-1]]
        with skipped_by_hand(model, AdaptedCheckpoint(path), tables, 1.0, normalises) as counts, torch.no_grad():
            logits_LV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        assert logits_LV[-len(got.token_ids) :].argmax(-1).tolist() == list(got.token_ids)
    report = engine.report()  # of the last prompt; the last token was not read again
    assert report.experts_skipped_share == pytest.approx(counts[1] / counts[0])
    assert report.experts_read == counts[0] - counts[1]


def test_a_skipped_expert_is_not_read(made: Any) -> None:
    """With an endless threshold each token skips all experts that the tables let it skip; those may hold anything."""
    _, path, _, _ = made
    engine = Engine.open(path, skip_threshold=1e9)
    firsts: dict[int, set[int]] = {}
    for place, block in enumerate(engine.decoder.moe_blocks):
        firsts[place] = set()
        counting = block.observer

        def observe(x_TD: Tensor, logits_TN: Tensor, selection: Any, place: int = place, counting: Any = counting) -> None:
            firsts[place] |= set(selection.experts[selection.experts >= 0].tolist())
            counting(x_TD, logits_TN, selection)

        block.observer = observe
    with torch.inference_mode():
        before = engine.decoder(TOKENS_SL[:1, :2])
        for place, block in enumerate(engine.decoder.moe_blocks):
            block.module.down_proj = nn.Parameter(block.module.down_proj.clone(), requires_grad=False)
            block.module.down_proj[[e for e in range(block.layer.count) if e not in firsts[place]]] = torch.nan
        assert difference(engine.decoder(TOKENS_SL[:1, :2]), before) < 1e-4
    assert engine.skip_counter is not None and engine.skip_counter.share > 0
    assert all(len(firsts[place]) < block.layer.count for place, block in enumerate(engine.decoder.moe_blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_tells_whether_its_weights_have_one_sum(dtype: torch.dtype) -> None:
    class Router(nn.Module):
        def __init__(self, divides: bool, scale: float) -> None:
            super().__init__()
            self.divides, self.scale, self.matrix_ND = divides, scale, torch.randn(8, 16, dtype=dtype)

        def forward(self, x_TD: Tensor, *, ids: Tensor) -> Any:
            logits_TN = (x_TD @ self.matrix_ND.T).float()
            weights_TS, indices_TS = logits_TN.sigmoid().topk(3)
            if self.divides:
                weights_TS = weights_TS / weights_TS.sum(-1, keepdim=True)
            return logits_TN, (weights_TS * self.scale).to(dtype), indices_TS

    inputs, options = (torch.randn(1, 16, dtype=dtype),), {"ids": torch.zeros(1, dtype=torch.long)}
    assert _normalises(Router(True, 1.0), inputs, options)
    assert _normalises(Router(True, 2.5), inputs, options)
    assert not _normalises(Router(False, 1.0), inputs, options)
