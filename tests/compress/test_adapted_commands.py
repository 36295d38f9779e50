"""`compress calibrate`, `evaluate` and `prune` of a family that only transformers runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from adapted_references import naively
from tiny_families import by_name, loaded, save_tiny
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from calibrate.skipping import skip_tables
from calibrate.statistics import load_statistics
from compress.compare import compare
from compress.evaluate import evaluate_model
from compress.methods.gate_fisher import fisher_scores
from compress.options.calibrate import CalibrateOptions
from compress.options.compare import CompareOptions
from compress.options.evaluate import EvaluateOptions
from compress.options.prune import DiepOptions, PruneOptions
from compress.options.refit import RefitOptions
from compress.options.training import RecoverOptions
from compress.plans.plan import plan_from_json
from compress.plans.selection import Budget, groups_of
from compress.prune import checked_budget, prepare_pruning, prune
from compress.report.diep_scores import load_scores
from compress.statistics_file import calibrate_to_file
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_gradients import AdaptedLayerwiseDecoder
from engine.bench.backends import BACKENDS, BenchCase, BenchSpec, run_case
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.errors import CompressError, OptionError, UnsupportedError
from engine.generation.generate import Engine
from engine.inspect import inspect

TEXT = CalibrationOptions(data="stdlib", samples=3, sequence_length=24, evaluation_samples=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapted")
    save_tiny(by_name("exaone_moe"), path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    return path


def _options(model: Path, output: Path, **changes: Any) -> PruneOptions:
    budget = Budget(experts=5, scope="uniform", min_experts=0)
    made = PruneOptions(model=str(model), output=output, calibration=TEXT, method="reap", budget=budget)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "unit-obs", "budget": Budget(sparsity=0.5, granularity="both")},
            "--granularity both needs our own decoder, .* give --granularity unit",
        ),
        (
            {"method": "unit-obs", "budget": Budget(sparsity=0.5, granularity="unit", include=("shared",))},
            "--include shared needs our own decoder, .* give --granularity unit",
        ),
        (
            {"budget": Budget(experts=1, scope="uniform", min_experts=1)},
            "min-experts is 1; the router of the family exaone_moe takes 2",
        ),
        ({"recover": RecoverOptions(steps=1)}, "a model of the family exaone_moe runs through transformers here"),
        ({"refit": RefitOptions(correct=True)}, "a model of the family exaone_moe runs through transformers here"),
    ],
)
def test_what_needs_our_own_decoder_is_refused(model: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressError, match=message):
        prune(_options(model, tmp_path / "result", **changes))
    assert not (tmp_path / "result").exists()


def test_the_places_of_experts_are_checked_before_any_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(checkpoint: Any) -> None:
        raise UnsupportedError("no expert can be removed")

    monkeypatch.setattr("compress.prune.expert_places", refuse)
    with pytest.raises(UnsupportedError, match="no expert can be removed"):
        prepare_pruning(_options(model, tmp_path / "result"))


@pytest.mark.slow
def test_families_without_removable_experts_are_refused_before_any_work(tmp_path: Path) -> None:
    """The directory has no tokenizer: the refusal comes before text is read."""
    save_tiny(by_name("deepseek_v4"), tmp_path / "full")
    with pytest.raises(UnsupportedError, match="is a table of expert numbers"):
        prepare_pruning(_options(tmp_path / "full", tmp_path / "result"))


def test_skipping_needs_tables(model: Path) -> None:
    with pytest.raises(OptionError, match="the checkpoint has no skip_tables"):
        evaluate_model(EvaluateOptions(model=str(model), calibration=TEXT, skip_threshold=1.0))


def test_the_memory_limit_counts_whole_layers(model: Path) -> None:
    with pytest.raises(OptionError, match=r"memory-limit is 0\.01GB, and this needs"):
        evaluate_model(EvaluateOptions(model=str(model), calibration=TEXT, memory_limit=10_000_000))


def test_both_backends_of_the_benchmark_compute_the_same(model: Path) -> None:
    """Also after other tokens, and with weights and caches of the same size."""
    specs = [BenchSpec(str(model), backend, threads=1, device="cpu", batch=2) for backend in ("torch", "transformers")]
    backends: list[Any] = [BACKENDS[spec.backend](spec) for spec in specs]
    tokens_BL = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    found = []
    for backend in backends:
        assert run_case(backend, BenchCase("pp", 6, depth=6), tokens_BL) > 0
        assert run_case(backend, BenchCase("tg", 2), tokens_BL) > 0
        backend.start(2, 12)
        found.append([backend.forward(piece_BL).tolist() for piece_BL in tokens_BL.split([10, 1, 1], dim=1)])
    assert found[0] == found[1]
    assert backends[0].kv_cache_bytes == backends[1].kv_cache_bytes > 0
    assert backends[0].weights_bytes == backends[1].weights_bytes
    assert backends[0].checkpoint.active_parameters < backends[0].checkpoint.parameters


@pytest.mark.slow
def test_compare_measures_them(model: Path, tmp_path: Path) -> None:
    """The model with calibrated tables beside itself without tables: one perplexity, and one that skipping changes."""
    shutil.copytree(model, tmp_path / "tables")
    checkpoint = AdaptedCheckpoint(model)
    tokens_SL = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    skip_tables(collect(checkpoint, tokens_SL, dtype=torch.float32)).save(tmp_path / "tables" / FILE_NAME)
    figures = compare(
        CompareOptions(
            models=(str(model), str(tmp_path / "tables")),
            text=TEXT,
            skip_threshold=1.0,
            speed=True,
            prompt_tokens=8,
            generated_tokens=4,
            repetitions=1,
            threads=1,
        )
    )
    plain, skipping = figures["rows"]
    assert plain["skip_threshold"] == 0.0
    assert skipping["decode_experts_skipped_share"] > 0.0
    assert skipping["perplexity_without_skipping"] == pytest.approx(plain["perplexity"])
    assert skipping["perplexity"] != pytest.approx(plain["perplexity"], rel=1e-6)
    assert plain["decode_tokens_per_second_mean"] > 0


def test_the_default_method_prunes_whole_experts(model: Path, tmp_path: Path) -> None:
    """Gate Fisher, with a memory limit: the kept experts have the highest scores of their layer."""
    figures = prune(_options(model, tmp_path / "result", method="fisher", memory_limit=2_000_000_000))
    assert figures["experts_per_layer"] == [5, 5, 5]
    prepared = prepare_pruning(_options(model, tmp_path / "other", method="fisher"))
    decoder = AdaptedLayerwiseDecoder(AdaptedCheckpoint(model), prepared.dtype)
    plan = json.loads((tmp_path / "result" / "compression.json").read_text())["plan"]
    for layer, scores_N in fisher_scores(decoder, prepared.tokens_SL).items():
        assert plan["layers"][str(layer)] == sorted(scores_N.topk(5).indices.tolist())


def test_hidden_units_are_removed_and_refitted(model: Path, tmp_path: Path) -> None:
    """By the default method, in float32: down projections are those of naive least squares, and transformers opens them."""
    budget = Budget(sparsity=0.5, scope="uniform", granularity="unit", unit_multiple=4, min_experts=0)
    options = _options(model, tmp_path / "result", method="unit-obs", budget=budget, refit=RefitOptions(ridge=0.01))
    figures = prune(options)
    assert figures["granularity"] == "unit"
    assert figures["experts_per_layer"] == [8, 8, 8]
    result = loaded(by_name("exaone_moe"), tmp_path / "result")
    assert (result.config.moe_intermediate_size, result.config.num_shared_experts) == (8, 2)
    plan = plan_from_json(json.loads((tmp_path / "result" / "compression.json").read_text())["plan"])
    own = evaluate_model(
        EvaluateOptions(model=str(tmp_path / "result"), calibration=replace(TEXT, samples=2), split="held-out")
    )
    assert own["value"] == pytest.approx(figures["perplexity_after"], rel=1e-4)
    whole, checkpoint = loaded(by_name("exaone_moe"), model), AdaptedCheckpoint(model)
    with torch.no_grad(), naively(whole, checkpoint) as seen:
        whole(input_ids=prepare_pruning(replace(options, output=tmp_path / "other")).tokens_SL, use_cache=False)
    for layer in checkpoint.found.experts:
        before, after = (each.get_submodule(layer.experts).down_proj.data for each in (whole, result))
        for expert, slots in seen[layer.index].items():
            kept = list(plan.layers[layer.index][expert].parts[0].units)
            expected_DK = before[expert][:, kept].double()
            if slots:
                h_RF, weight_R = (torch.stack(each).double() for each in zip(*slots, strict=True))
                expected_DK = _least_squares(weight_R[:, None] * h_RF, before[expert].double(), kept, 0.01)
            assert torch.allclose(after[expert].double(), expected_DK, rtol=1e-3, atol=1e-4 * float(expected_DK.abs().max()))


def _least_squares(a_RF: Tensor, down_DF: Tensor, kept: list[int], ridge: float) -> Tensor:
    """Return the D′ [D, K] that minimizes ‖A·Dᵀ − A_K·D′ᵀ‖² + ρ̄·‖D′ − D_K‖², by numpy."""
    absolute = ridge * float(a_RF.square().sum(0).mean())
    rows = torch.cat([a_RF[:, kept], absolute**0.5 * torch.eye(len(kept), dtype=torch.float64)])
    right = torch.cat([a_RF @ down_DF.T, absolute**0.5 * down_DF[:, kept].T])
    return torch.from_numpy(numpy.linalg.lstsq(rows.numpy(), right.numpy(), rcond=None)[0]).T


@pytest.mark.slow
def test_layers_keep_different_numbers_of_experts(model: Path, tmp_path: Path) -> None:
    """Ranked over all layers, merged too; the result is evaluated, generated from, compared and pruned again."""
    for merge in ("none", "cka"):
        budget = Budget(sparsity=0.4, min_experts=0)
        figures = prune(_options(model, tmp_path / merge, method="frequency", budget=budget, merge=merge))
        counts = figures["experts_per_layer"]
        assert sum(counts) == 14
        assert len(set(counts)) > 1
    result = tmp_path / "none"
    assert "trust_remote_code=True" in (result / "README.md").read_text()
    held_out = EvaluateOptions(model=str(result), calibration=replace(TEXT, samples=2), split="held-out")
    assert evaluate_model(held_out)["value"] > 0
    assert len(Engine.open(result).generate("def read(path):", max_new_tokens=4)[0].token_ids) == 4
    specs = [BenchSpec(str(result), backend, threads=1, device="cpu", batch=1) for backend in ("torch", "transformers")]
    tokens_BL = torch.randint(3, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for backend in [BACKENDS[spec.backend](spec) for spec in specs]:
        backend.start(1, 6)
        found.append(backend.forward(tokens_BL).tolist())
    assert found[0] == found[1]
    again = prune(_options(result, tmp_path / "again", budget=Budget(experts=3, scope="uniform", min_experts=0)))
    assert again["experts_per_layer"] == [3, 3, 3]
    assert loaded(by_name("exaone_moe"), tmp_path / "again").config.num_experts == 3


def test_naee_compares_subsets_by_the_familys_own_router(model: Path, tmp_path: Path) -> None:
    figures = prune(_options(model, tmp_path / "result", method="naee"))
    assert figures["experts_per_layer"] == [5, 5, 5]
    assert figures["naee"] == {"search": "exhaustive", "subsets": 56}


def test_naee_does_not_know_groups(tmp_path: Path) -> None:
    """The directory has no tokenizer: the refusal comes before text is read."""
    save_tiny(by_name("dots1"), tmp_path / "full")
    budget = Budget(experts=6, scope="layer", min_experts=0)
    with pytest.raises(OptionError, match="layers of the family dots1 need as many of each group; choose another method"):
        prepare_pruning(_options(tmp_path / "full", tmp_path / "result", method="naee", budget=budget))


def test_the_least_number_of_experts_is_a_multiple_of_the_groups(tmp_path: Path) -> None:
    save_tiny(by_name("dots1"), tmp_path)
    checkpoint = AdaptedCheckpoint(tmp_path)
    options = _options(tmp_path, tmp_path / "result", method="frequency", budget=Budget(sparsity=0.2, min_experts=5))
    budget = checked_budget(options, checkpoint)
    assert budget is not None and budget.min_experts == 6  # of two groups of four
    scores = {layer: torch.rand(count) for layer, count in checkpoint.config.experts_by_layer.items()}
    kept = budget.select(scores, groups_of(checkpoint.config), even=True)
    assert all(len(own) >= 6 and sum(expert < 4 for expert in own) * 2 == len(own) for own in kept.values())


def test_removed_experts_are_merged_into_those_that_stay(model: Path, tmp_path: Path) -> None:
    """With the experts that the method keeps, each the center of its group; transformers opens the result."""
    figures = prune(_options(model, tmp_path / "result", merge="cka"))
    assert figures["experts_per_layer"] == [5, 5, 5]
    plan = plan_from_json(json.loads((tmp_path / "result" / "compression.json").read_text())["plan"])
    sources = [[part.expert for part in expert.parts[0].sources] for expert in plan.layers[1]]
    assert sorted(number for own in sources for number in own) == list(range(8))
    result = loaded(by_name("exaone_moe"), tmp_path / "result")
    assert result(input_ids=torch.randint(3, VOCABULARY, (1, 8))).logits.isfinite().all()


@pytest.mark.slow
def test_layers_keep_different_widths(model: Path, tmp_path: Path) -> None:
    """By the default method, ranked over all layers; the result is evaluated, generated from, rounded and described."""
    budget = Budget(sparsity=0.45, granularity="unit", unit_multiple=2, min_experts=0)
    figures = prune(_options(model, tmp_path / "result", method="unit-obs", budget=budget))
    widths = [width for width, *_ in figures["widths_per_layer"]]
    assert figures["granularity"] == "unit" and figures["widths_per_layer"] == [[width] * 8 for width in widths]
    assert len(set(widths)) > 1 and all(width % 2 == 0 for width in widths)
    assert 8 * sum(widths) == pytest.approx(0.55 * 3 * 8 * 16, abs=2 * 8)
    assert "trust_remote_code=True" in (tmp_path / "result" / "README.md").read_text()
    held_out = EvaluateOptions(model=str(tmp_path / "result"), calibration=replace(TEXT, samples=2), split="held-out")
    assert evaluate_model(held_out)["value"] == pytest.approx(figures["perplexity_after"], rel=1e-4)
    assert len(Engine.open(tmp_path / "result").generate("def read(path):", max_new_tokens=4)[0].token_ids) == 4
    described = inspect(str(tmp_path / "result"), checksums=True, progress=lambda items, what: items)
    whole = inspect(str(model), checksums=False, progress=lambda items, what: items)
    assert (described["kind"], described["architecture"]) == ("artifact", "exaone_moe")
    assert (described["widths_per_layer"], described["experts_per_layer"]) == (widths, [8, 8, 8])
    assert (whole["kind"], whole["widths_per_layer"], whole["layers"]) == ("checkpoint", [16, 16, 16], 4)
    gone = 3 * 32 * 8 * (3 * 16 - sum(widths))
    assert whole["parameters"] - described["parameters"] == gone
    assert whole["bytes"] - described["bytes"] == gone * torch.float32.itemsize
    idle = 3 * 32 * (8 - whole["experts_per_token"])
    assert whole["parameters"] - whole["active_parameters"] == idle * 3 * 16
    assert described["parameters"] - described["active_parameters"] == idle * sum(widths)
    assert (whole["prediction_layers_not_read"], whole["parts_not_read"]) == (0, [])


def test_the_search_of_diep_ranks_experts(model: Path, tmp_path: Path) -> None:
    """Within a memory limit: experts with the highest α·β of all layers stay."""
    budget = Budget(sparsity=0.4, min_experts=0)
    diep = DiepOptions(epochs=1, batch_size=2)
    options = _options(model, tmp_path / "result", method="diep", budget=budget, diep=diep, memory_limit=2_000_000_000)
    figures = prune(options)
    assert sum(figures["experts_per_layer"]) == 14
    found = load_scores(tmp_path / "result")
    plan = json.loads((tmp_path / "result" / "compression.json").read_text())["plan"]["layers"]
    assert found is not None
    scores = {(layer, expert): a * found.beta[layer] for layer, own in found.alpha.items() for expert, a in enumerate(own)}
    kept = {(int(layer), expert) for layer, own in plan.items() for expert in own}
    left = min(score for (layer, _), score in ((place, scores[place]) for place in kept) if len(plan[str(layer)]) > 2)
    assert len(scores) == 24
    assert all(score <= left for place, score in scores.items() if place not in kept)


@pytest.mark.slow
def test_commands_work_through_transformers(model: Path, tmp_path: Path) -> None:
    """Pruned by given statistics; perplexities are those of transformers' own logits."""
    calibrate_to_file(CalibrateOptions(model=str(model), output=tmp_path / "statistics", calibration=TEXT))
    checkpoint = AdaptedCheckpoint(model)
    statistics = load_statistics(tmp_path / "statistics", checkpoint.config)
    figures = prune(_options(model, tmp_path / "result", statistics=tmp_path / "statistics"))
    assert figures["experts_per_layer"] == [5, 5, 5]
    result = loaded(by_name("exaone_moe"), tmp_path / "result")
    assert result.config.num_experts == 5
    for own in statistics.layers.values():
        assert int(own.tokens_routed.sum()) == 2 * int(own.tokens)
    own = evaluate_model(
        EvaluateOptions(model=str(tmp_path / "result"), calibration=replace(TEXT, samples=2), split="held-out")
    )
    assert own["value"] == pytest.approx(figures["perplexity_after"], rel=1e-4)
    assert own["experts_skipped_share"] == 0.0
    text = replace(TEXT, samples=2)
    skipping = EvaluateOptions(model=str(tmp_path / "result"), calibration=text, split="held-out", skip_threshold=1.0)
    assert 0.1 < evaluate_model(skipping)["experts_skipped_share"] < 0.4
    with torch.no_grad():
        tokens_SL = torch.randint(3, VOCABULARY, (1, 8))
        assert result(input_ids=tokens_SL).logits.isfinite().all()
