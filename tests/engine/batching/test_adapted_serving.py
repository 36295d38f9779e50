"""Families that transformers runs: requests served together, over HTTP and after preemption, equal Engine.generate."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from conftest import others_slow
from server_for_tests import served
from serving_for_tests import Served as ServedRequest
from serving_for_tests import run_to_end, scheduler_for, serve
from tiny_families import TOKENS_SL, by_name, save_tiny
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.batching.loop import EngineLoop
from engine.batching.request import Request
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.server.reading.grammars import regex_grammar
from engine.server.server import Service, State

FAMILIES = others_slow(("exaone_moe", "nemotron_h", "kimi_linear"), "nemotron_h")
PROMPTS = ["def read(path):", "x", "class A(object):"]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(by_name(request.param), path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    skip_tables(collect(AdaptedCheckpoint(path), TOKENS_SL, dtype=torch.float32)).save(path / FILE_NAME)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    made = Engine.open(directory)
    made.end_tokens = frozenset()
    return made


def _requests(engine: Engine, **options: Any) -> list[Request]:
    return [Request(tuple(engine.encode(prompt)), 10, ignore_end_tokens=True, **options) for prompt in PROMPTS]


def test_requests_together_equal_generate(engine: Engine, directory: Path) -> None:
    expected = [each.token_ids for each in engine.generate(PROMPTS, max_new_tokens=10)]
    skipping = Engine.open(directory, skip_threshold=1.0)
    skipping.end_tokens = frozenset()
    skipped = [each.token_ids for each in skipping.generate(PROMPTS, max_new_tokens=10)]
    plain, asked = _requests(engine), _requests(engine, skip_threshold=1.0)
    size = 8 * (30 * engine.cache_sizes[0] + engine.cache_sizes[1])
    together = serve(engine, *plain, *asked, kv_cache_bytes=size)
    assert [each.tokens for each in together] == [*expected, *skipped]
    scheduler = scheduler_for(engine, kv_cache_bytes=size)
    one = ServedRequest(scheduler, engine, asked[0])
    run_to_end(scheduler)
    assert one.tokens == skipped[0]
    assert sum(scheduler.runner.counts[1]) > 0
    with pytest.raises(OptionError, match="skip threshold is -1"):
        scheduler.check(_requests(engine, skip_threshold=-1.0)[0])


def test_grammars_hold_beside_free_requests(engine: Engine) -> None:
    free, held = _requests(engine), [replace(each, grammar=regex_grammar("(yes|no){3,4}!")) for each in _requests(engine)]
    size = 8 * (30 * engine.cache_sizes[0] + engine.cache_sizes[1])
    alone = [serve(engine, each, kv_cache_bytes=size)[0].tokens for each in free]
    mixed = serve(engine, held[0], free[0], held[1], free[1], free[2], kv_cache_bytes=size)
    assert [mixed[place].tokens for place in (1, 3, 4)] == alone
    for each in (mixed[0], mixed[2]):
        assert re.fullmatch("(yes|no){1,4}!?[yesno]*", each.text) and each.finish_reason in ("stop", "length")


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_preempted_request_ends_in_the_same_tokens(engine: Engine, directory: Path, threshold: float) -> None:
    """Room for one sequence and a little more: the younger ones are read again, with skipping too."""
    alone = Engine.open(directory, skip_threshold=threshold)
    alone.end_tokens = frozenset()
    expected = [each.token_ids for each in alone.generate(PROMPTS, max_new_tokens=10)]
    position, state = engine.cache_sizes
    scheduler = scheduler_for(engine, kv_cache_bytes=8 * state + 32 * position, max_model_length=32)
    requests = _requests(engine, skip_threshold=threshold)
    served_requests = [ServedRequest(scheduler, engine, each, number) for number, each in enumerate(requests)]
    run_to_end(scheduler)
    assert [each.tokens for each in served_requests] == expected
    assert scheduler.preemptions > 0


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    request = _requests(engine, top_logprobs=1, prompt_logprobs=True)[0]
    (one,) = serve(engine, request, kv_cache_bytes=8 * (64 * engine.cache_sizes[0] + engine.cache_sizes[1]))
    with torch.inference_mode():
        logprobs_LV = engine.decoder(torch.tensor([request.prompt]))[0].log_softmax(-1)
    expected_L = logprobs_LV[:-1].gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0]
    assert [each.logprob for each in one.updates[0].prompt_logprobs or ()] == pytest.approx(expected_L.tolist(), abs=1e-4)


def test_the_size_of_a_cache_is_what_a_sequence_takes(engine: Engine) -> None:
    position, state = engine.cache_sizes
    for length in (1, 20, 60):
        cache = engine.new_cache(1, length)
        engine.prefill(torch.zeros(1, length, dtype=torch.long), None, cache)
        assert 0 < cache.bytes <= length * position + state


def test_two_clients_at_once_get_what_generate_gives(engine: Engine, directory: Path) -> None:
    own = Engine.open(directory)
    size = 4 * (64 * own.cache_sizes[0] + own.cache_sizes[1])
    engine_loop = EngineLoop(own, kv_cache_bytes=size, max_batch_size=4, max_model_length=64)
    engine_loop.start()
    service = Service(own, engine_loop, model_name="tiny")
    with served(State(phase="ready", loaded=service)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:

        def ask(prompt: str) -> str:
            given: Any = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
            pieces = client.completions.create(model="tiny", prompt=prompt, stream=True, **given)
            return "".join(piece.choices[0].text for piece in pieces if piece.choices)

        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(ask, PROMPTS[:2]))
        messages: Any = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, temperature=0)
    service.close()
    assert texts == [each.text for each in engine.generate(PROMPTS[:2], max_new_tokens=12)]
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 3
