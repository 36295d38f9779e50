"""Continuous batching: a request's result does not depend on the other requests, and nothing is lost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, others_slow, save_reference
from packages_for_tests import needs_numba
from serving_for_tests import Served, assert_all_free, run_schedule, run_to_end, scheduler_for, serve
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from compress.export.decoder import export
from compress.options.export import ExportOptions
from engine.batching.request import Request
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.decoder.model import Decoder
from engine.decoder.routing import NO_EXPERT, Skipping, TopK
from engine.decoder.skip_tables import SkipTables
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.generation.sampling import NOT_FINITE

EVERY_FAMILY = (*FAMILIES, *FURTHER_FAMILIES)
WINDOW = {"sliding_window": 6}


def save_model(path: Path, family: str = "mixtral", **changes: Any) -> None:
    save_reference(family, path, vocab_size=VOCABULARY, **changes)
    add_tokenizer(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    SkipTables((torch.ones(1),) * 3, (torch.ones(6, 6),) * 3, (torch.tensor([26.0]),) * 3).save(path / FILE_NAME)
    return path


@pytest.fixture(scope="module")
def export_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export with heads of 16 dimensions, which onnxruntime's own attention needs."""
    path = tmp_path_factory.mktemp("export")
    save_model(path / "model", hidden_size=64)
    export(ExportOptions(model=str(path / "model"), output=path / "onnx", threads=1))
    return path / "onnx"


@pytest.fixture
def own_engine(directory: Path) -> Engine:
    return Engine.open(directory, device="cpu")


@pytest.fixture(params=["checkpoint", "export"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return an engine of a checkpoint or of its export. Requests get the same from both."""
    name = "directory" if request.param == "checkpoint" else "export_directory"
    return Engine.open(request.getfixturevalue(name), device="cpu")


def cache_of(engine: Engine, positions: int, sequences: int = 6) -> int:
    """Return the bytes of a cache for so many positions, and for the states of so many sequences, if they have any."""
    config = engine.checkpoint.config
    return positions * position_bytes(config, engine.dtype) + sequences * state_bytes(config, engine.dtype)


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def random_request(choose: random.Random) -> Request:
    """Return a request. Some requests share a prefix; some are sampled and some greedy."""
    shared = prompt(20, choose.randrange(2))[: choose.randrange(21)]
    own = prompt(choose.randrange(1, 25), choose.randrange(10**6))
    options = SamplingOptions(
        temperature=choose.choice([0.0, 0.0, 1.0]), seed=choose.randrange(100), presence_penalty=choose.choice([0.0, 0.5])
    )
    return Request(shared + own, choose.randrange(1, 20), options, ignore_end_tokens=choose.random() < 0.5)


# Alone and together


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        *(pytest.param(family, {}, marks=pytest.mark.slow) for family in FURTHER_FAMILIES),
        ("mixtral", WINDOW),
        ("deepseek_v3", {}),
        ("minimax", {}),
        ("qwen3_next", {}),
        ("lfm2_moe", {}),
    ],
)
def test_greedy_tokens_are_those_of_generate(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path, family, **changes)
    engine = Engine.open(tmp_path, device="cpu")
    prompts = ["def read(path):", "x", "größer als €5: ", "a longer text, which is read in several chunks and not in one"]
    requests = [Request(tuple(engine.encode(text)), 20) for text in prompts]
    for text, got in zip(prompts, serve(engine, *requests), strict=True):
        (expected,) = engine.generate(text, max_new_tokens=20)
        assert got.tokens == expected.token_ids
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("seed", others_slow(range(4), 0))
def test_random_schedules_give_each_request_what_it_gets_alone(engine: Engine, seed: int) -> None:
    check_random_schedule(engine, seed, shares=isinstance(engine.decoder, Decoder))


@pytest.mark.parametrize("family", ["minimax", "qwen3_next", pytest.param("lfm2_moe", marks=pytest.mark.slow)])
def test_sequences_with_a_state_of_their_own_share_nothing(family: str, tmp_path: Path) -> None:
    """Preempted sequences, which are read again, share nothing either."""
    save_model(tmp_path, family)
    engine = Engine.open(tmp_path, device="cpu")
    check_random_schedule(engine, 1, shares=False)
    with pytest.raises(OptionError, match=f"give it {cache_of(engine, 64):,} bytes or more"):
        scheduler_for(engine, kv_cache_bytes=cache_of(engine, 63), max_batch_size=6, max_model_length=64)


@needs_numba
def test_logits_are_the_same_bits_in_the_company_of_more_than_64(tmp_path: Path) -> None:
    """The kernels for more than 64 rows sum in another order."""
    save_model(tmp_path, hidden_size=1024, intermediate_size=2048, num_hidden_layers=1)
    engine = Engine.open(tmp_path, device="cpu", dtype="bfloat16")
    engine.end_tokens = frozenset()
    requests = [Request((5 + place, 7, 9), 24, top_logprobs=4) for place in range(70)]
    scheduler = scheduler_for(engine, max_batch_size=70, kv_cache_bytes=cache_of(engine, 4096))
    together = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    most = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        most = max(most, len(scheduler.running))
    assert most == 70
    for request, got in zip(requests[:4], together, strict=False):
        (alone,) = serve(engine, request)
        both = [[update.logprobs for update in each.updates] for each in (got, alone)]
        assert got.tokens == alone.tokens and both[0] == both[1] and len(both[0]) == 24


def check_random_schedule(engine: Engine, seed: int, shares: bool) -> None:
    choose = random.Random(seed)
    requests = [random_request(choose) for _ in range(30)]
    arrivals = sorted(choose.randrange(60) for _ in requests)
    cancelled = {number: choose.randrange(90) for number in choose.sample(range(30), 5)}
    scheduler = scheduler_for(engine, kv_cache_bytes=cache_of(engine, 72), max_batch_size=6, max_model_length=64)
    served = run_schedule(scheduler, engine, requests, arrivals, cancelled)
    assert scheduler.preemptions > 0 and (scheduler.cached_tokens > 0) == shares
    assert_all_free(scheduler)
    for request, got in zip(requests, served, strict=True):
        (alone,) = serve(engine, request, kv_cache_bytes=cache_of(engine, 4096))
        if got.finish_reason == "cancelled":
            assert alone.tokens[: len(got.tokens)] == got.tokens and alone.text.startswith(got.text)
        else:
            assert (got.tokens, got.text, got.finish_reason) == (alone.tokens, alone.text, alone.finish_reason)
            assert got.updates[-1].timings is not None
            assert got.updates[-1].timings.generated_tokens == len(got.tokens)


def test_the_same_seed_gives_the_same_text_beside_others(engine: Engine) -> None:
    request = Request(prompt(9), 15, SamplingOptions(temperature=1.0, top_k=50, seed=7), ignore_end_tokens=True)
    others = [replace(request, prompt=prompt(5 + n, n), sampling=replace(request.sampling, seed=n)) for n in range(5)]
    (alone,) = serve(engine, request)
    first, *rest, last = serve(engine, request, *others, request)
    assert first.tokens == last.tokens == alone.tokens
    assert all(other.tokens != alone.tokens for other in rest)


@needs_numba
def test_prompts_that_arrive_together_are_read_in_one_pass_with_the_bits_of_each_alone(directory: Path) -> None:
    """In bfloat16, where the kernels sum in one order. One prompt asks for its log-probabilities, another for skipping."""
    engine = Engine.open(directory, device="cpu", dtype="bfloat16")
    free = SamplingOptions(temperature=1.0, seed=3)
    requests = [Request(prompt(5 + 4 * seed, seed), 6, free, ignore_end_tokens=True) for seed in range(5)]
    requests += [replace(requests[1], prompt_logprobs=True), replace(requests[2], skip_threshold=1.0)]
    expected = [serve(engine, request)[0] for request in requests]
    shapes: list[tuple[int, ...]] = []
    assert isinstance(engine.decoder, Decoder)
    engine.decoder.watch = lambda x_BLD: shapes.append(tuple(x_BLD.shape[:2]))
    together = serve(engine, *requests, prefill_chunk=128)
    assert shapes[0] == (1, sum(len(request.prompt) for request in requests)) and set(shapes[1:]) == {(7, 1)}
    for own, alone in zip(together, expected, strict=True):
        assert own.tokens == alone.tokens
        assert own.updates[0].prompt_logprobs == alone.updates[0].prompt_logprobs
    shapes.clear()
    serve(engine, *requests, prefill_chunk=16)
    assert all(length <= 16 for _, length in shapes), "the pieces of one pass have at most a chunk"


def test_in_float32_each_prompt_is_read_alone(own_engine: Engine) -> None:
    assert isinstance(own_engine.decoder, Decoder) and own_engine.dtype == torch.float32
    shapes: list[tuple[int, ...]] = []
    own_engine.decoder.watch = lambda x_BLD: shapes.append(tuple(x_BLD.shape[:2]))
    serve(own_engine, Request(prompt(5), 1), Request(prompt(7, 1), 1))
    assert shapes == [(1, 5), (1, 7)]


def test_a_long_prompt_does_not_stall_those_that_run(engine: Engine) -> None:
    scheduler = scheduler_for(engine, prefill_chunk=8)
    short = Served(scheduler, engine, Request(prompt(3), 30, ignore_end_tokens=True))
    scheduler.step()
    long = Served(scheduler, engine, Request(prompt(60), 1), 2)
    for _ in range(8):
        before = len(short.tokens)
        assert not long.tokens
        scheduler.step()
        assert len(short.tokens) == before + 1
    assert long.finish_reason == "length"
    run_to_end(scheduler)


def test_the_queue_is_in_order_and_preempts_the_youngest(engine: Engine) -> None:
    scheduler = scheduler_for(engine, kv_cache_bytes=cache_of(engine, 32), max_model_length=32, max_batch_size=2)
    requests = [Request(prompt(10, seed), 20, ignore_end_tokens=True) for seed in range(3)]
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    order: list[int] = []
    while scheduler.running or scheduler.waiting:
        assert [state.number for state in scheduler.running] == sorted(state.number for state in scheduler.running)
        assert [state.number for state in scheduler.waiting] == sorted(state.number for state in scheduler.waiting)
        scheduler.step()
        order += [number for number, each in enumerate(served) if each.finish_reason and number not in order]
    assert order == [0, 1, 2] and scheduler.preemptions > 0
    assert scheduler.prompt_tokens == 30 and scheduler.generated_tokens == 60


def test_a_prompt_that_was_read_is_not_read_again(own_engine: Engine) -> None:
    scheduler = scheduler_for(own_engine)
    for number in range(2):
        served = Served(scheduler, own_engine, Request(prompt(18), 5), number)
        run_to_end(scheduler)
    timings = served.updates[-1].timings
    assert timings is not None and (timings.prompt_tokens, timings.cached_tokens) == (18, 16)
    assert timings.started is not None and timings.first_token is not None and timings.finished is not None
    assert timings.arrived <= timings.started <= timings.first_token <= timings.finished
    assert scheduler.cached_tokens == 16
    evaluated, _ = scheduler.runner.counts
    assert evaluated == ((18 + 4 + 2 + 4) * 2,) * 3, "two experts for each token that was read"


# Ends


def test_a_prompt_is_shared_within_a_namespace_only(own_engine: Engine) -> None:
    scheduler, cached = scheduler_for(own_engine), []
    for number, namespace in enumerate(("key 0", "key 1", "key 0", "")):
        served = Served(scheduler, own_engine, Request(prompt(18), 2, namespace=namespace), number)
        run_to_end(scheduler)
        timings = served.updates[-1].timings
        assert timings is not None
        cached.append(timings.cached_tokens)
    assert cached == [0, 0, 16, 0]


def test_a_prompt_that_another_namespace_reads_changes_nothing(own_engine: Engine) -> None:
    """Two requests of one namespace share their blocks, also while another one reads the same prompt."""
    request, cached = Request(prompt(18), 2, namespace="b"), []
    for others in ([], [replace(request, namespace="a")]):
        scheduler = scheduler_for(own_engine)
        served = [Served(scheduler, own_engine, each, n) for n, each in enumerate((*others, request, request))]
        run_to_end(scheduler)
        cached.append([each.state.timings.cached_tokens for each in served[len(others) :]])
    assert cached[0] == cached[1] == [0, 16]


def test_end_tokens_end_a_request_unless_it_ignores_them(engine: Engine) -> None:
    (plain,) = serve(engine, Request(prompt(4), 12, ignore_end_tokens=True))
    ending = plain.tokens[3]
    engine.end_tokens = frozenset({ending})
    stopped, going = serve(engine, Request(prompt(4), 12), Request(prompt(4), 12, ignore_end_tokens=True))
    assert stopped.tokens == plain.tokens[: plain.tokens.index(ending) + 1] and stopped.finish_reason == "stop"
    assert going.tokens == plain.tokens and going.finish_reason == "length"


def test_a_stop_string_ends_across_tokens_and_is_never_given_out(engine: Engine) -> None:
    (plain,) = serve(engine, Request(prompt(4), 30, ignore_end_tokens=True))
    stop = next(plain.text[i : i + 3] for i in range(4, 20) if "\ufffd" not in plain.text[i : i + 3])
    (stopped,) = serve(engine, Request(prompt(4), 30, stop=("never", stop), ignore_end_tokens=True))
    assert stopped.text == plain.text[: plain.text.index(stop)] and stopped.finish_reason == "stop"
    assert [update.stop_string for update in stopped.updates] == [""] * (len(stopped.updates) - 1) + [stop]
    assert {update.stop_string for update in plain.updates} == {""}
    given = ""
    for update in stopped.updates:
        given += update.text
        assert plain.text.startswith(given) and stop[0] not in given[len(stopped.text) :]


def test_penalties_are_of_the_tokens_that_were_generated(engine: Engine) -> None:
    """The expected text is greedy by hand: the model's logits, less 2 for every generated token, not those of the prompt."""
    request = Request(prompt(6), 12, SamplingOptions(presence_penalty=2.0), ignore_end_tokens=True)
    (served,) = serve(engine, request)
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(12):
            logits = engine.decoder(torch.tensor([[*request.prompt, *expected]]))[0, -1]
            logits[list(set(expected))] -= 2.0
            expected.append(int(logits.argmax()))
    assert list(served.tokens) == expected
    (plain,) = serve(engine, replace(request, sampling=SamplingOptions()))
    assert plain.tokens != served.tokens


def test_no_new_tokens_reads_the_prompt_only(engine: Engine) -> None:
    (served,) = serve(engine, Request(prompt(21), 0, prompt_logprobs=True))
    (update,) = served.updates
    assert (update.tokens, update.text, update.finish_reason) == ((), "", "length")
    assert update.prompt_logprobs is not None and len(update.prompt_logprobs) == 20


def test_one_bad_sequence_ends_alone(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of this sequence is NaN, so all that it leaves in the cache is NaN too."""
    requests = [Request(prompt(7, seed), 12, ignore_end_tokens=True) for seed in range(3)]
    alone = [serve(own_engine, request)[0] for request in requests]
    seen = {token for each in (*requests, *alone) for token in (each.prompt if isinstance(each, Request) else each.tokens)}
    bad = min(set(range(3, 250)) - seen)
    embedding = own_engine.decoder.embedding_VD.data.clone()
    embedding[bad] = torch.nan
    monkeypatch.setattr(own_engine.decoder, "embedding", torch.nn.Parameter(embedding, requires_grad=False))
    poisoned = Request((*prompt(9, 5), bad, *prompt(4, 6)), 12)
    size = cache_of(own_engine, 64)
    first, bad_one, second, third = serve(
        own_engine, requests[0], poisoned, *requests[1:], kv_cache_bytes=size, max_model_length=32
    )
    assert (bad_one.finish_reason, bad_one.updates[-1].error, bad_one.tokens) == ("error", NOT_FINITE, ())
    assert [each.tokens for each in (first, second, third)] == [each.tokens for each in alone]


def test_a_step_that_fails_ends_what_runs_and_no_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_for(engine, max_batch_size=1)
    running, waiting = (Served(scheduler, engine, Request(prompt(5, seed), 4), seed) for seed in range(2))
    scheduler.step()
    scheduler.fail("told so")
    assert (running.finish_reason, running.updates[-1].error, waiting.updates) == ("error", "told so", [])
    assert_all_free(scheduler)
    run_to_end(scheduler)
    assert waiting.finish_reason == "length"
    never_admitted = Served(scheduler, engine, Request(prompt(5), 4), 3)
    scheduler.fail("again")
    assert never_admitted.finish_reason == "error" and not scheduler.waiting


# Probabilities


def test_logprobs_are_of_the_models_own_distribution(engine: Engine) -> None:
    options = SamplingOptions(temperature=0.5, presence_penalty=1.0, seed=3)
    request = Request(prompt(21), 6, options, top_logprobs=3, prompt_logprobs=True, ignore_end_tokens=True)
    (served,) = serve(engine, request, prefill_chunk=8)
    text = (*request.prompt, *served.tokens)
    with torch.inference_mode():
        expected = engine.decoder(torch.tensor([text]))[0].float().log_softmax(-1)
    prompt_logprobs = served.updates[0].prompt_logprobs
    assert prompt_logprobs is not None and all(update.prompt_logprobs is None for update in served.updates[1:])
    found = [*prompt_logprobs, *(each for update in served.updates for each in update.logprobs)]
    assert [each.token for each in found] == list(text[1:])
    for place, each in enumerate(found):
        assert math.isclose(each.logprob, expected[place, each.token], abs_tol=1e-4)
        assert [token for token, _ in each.top] == expected[place].topk(3).indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in each.top]), expected[place].topk(3).values, atol=1e-4)


def test_logprobs_come_only_where_they_are_asked_for(engine: Engine) -> None:
    plain, with_none, with_zero = serve(
        engine, Request(prompt(5), 3), Request(prompt(5), 3, top_logprobs=None), Request(prompt(5), 3, top_logprobs=0)
    )
    assert plain.updates[0].logprobs == with_none.updates[0].logprobs == () and plain.updates[0].prompt_logprobs is None
    assert [each.top for each in with_zero.updates[0].logprobs] == [()]


def test_prompt_logprobs_survive_preemption(engine: Engine) -> None:
    request = Request(prompt(21), 8, prompt_logprobs=True, ignore_end_tokens=True)
    (alone,) = serve(engine, request)
    scheduler = scheduler_for(engine, kv_cache_bytes=cache_of(engine, 40), max_model_length=32, prefill_chunk=8)
    older = Served(scheduler, engine, Request(prompt(11, 4), 20, ignore_end_tokens=True))
    scheduler.step()
    younger = Served(scheduler, engine, request, 2)
    run_to_end(scheduler)
    assert scheduler.preemptions > 0 and older.finish_reason == "length"
    assert younger.tokens == alone.tokens
    for one, other in zip(younger.updates[0].prompt_logprobs or (), alone.updates[0].prompt_logprobs or (), strict=True):
        assert one.token == other.token and math.isclose(one.logprob, other.logprob, abs_tol=1e-4)


# Skipping


def test_a_threshold_for_each_token() -> None:
    """Weights are 0.6 and 0.4. The second is skipped if 0.4 < S · 0.6, which holds for S = 0.7 and not for S = 0.6."""
    logits = torch.tensor([[0.6, 0.4, 1e-9]]).log().expand(3, -1)
    rule = Skipping(TopK(2, True), torch.ones(1), torch.ones(3, 3), torch.tensor([0.0, 0.6, 0.7]), True)
    experts, weights = rule(logits)
    assert experts.tolist() == [[0, 1], [0, 1], [0, NO_EXPERT]]
    assert torch.allclose(weights, torch.tensor([[0.6, 0.4], [0.6, 0.4], [1.0, 0.0]]))


@pytest.mark.parametrize(("engines_own", "rule"), [(0.0, "diep"), (1.0, "diep"), (0.0, "mc-moe"), (1.0, "mc-moe")])
def test_each_request_skips_by_its_own_threshold(directory: Path, engines_own: float, rule: str) -> None:
    engine = Engine.open(directory, device="cpu", skip_threshold=engines_own, skip_rule=rule)
    thresholds = [None, 0.0, 0.7, 1.0]
    requests = [Request(prompt(12), 10, skip_threshold=threshold, ignore_end_tokens=True) for threshold in thresholds]
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    for number, request in enumerate(requests):  # one by one again: they do not share the cache of another threshold
        served.append(Served(scheduler, engine, request, number))
        run_to_end(scheduler)
    expected = []
    for threshold in (engines_own, 0.0, 0.7, 1.0):
        other = Engine.open(directory, device="cpu", skip_threshold=threshold, skip_rule=rule)
        expected.append(serve(other, Request(prompt(12), 10, ignore_end_tokens=True))[0].tokens)
    assert [each.tokens for each in served] == 2 * expected and len(set(expected)) > 2
    evaluated, skipped = scheduler.runner.counts
    asked = scheduler.generated_tokens - 8 + scheduler.prompt_tokens - scheduler.cached_tokens
    assert all(a + b == 2 * asked for a, b in zip(evaluated, skipped, strict=True)) and all(skipped)


# Refusals


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 4), "no tokens"),
        (Request((5, VOCABULARY), 4), f"vocabulary of {VOCABULARY}"),
        (Request((5, -1), 4), "vocabulary"),
        (Request((5,), -1), "-1"),
        (Request((5,) * 60, 10), "60 tokens and 10 new ones make 70, and 64"),
        (Request((5,), 4, stop=("",)), "stop string"),
        (Request((5,), 4, top_logprobs=-1), "-1 most probable"),
        (Request((5,), 4, skip_threshold=-0.5), "skip threshold is -0.5"),
        (Request((5,), 4, skip_threshold=math.nan), "skip threshold is nan"),
    ],
)
def test_what_can_never_run_is_refused(own_engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        scheduler_for(own_engine, max_model_length=64).check(request_)


def test_skipping_without_tables_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral")
    scheduler = scheduler_for(Engine.open(tmp_path, device="cpu"))
    scheduler.check(Request((5,), 4, skip_threshold=0.0))
    with pytest.raises(OptionError, match=FILE_NAME):
        scheduler.check(Request((5,), 4, skip_threshold=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "batch"),
        ({"prefill_chunk": 0}, "chunk"),
        ({"max_model_length": 129}, "128"),
        ({"max_model_length": 0}, "128"),
        ({"kv_cache_bytes": 4096, "max_model_length": 100}, "holds 8 positions and one sequence may have 100"),
        ({"kv_cache_bytes": 10}, "holds 0 positions"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(own_engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        scheduler_for(own_engine, **options)


def test_the_longest_sequence_is_what_model_and_cache_have(own_engine: Engine) -> None:
    assert scheduler_for(own_engine).max_model_length == 128
    assert scheduler_for(own_engine, kv_cache_bytes=cache_of(own_engine, 50)).max_model_length == 48
