"""The command `compress bench`: models side by side, the scheduler with several requests, or a running server."""

from __future__ import annotations

from compress.commands.command import Figures, Given, command
from compress.commands.kinds import kind_of
from compress.commands.output import progress_bar, table
from compress.report.columns import size
from engine.bench.options import BenchOptions, LoadOptions
from engine.errors import OptionError
from engine.generation.options import SKIP_OPTIONS


def bench(given: Given) -> Figures:
    """Measure tokens/s and memory of one or more models side by side, each in its own process; for classifiers examples/s.

    With --server, measure a running server instead, as its clients see it; with --concurrency, the scheduler.
    """
    values = given.values
    if values["server"] and (values["models"] or values["concurrency"]):
        raise OptionError("--server measures the model that runs there; leave out models and --concurrency")
    options = given.make(BenchOptions)
    if options.load is not None:
        return _bench_server(given, options.load)
    if options.concurrency:
        return _bench_concurrency(given, options)
    kinds = {kind_of(model) == "classifier" for model in options.models}
    if kinds == {True}:
        return _bench_classifiers(given, options)
    if len(kinds) > 1:
        raise OptionError("classifiers and language models have different tests; measure them one kind at a time")
    return _bench_models(given, options)


def _bench_models(given: Given, options: BenchOptions) -> Figures:
    from engine.bench.side_by_side import bench_models, format_rows

    rows = bench_models(
        options.models or ("demo",),
        options.backend,
        prompt_tokens=options.prompt_tokens,
        generated_tokens=options.generated_tokens,
        repetitions=options.repetitions,
        depth=options.depth,
        batch=options.batch,
        skip_threshold=options.skip_threshold,
        skip_min_experts=options.skip_min_experts,
        skip_rule=options.skip_rule,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        seed=options.seed,
        kv_cache_dtype=options.kv_cache_dtype,
        memory_limit=options.memory_limit,
        miss_threshold=options.miss_threshold,
        load_mode=options.load_mode,
    )
    given.say(format_rows(rows, options.output_format))
    return {"rows": rows}


def _bench_classifiers(given: Given, options: BenchOptions) -> Figures:
    from engine.bench.classifiers import HEAD, bench_classifiers, cells
    from engine.bench.side_by_side import format_rows

    given.refuse(("generated_tokens", "depth", *SKIP_OPTIONS), "not for classifiers")
    rows = bench_classifiers(
        options.models,
        options.backend,
        repetitions=options.repetitions,
        progress=lambda rounds: progress_bar(rounds, "rounds"),
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        batch=options.batch,
        seed=options.seed,
        **({"tokens": options.prompt_tokens} if "prompt_tokens" in given.named else {}),
    )
    given.say(format_rows(rows, options.output_format, HEAD, cells))
    return {"rows": rows}


def _bench_server(given: Given, options: LoadOptions) -> Figures:
    from engine.bench.load_test import load_test, result_block

    figures = load_test(options)
    given.say(result_block(figures))
    for error in figures["errors"]:
        given.say(f"failed: {error}")
    return figures


def _bench_concurrency(given: Given, options: BenchOptions) -> Figures:
    from engine.bench.concurrency import bench_concurrency
    from engine.generation.generate import Engine

    if len(options.models) > 1 or options.backend:
        raise OptionError(
            "--concurrency measures one model with this project's scheduler; leave out --backend and other models"
        )
    engine = Engine.open(
        next(iter(options.models), "demo"),
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        skip_threshold=options.skip_threshold,
        skip_min_experts=options.skip_min_experts,
        skip_rule=options.skip_rule,
        kv_cache_dtype=options.kv_cache_dtype,
        memory_limit=options.memory_limit,
        miss_threshold=options.miss_threshold,
        load_mode=options.load_mode,
        progress=progress_bar,
    )
    rows = bench_concurrency(
        engine,
        options.concurrency,
        prompt_tokens=options.prompt_tokens,
        generated_tokens=options.generated_tokens,
        repetitions=options.repetitions,
        seed=options.seed,
    )
    head = ["requests", "tokens/s", "of the first", "prefill tokens/s", "KV cache"]
    cells = [
        [
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_to_first']:.2f}×",
            f"{row['prefill_tokens_per_second']:.1f}",
            size(row["kv_cache_bytes"]),
        ]
        for row in rows
    ]
    given.say(table([head, *cells]))
    return {"rows": rows}


COMMAND = command("bench", bench, BenchOptions)
