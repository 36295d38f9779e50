"""Exported models behind everything that serves: the scheduler, the server, its benchmarks, and a comparison."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from artifacts_for_tests import make_pruned, make_workplace
from click.testing import CliRunner
from packages_for_tests import needs_matplotlib
from server_for_tests import served, wait_for
from serving_for_tests import Served, run_to_end, scheduler_for, serve

import cli
from calibrate.options import CalibrationOptions
from compress.compare import compare
from compress.export.decoder import export
from compress.options.compare import CompareOptions
from compress.options.export import ExportOptions
from compress.run.perplexity import exported_losses, perplexity
from engine.batching.request import Request
from engine.bench.load_test import load_test
from engine.bench.options import LoadOptions
from engine.decoder.kv_cache import position_bytes
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.server.options import ServeOptions
from engine.server.reading.grammars import choice_grammar
from engine.server.serve import load
from engine.server.server import State

PROMPTS = ["def read(path):", "x", "größer als €5: ", "a longer text, which is read in several pieces and not in one"]
EXPORTS: dict[str, dict[str, Any]] = {"onnx": {}, "portable": {"experts": "portable"}, "skipping": {"skip_threshold": 1.0}}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
    "original_max_position_embeddings": 12,
    "factor": 4.0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `pruned` and every one of its EXPORTS."""
    path = tmp_path_factory.mktemp("exports")
    make_workplace(path, hidden_size=64, max_position_embeddings=4096)
    make_pruned(path)
    for name, options in EXPORTS.items():
        export(ExportOptions(model=str(path / "pruned"), output=path / name, threads=1, **options))
    return path


def requests(engine: Engine, count: int, **options: Any) -> list[Request]:
    return [Request(tuple(engine.encode(text)), count, **options) for text in PROMPTS]


# The Python interface


@pytest.mark.parametrize("name", EXPORTS)
def test_the_documented_calls_give_what_the_checkpoint_gives(place: Path, name: str) -> None:
    checkpoint = Engine.open(place / "pruned", dtype="float32", skip_threshold=float(name == "skipping"))
    found = Engine.open(place / name)
    assert found.generate(PROMPTS[0], max_new_tokens=30) == checkpoint.generate(PROMPTS[0], max_new_tokens=30)
    sampling = SamplingOptions(temperature=0.7, top_p=0.9, seed=3)
    several: dict[str, Any] = {"max_new_tokens": 30, "sampling": sampling, "stop": ["e", "zz"]}
    assert found.generate(PROMPTS, **several) == checkpoint.generate(PROMPTS, **several)
    assert list(found.stream(PROMPTS[3], max_new_tokens=30)) == list(checkpoint.stream(PROMPTS[3], max_new_tokens=30))
    for figure in ("prompt_tokens", "generated_tokens", "kv_cache_bytes", "experts_read", "experts_skipped_share"):
        assert getattr(found.report(), figure) == getattr(checkpoint.report(), figure), figure


# The scheduler


def test_grammars_hold_in_an_export(place: Path) -> None:
    engine = Engine.open(place / "onnx")
    sampling = SamplingOptions(1.5, seed=2)
    free = requests(engine, 20, sampling=sampling)
    held = requests(engine, 20, sampling=sampling, grammar=choice_grammar(["yes", "größer"]))
    served_ones = serve(engine, *free, *held)
    assert [each.tokens for each in served_ones[:4]] == [serve(engine, each)[0].tokens for each in free]
    assert {each.text for each in served_ones[4:]} <= {"yes", "größer"}


@pytest.mark.parametrize("name", EXPORTS)
def test_requests_get_what_they_get_alone_within_the_memory_there_is(place: Path, name: str) -> None:
    """There are blocks for 100 positions, and the four requests need 186 together, so the youngest ones are preempted."""
    engine = Engine.open(place / name)
    budget = 100 * position_bytes(engine.checkpoint.config, torch.float32)
    scheduler = scheduler_for(engine, kv_cache_bytes=budget, max_model_length=96)
    together = [Served(scheduler, engine, request, number) for number, request in enumerate(requests(engine, 25))]
    runner: Any = scheduler.runner
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        held = sum(cache.bytes for cache in runner.pool._caches.values())
        assert held <= (runner.pool.count - runner.pool.unused) * runner.cache_bytes // runner.pool.count <= budget
        assert set(runner.pool._caches) <= {state.table for state in scheduler.running}
    assert scheduler.preemptions > 0 and scheduler.used_share == 0 and not runner.pool._caches
    for text, got in zip(PROMPTS, together, strict=True):
        (expected,) = engine.generate(text, max_new_tokens=25)
        assert (got.tokens, got.text, got.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)


@pytest.mark.parametrize("name", EXPORTS)
def test_experts_are_counted_as_of_a_checkpoint(place: Path, name: str) -> None:
    """Both read a prompt that is not shared once, so their counts are the same."""
    checkpoint = Engine.open(place / "pruned", dtype="float32", skip_threshold=float(name == "skipping"))
    found = Engine.open(place / name)
    counts = []
    for engine in (checkpoint, found):
        scheduler = scheduler_for(engine)
        for number, request in enumerate(requests(engine, 9)):
            Served(scheduler, engine, request, number)
        run_to_end(scheduler)
        counts.append(scheduler.runner.counts)
    assert counts[0] == counts[1] and all(counts[1][0]) and all(counts[1][1]) == (name == "skipping")
    found.generate(PROMPTS[0], max_new_tokens=5)
    assert scheduler.runner.counts == counts[1] and found.report().experts_read > 0, "what others run is not counted"


def test_a_threshold_is_the_one_that_is_baked_in_or_refused(place: Path, tmp_path: Path) -> None:
    plain, skipping = (scheduler_for(Engine.open(place / name)) for name in ("onnx", "skipping"))
    for scheduler, own, others in ((plain, 0.0, (1.0, math.nan)), (skipping, 1.0, (0.0, 0.5))):
        for same in (None, own):
            scheduler.check(Request((5,), 4, skip_threshold=same))
        for other in others:
            with pytest.raises(
                OptionError, match=f"skip_threshold is {other}, .* baked into the graph .* skips by {own:g};"
            ):
                scheduler.check(Request((5,), 4, skip_threshold=other))
    unsigned = tmp_path / "without"
    unsigned.mkdir()
    for file in (place / "skipping").iterdir():
        if file.name != "compression.json":
            os.link(file, unsigned / file.name)
    with pytest.raises(OptionError, match=r"that its compression\.json does not name"):
        scheduler_for(Engine.open(unsigned)).check(Request((5,), 4, skip_threshold=1.0))


@pytest.mark.parametrize("experts", ["moe", "portable"])
def test_a_text_that_becomes_long_is_rotated_as_by_the_engine(
    tmp_path: Path, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 12 positions other frequencies apply: for a prompt as a whole, and for each token that follows a short one.

    A preempted sequence is read again in pieces, some on each side of the limit.
    """
    make_workplace(tmp_path, hidden_size=64, head_dim=16, rope_parameters=LONG_ROPE)
    export(ExportOptions(model=str(tmp_path / "model"), output=tmp_path / "onnx", experts=experts, threads=1))
    engines = Engine.open(tmp_path / "model", dtype="float32"), Engine.open(tmp_path / "onnx")
    tokens = torch.randint(3, 250, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [Request(tuple(tokens[-n:]), 14, top_logprobs=0, ignore_end_tokens=True) for n in (30, 13, 12, 11, 5)]
    found = []
    for engine in engines:
        budget = 72 * position_bytes(engine.checkpoint.config, torch.float32)
        scheduler = scheduler_for(engine, kv_cache_bytes=budget, max_model_length=48, prefill_chunk=8)
        found.append([Served(scheduler, engine, request, number) for number, request in enumerate(asked)])
        run_to_end(scheduler)
        assert scheduler.preemptions > 0
    for expected, got in zip(*found, strict=True):
        assert got.tokens == expected.tokens
        pairs = [(a.logprobs[0].logprob, b.logprobs[0].logprob) for a, b in zip(expected.updates, got.updates, strict=True)]
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs)
    monkeypatch.setattr("compress.run.perplexity.PIECE", 5)
    for length in (10, 13, 30):
        text = torch.tensor([tokens[:length]])
        exported = exported_losses(engines[1].checkpoint, engines[1].decoder, text).perplexity
        assert exported == pytest.approx(perplexity(engines[0].checkpoint, text, dtype=torch.float32), rel=1e-5)


# The server


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    """The cache is too small for four sequences of 100 tokens."""
    engine = Engine.open(place / "onnx")
    each = position_bytes(engine.checkpoint.config, torch.float32)
    options = ServeOptions(
        models=(str(place / "onnx"),), max_batch_size=4, max_model_length=256, kv_cache_bytes=288 * each, threads=1
    )
    service = load(options)
    with served(State(phase="ready", loaded=service)) as address:
        yield address
    service.engine_loop.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def figure(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_answers_are_those_of_generate(place: Path, client: openai.OpenAI) -> None:
    engine = Engine.open(place / "onnx")
    (expected,) = engine.generate(PROMPTS[0], max_new_tokens=20)
    options: dict[str, Any] = {"model": "onnx", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(prompt=PROMPTS[0], **options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert whole.usage is not None and whole.usage.completion_tokens == expected.generated_tokens
    streamed = list(client.completions.create(prompt=PROMPTS[0], stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text and len(streamed) > 2
    (expected,) = engine.generate("user: hi\nassistant:", max_new_tokens=20)
    turns: Any = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(messages=turns, **options)
    assert chat.choices[0].message.content == expected.text
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(messages=turns, stream=True, **options)
    ]
    assert "".join(pieces) == expected.text


def test_several_at_once_make_room_for_each_other_and_lose_nothing(place: Path, client: openai.OpenAI, url: str) -> None:
    engine = Engine.open(place / "onnx")
    prompts = [f"{number} {PROMPTS[number % 4]}" for number in range(8)]
    engine.end_tokens = frozenset()
    expected = [engine.generate(prompt, max_new_tokens=100)[0].text for prompt in prompts]
    before = figure(url, "compress_preemptions_total"), figure(url, "compress_generation_tokens_total")

    def ask(prompt: str) -> str:
        extra = {"ignore_eos": True}
        answer = client.completions.create(model="onnx", prompt=prompt, max_tokens=100, temperature=0, extra_body=extra)
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, prompts)) == expected
    assert figure(url, "compress_preemptions_total") > before[0]
    assert figure(url, "compress_generation_tokens_total") == before[1] + 800
    assert figure(url, "compress_kv_cache_usage_perc") == 0 and figure(url, "compress_cached_tokens_total") == 0
    assert figure(url, "compress_kv_cache_bytes") > 0
    assert figure(url, "compress_process_resident_memory_bytes") > figure(url, "compress_weights_bytes") > 0


def test_logprobs_and_stop_strings(place: Path, client: openai.OpenAI) -> None:
    engine, options = Engine.open(place / "onnx"), {"model": "onnx", "temperature": 0, "extra_body": {"ignore_eos": True}}
    ids = engine.encode(PROMPTS[3])
    answer = client.completions.create(prompt=ids, echo=True, logprobs=2, max_tokens=12, **options).choices[0]
    (generated,) = serve(engine, Request(tuple(ids), 12, ignore_end_tokens=True))
    text = torch.tensor([[*ids, *generated.tokens]])
    expected_LV = Engine.open(place / "pruned", dtype="float32").decoder(text)[0].log_softmax(-1)
    assert answer.logprobs is not None and answer.logprobs.token_logprobs is not None
    expected = expected_LV[:-1].gather(1, text[0, 1:, None])[:, 0].tolist()
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    free = client.completions.create(prompt=PROMPTS[0], max_tokens=40, **options).choices[0].text
    stop = next(free[place : place + 3] for place in range(4, 30) if "\ufffd" not in free[place : place + 3])
    ended = client.completions.create(prompt=PROMPTS[0], max_tokens=40, stop=stop, **options).choices[0]
    assert ended.text == free[: free.index(stop)] and ended.finish_reason == "stop"


def test_a_client_that_leaves_frees_its_memory(client: openai.OpenAI, url: str) -> None:
    name = 'compress_request_success_total{finished_reason="cancelled"}'
    before = figure(url, name)
    extra = {"ignore_eos": True}
    for _ in range(20):  # an answer may be whole before the client has left
        stream = client.completions.create(model="onnx", prompt="x", max_tokens=255, stream=True, extra_body=extra)
        next(iter(stream))
        stream.close()
        wait_for(lambda: not figure(url, "compress_num_requests_running"))
        if figure(url, name) > before:
            break
    assert figure(url, name) > before and figure(url, "compress_kv_cache_usage_perc") == 0


def test_what_an_export_cannot_honour_is_400(client: openai.OpenAI) -> None:
    client.completions.create(model="onnx", prompt="x", max_tokens=1, extra_body={"skip_threshold": 0})
    with pytest.raises(openai.BadRequestError, match="baked into the graph of an exported model"):
        client.completions.create(model="onnx", prompt="x", max_tokens=1, extra_body={"skip_threshold": 0.5})
    with pytest.raises(openai.BadRequestError, match="the maximum is 256"):
        client.completions.create(model="onnx", prompt="x", max_tokens=300)


def test_a_load_test_of_it(url: str) -> None:
    found = load_test(
        LoadOptions(url, num_prompts=6, max_concurrency=3, random_input_len=9, random_output_len=7, ignore_eos=True)
    )
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 42)


# Commands


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, [*arguments, "--json", "--threads", "1"])


def test_the_scheduler_is_measured(place: Path) -> None:
    result = run("bench", str(place / "skipping"), "--concurrency", "1,3", "-p", "8", "-n", "40", "-r", "1")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 3] and all(row["tokens_per_second"] > 0 for row in rows)
    assert {row["weights_bytes"] for row in rows} == {(place / "skipping" / "model.onnx.data").stat().st_size}


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["bench", "--concurrency", "1"]])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "bfloat16"], "was exported in torch.float32; leave --dtype"),
        (["--device", "cuda"], "it runs on the cpu"),
        (["--skip-threshold", "1"], "give the skip threshold to the export"),
    ],
)
def test_options_that_are_decided_by_the_export_are_refused(
    place: Path, command: list[str], options: list[str], said: str
) -> None:
    result = run(command[0], str(place / "onnx"), *command[1:], *options)
    assert result.exit_code == 1 and said in result.output and result.output.count("\n") == 1


def comparison(place: Path, *names: str, **changes: Any) -> CompareOptions:
    text = CalibrationOptions(str(place / "text.txt"), 2, 32, 3)
    asked = CompareOptions(tuple(str(place / name) for name in names), text=text, speed=False, threads=1, device="auto")
    return replace(asked, **changes)


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_a_comparison_measures_exports_beside_checkpoints(place: Path, tmp_path: Path) -> None:
    result = compare(comparison(place, "pruned", "onnx", "skipping", output=tmp_path / "report"))
    pruned, plain, skipping = result["rows"]
    assert [row["kind"] for row in result["rows"]] == ["checkpoint", "onnx", "onnx"] and plain["method"] == "export"
    assert plain["perplexity"] == pytest.approx(pruned["perplexity"], rel=1e-5) != skipping["perplexity"]
    assert [row["skip_threshold"] for row in result["rows"]] == [0.0, 0.0, 1.0] and plain["experts_skipped_share"] == 0
    assert plain["bytes"] == (place / "onnx" / "model.onnx.data").stat().st_size
    for key in ("parameters", "active_parameters", "experts_per_layer", "architecture", "perplexity_group"):
        assert plain[key] == pruned[key], key
    assert {path.name for path in (tmp_path / "report").iterdir()} >= {"index.html", "experts_per_layer.png"}
    again = compare(comparison(place, "pruned", "onnx", "skipping", skip_threshold=1.0))
    assert again["notes"] == ["Exports skip by the threshold that they were exported with: onnx (0), skipping (1)."]
    pruned, _, skipping = again["rows"]
    assert skipping["perplexity"] == pytest.approx(pruned["perplexity"], rel=1e-5)
    assert skipping["experts_skipped_share"] == pytest.approx(pruned["experts_skipped_share"], abs=0.01)


def test_a_comparison_measures_the_speed_of_exports(place: Path) -> None:
    asked = comparison(place, "skipping", speed=True, prompt_tokens=8, generated_tokens=4, repetitions=1)
    (row,) = compare(replace(asked, text=replace(asked.text, evaluation_samples=0)))["rows"]
    assert row["prefill_tokens_per_second_mean"] > 0 and row["decode_tokens_per_second_mean"] > 0
    assert row["decode_experts_skipped_share"] > 0 and row["peak_memory_bytes"] > 50e6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, "was exported in"),
        ({"skip_threshold": 1.0, "models": ("onnx", "skipping")}, "none of these models"),
    ],
)
def test_what_a_comparison_cannot_do_with_exports_is_refused(place: Path, changes: dict[str, Any], said: str) -> None:
    models = tuple(str(place / name) for name in changes.get("models", ("pruned", "onnx")))
    with pytest.raises(OptionError, match=said):
        compare(replace(comparison(place), **changes | {"models": models}))
