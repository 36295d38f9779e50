"""Drafts in the scheduler: every request gets the text that it gets without a draft, greedy and sampled."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from drafts_for_tests import LONGROPE, save_pair
from packages_for_tests import needs_llguidance, needs_numba
from serving_for_tests import Served, assert_all_free, run_schedule, run_to_end, scheduler_for, serve

from engine.batching.draft_switch import DraftSwitch
from engine.batching.drafting import cache_sizes
from engine.batching.request import Request
from engine.batching.request_state import RequestState
from engine.batching.scheduler import Scheduler
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.grammar_matcher import Matcher
from engine.generation.options import SamplingOptions
from engine.server.reading.grammars import choice_grammar, json_schema_grammar, regex_grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "minimum": 3, "maximum": 250}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Engine:
    return Engine.open(pair[0], device="cpu")


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    return Engine.open(pair[0], device="cpu", draft=pair[1], draft_tokens=3)


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def random_request(choose: random.Random) -> Request:
    """Return a request: greedy or sampled, some with penalties, a bias, log-probabilities, or a minimum length."""
    shared = prompt(20, choose.randrange(2))[: choose.randrange(21)]
    bias = tuple((token, choose.choice([-3.0, 3.0])) for token in choose.sample(range(3, 259), 5))
    options = SamplingOptions(
        temperature=choose.choice([0.0, 0.7, 1.0]),
        seed=choose.randrange(100),
        presence_penalty=choose.choice([0.0, 0.0, 0.5]),
        repetition_penalty=choose.choice([1.0, 1.0, 1.3]),
        min_p=choose.choice([0.0, 0.05]),
        top_k=choose.choice([0, 20]),
        logit_bias=choose.choice([(), bias]),
    )
    new = choose.randrange(1, 24)
    return Request(
        shared + prompt(choose.randrange(1, 25), choose.randrange(10**6)),
        new,
        options,
        top_logprobs=choose.choice([None, 2]),
        prompt_logprobs=choose.random() < 0.2,
        ignore_end_tokens=choose.random() < 0.5,
        min_new_tokens=choose.choice([0, new // 2]),
        stop=choose.choice([(), ("ab", "e")]),
        namespace=choose.choice(["", "key"]),
    )


def accepted_share(scheduler: Scheduler) -> float:
    assert scheduler.drafting is not None
    load = scheduler.drafting.load
    assert load.drafted_tokens > 0
    return load.accepted_tokens / load.drafted_tokens


def assert_same(got: Served, expected: Served) -> None:
    assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    found, wanted = ([each for update in served.updates for each in update.logprobs] for served in (got, expected))
    assert [each.token for each in found] == [each.token for each in wanted]
    assert torch.allclose(torch.tensor([e.logprob for e in found]), torch.tensor([e.logprob for e in wanted]), atol=1e-4)
    assert [token for each in found for token, _ in each.top] == [token for each in wanted for token, _ in each.top]


# The text


@pytest.mark.parametrize("seed", others_slow(range(6), 0))
def test_random_schedules_give_each_request_what_it_gets_without_a_draft(plain: Engine, engine: Engine, seed: int) -> None:
    """Requests arrive, are cancelled and are preempted while others are drafted; some prompts begin alike."""
    choose = random.Random(seed)
    requests = [random_request(choose) for _ in range(30)]
    arrivals = sorted(choose.randrange(40) for _ in requests)
    cancelled = {number: choose.randrange(50) for number in choose.sample(range(30), 5)}
    scheduler = scheduler_for(engine, kv_cache_bytes=80 * cache_sizes(engine)[0], max_batch_size=6, max_model_length=72)
    served = run_schedule(scheduler, engine, requests, arrivals, cancelled)
    assert_all_free(scheduler)
    assert scheduler.preemptions > 0 and scheduler.cached_tokens > 0
    assert 0.1 < accepted_share(scheduler) < 0.9, "accepted and rejected tokens are both needed for this to test anything"
    for request, got in zip(requests, served, strict=True):
        (expected,) = serve(plain, request)
        if got.finish_reason == "cancelled":
            assert expected.tokens[: len(got.tokens)] == got.tokens and expected.text.startswith(got.text)
        else:
            assert_same(got, expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"sliding_window": 6}),
        ("mixtral", LONGROPE),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        pytest.param("llama4_text", {}, marks=pytest.mark.slow),
        pytest.param("gemma4_text", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
    ],
)
def test_families_write_what_they_write_without_a_draft(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, family, **changes)
    hot = SamplingOptions(temperature=1.0, seed=3)
    requests = [Request(prompt(5 + 6 * n, n), 24, hot if n % 2 else SamplingOptions()) for n in range(4)]
    expected = serve(Engine.open(target, device="cpu"), *requests)
    engine = Engine.open(target, device="cpu", draft=draft, draft_tokens=4)
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    assert 0 < accepted_share(scheduler) < 1
    for got, wanted in zip(served, expected, strict=True):
        assert_same(got, wanted)


@needs_numba
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_half_precision_gives_the_same_bits(pair: tuple[Path, Path], kv_cache_dtype: str) -> None:
    """Log-probabilities are equal to the bit through the compiled kernels."""
    requests = [
        Request(prompt(6 + n, n), 20, SamplingOptions(temperature=n % 2, seed=n), top_logprobs=1, ignore_end_tokens=True)
        for n in range(5)
    ]
    options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    expected = serve(Engine.open(pair[0], **options), *requests)
    engine = Engine.open(pair[0], **options, draft=pair[1], draft_tokens=5)
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    assert 0 < accepted_share(scheduler) < 1
    for got, wanted in zip(served, expected, strict=True):
        assert got.tokens == wanted.tokens
        found, right = ([each for update in one.updates for each in update.logprobs] for one in (got, wanted))
        assert found == right


def test_both_models_draw_with_the_same_numbers(pair: tuple[Path, Path]) -> None:
    """A draft that is the model itself is nearly always right, at any temperature. Independent draws would seldom agree."""
    engine = Engine.open(pair[0], device="cpu", draft=pair[0], draft_tokens=3)
    scheduler = scheduler_for(engine)
    for seed in range(4):
        Served(
            scheduler, engine, Request(prompt(6, seed), 40, SamplingOptions(1.0, seed=seed), ignore_end_tokens=True), seed
        )
    run_to_end(scheduler)
    assert accepted_share(scheduler) > 0.97


def test_several_tokens_of_a_step_are_one_update(pair: tuple[Path, Path]) -> None:
    """A draft that is the model itself is right: 1 token by the prompt, then 4 by each step, and 3 up to the limit of 12."""
    engine = Engine.open(pair[0], device="cpu", draft=pair[0], draft_tokens=3)
    (served,) = serve(engine, Request(prompt(6), 12, ignore_end_tokens=True))
    assert [len(update.tokens) for update in served.updates] == [1, 4, 4, 3]


# Grammars


@needs_llguidance
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_constrained_requests_are_drafted_within_their_grammar(plain: Engine, engine: Engine, temperature: float) -> None:
    grammars = [json_schema_grammar(SCHEMA), regex_grammar("[a-e]{2,30}x"), choice_grammar(["yes", "yellow", "no"]), ""]
    requests = [
        Request(prompt(5, n), 60, SamplingOptions(temperature, seed=n), grammar=grammar)
        for n, grammar in enumerate(grammars)
    ]
    expected = serve(plain, *requests)
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    steps = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    assert accepted_share(scheduler) > 0
    assert steps < max(len(each.tokens) for each in expected)
    for got, wanted in zip(served, expected, strict=True):
        assert_same(got, wanted)


@needs_llguidance
def test_every_drafted_token_may_follow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own, drafted = Matcher.draft, []

    def noted(self: Matcher, token: int) -> bool:
        drafted.append(bool(self.allowed()[token]))
        return own(self, token)

    monkeypatch.setattr(Matcher, "draft", noted)
    serve(engine, Request(prompt(5), 40, SamplingOptions(1.5), grammar=json_schema_grammar(SCHEMA)))
    assert len(drafted) > 10 and all(drafted)


@needs_llguidance
def test_a_grammar_that_grows_too_large_ends_its_request_alone(engine: Engine) -> None:
    grammar = '{"grammars": [{"lark_grammar": "start: /x(a{1000}){1000}/"}]}'
    free = Request(prompt(4), 9, ignore_end_tokens=True)
    bad, other = serve(engine, Request(prompt(5), 20, grammar=grammar), free)
    assert bad.finish_reason == "error" and "too many expressions" in bad.updates[-1].error
    assert other.tokens == serve(engine, free)[0].tokens


# Limits and failures


def test_no_sequence_is_preempted_for_a_draft(plain: Engine, engine: Engine) -> None:
    """Two sequences of 8 + 8 positions fill a cache of 32; blocks for drafted tokens are taken only where they are left."""
    requests = [Request(prompt(8, seed), 8, ignore_end_tokens=True) for seed in range(2)]
    scheduler = scheduler_for(engine, kv_cache_bytes=32 * cache_sizes(engine)[0], max_model_length=16)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    assert scheduler.preemptions == 0 and accepted_share(scheduler) > 0
    assert [each.tokens for each in served] == [each.tokens for each in serve(plain, *requests)]


def test_both_caches_are_within_the_limit(plain: Engine, engine: Engine) -> None:
    each = engine.cache_sizes[0]
    assert cache_sizes(plain) == (each, 0) and cache_sizes(engine) == (2 * each, 0)
    scheduler = scheduler_for(engine, kv_cache_bytes=150 * each)
    assert scheduler.drafting is not None
    assert scheduler.runner.cache_bytes == scheduler.drafting.cache_bytes == 72 * each, "18 blocks of 4 positions"
    assert scheduler.max_model_length == 72
    with pytest.raises(OptionError, match=f"holds 72 positions .* give it {200 * each:,} bytes or more"):
        scheduler_for(engine, kv_cache_bytes=150 * each, max_model_length=100)


def test_a_models_own_layers_are_refused(pair: tuple[Path, Path]) -> None:
    engine = Engine.open(pair[0], device="cpu")
    engine.prediction = torch.nn.Identity()  # type: ignore[assignment]
    with pytest.raises(OptionError, match="one prompt at a time"):
        scheduler_for(engine)


def test_the_draft_reads_a_prompt_in_pieces(pair: tuple[Path, Path]) -> None:
    """The draft, which is always right, reads 16 tokens in a step: a text of 60 to 64 is drafted from the fourth step on."""
    engine = Engine.open(pair[0], device="cpu", draft=pair[0], draft_tokens=3)
    scheduler = scheduler_for(engine)
    long = Served(scheduler, engine, Request(prompt(60), 30, ignore_end_tokens=True))
    while not long.tokens:
        scheduler.step()
    run_to_end(scheduler)
    assert [len(update.tokens) for update in long.updates[:6]] == [1, 1, 1, 1, 4, 4]


def test_the_draft_shares_prompts_within_a_namespace_only(engine: Engine) -> None:
    scheduler, read = scheduler_for(engine), []
    assert scheduler.drafting is not None
    for number, namespace in enumerate(("a", "b", "a")):
        tokens: list[int] = []
        scheduler.drafting.switch.has_read = lambda count, seconds, tokens=tokens: tokens.append(count)  # type: ignore
        Served(scheduler, engine, Request(prompt(18), 5, namespace=namespace, ignore_end_tokens=True), number)
        run_to_end(scheduler)
        read.append(sum(tokens))
    assert read == [19, 19, 2], "the first two with a generated token; the third finds 16 of 18"


def test_a_draft_that_fails_is_left_out(plain: Engine, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's embedding of a token of one request is NaN; it goes on without a draft, and the other with it."""
    engine = Engine.open(pair[0], device="cpu", draft=pair[1], draft_tokens=3)
    good, bad = (Request(prompt(7, seed), 12, ignore_end_tokens=True) for seed in range(2))
    expected = serve(plain, good, bad)
    token = next(token for token in bad.prompt if token not in {*good.prompt, *(t for e in expected for t in e.tokens)})
    assert engine.draft is not None
    embedding = engine.draft.decoder.embedding_VD.data.clone()
    embedding[token] = torch.nan
    monkeypatch.setattr(engine.draft.decoder, "embedding", torch.nn.Parameter(embedding, requires_grad=False))
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate((good, bad))]
    run_to_end(scheduler)
    assert_all_free(scheduler)
    assert [each.tokens for each in served] == [each.tokens for each in expected]
    assert [len(each.updates) < 12 for each in served] == [True, False]
    assert scheduler.drafting is not None and not scheduler.drafting._unusable


def test_a_token_that_cannot_be_drafted_ends_no_request(
    plain: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second drafted token of each step fails. Both requests go on with the first ones."""
    own = RequestState._next_token

    def fails(self: RequestState, *arguments: Any) -> int:
        if len(self.drafted) == 1:
            raise RuntimeError("the distribution has no sum")
        return own(self, *arguments)

    requests = [Request(prompt(6, seed), 20, SamplingOptions(seed % 2), ignore_end_tokens=True) for seed in range(2)]
    expected = serve(plain, *requests)
    monkeypatch.setattr(RequestState, "_next_token", fails)
    scheduler = scheduler_for(engine)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    assert_all_free(scheduler)
    assert [each.tokens for each in served] == [each.tokens for each in expected]
    assert {len(update.tokens) for each in served for update in each.updates} == {1, 2}


def test_after_a_failed_step_the_next_request_is_drafted(engine: Engine) -> None:
    scheduler = scheduler_for(engine)
    request = Request(prompt(6), 9, ignore_end_tokens=True)
    running = Served(scheduler, engine, request)
    for _ in range(2):
        scheduler.step()
    scheduler.fail("told so")
    assert running.finish_reason == "error"
    assert_all_free(scheduler)
    again = Served(scheduler, engine, request, 2)
    run_to_end(scheduler)
    assert len(again.tokens) == 9 and len(again.updates) < 9


@pytest.mark.parametrize(("count", "rows"), [(20, 60), (40, 40)])
def test_a_wide_step_has_no_more_rows_than_the_kernels_take(engine: Engine, count: int, rows: int) -> None:
    """20 sequences have 2 drafted tokens each, which make 60 rows; 40 have none. Fewer have more while they arrive."""
    scheduler = scheduler_for(engine, max_batch_size=count, kv_cache_bytes=1 << 22)
    decode, found = scheduler.runner.decode, []

    def counted(states: Any) -> Any:
        logits = decode(states)
        found.append(len(logits))
        return logits

    scheduler.runner.decode = counted  # type: ignore[method-assign]
    for number in range(count):
        Served(scheduler, engine, Request(prompt(4, number), 30, ignore_end_tokens=True), number)
    run_to_end(scheduler)
    assert max(found) == 64 and rows in found


# When drafts are used


def test_drafts_are_off_where_a_batch_gains_nothing(pair: tuple[Path, Path]) -> None:
    """By the clock of this test R rows of the model take R - 3 seconds and at least one, and the draft takes none.

    The draft is the model itself. One sequence has 4 tokens in a second with a draft, and one without. 8 sequences have 32
    tokens in 29 seconds, and without a draft 8 in 5.
    """
    engine = Engine.open(pair[0], device="cpu", draft=pair[0], draft_tokens=3)
    scheduler = scheduler_for(engine, kv_cache_bytes=1 << 23)
    assert scheduler.drafting is not None
    scheduler.drafting.switch = DraftSwitch()
    now = [0.0]
    scheduler.drafting.clock = lambda: now[0]
    decode = scheduler.runner.decode

    def timed(states: Any) -> Any:
        logits = decode(states)
        now[0] += max(1, len(logits) - 3)
        return logits

    scheduler.runner.decode = timed  # type: ignore[method-assign]
    is_on = []
    for count, tokens in ((1, 110), (8, 90), (1, 40)):
        for number in range(count):
            Served(scheduler, engine, Request(prompt(2, number), tokens, ignore_end_tokens=True), number)
        run_to_end(scheduler)
        is_on.append(scheduler.drafting.load.is_on)
    assert is_on == [True, False, True]


def test_the_same_requests_draw_the_same_whenever_drafts_are_on(plain: Engine, engine: Engine) -> None:
    """The switch depends on the clock, and no text does."""
    request = Request(prompt(6), 40, SamplingOptions(1.0, seed=5), ignore_end_tokens=True)
    (expected,) = serve(plain, request)
    for seed in range(3):
        choose, scheduler = random.Random(seed), scheduler_for(engine)
        assert scheduler.drafting is not None
        scheduler.drafting.switch.wants = lambda sequences, choose=choose: choose.random() < 0.5  # type: ignore
        served = [Served(scheduler, engine, replace(request, prompt=prompt(6, n)), n) for n in range(3)]
        run_to_end(scheduler)
        assert served[0].tokens == expected.tokens
