"""Special tokens in the text of an answer: none, or those that a request names, and never the token that ends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers_for_tests import add_tokenizer
from transformers import AutoTokenizer

from engine.batching.request import Request, Update
from engine.batching.request_state import RequestState, Surroundings
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.generation.text_stream import PlainText, special_tokens

MARK, OTHER = "<｜tool▁sep｜>", "<|other|>"
TEXT = f"<s>a größer {MARK}{OTHER} b{MARK}"


@pytest.fixture(scope="module", params=["transformers", "plain"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(path, mark=MARK, other=OTHER)
    return AutoTokenizer.from_pretrained(path) if request.param == "transformers" else load_tokenizer_of(path, 264)


def text(tokenizer: Any, shown: tuple[str, ...], limit: int = 100, ignore_end_tokens: bool = False) -> str:
    """Return the text of a request for which the model writes TEXT and then its end token, token by token."""
    tokens = [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id]
    updates: list[Update] = []
    request = Request((5,), limit, shown_special_tokens=shown, ignore_end_tokens=ignore_end_tokens)
    around = Surroundings(frozenset({tokenizer.eos_token_id}), PlainText(tokenizer))
    state = RequestState(1, request, updates.append, around)
    for token in tokens:
        state.take(torch.zeros(1, 300), [token])
    assert state.finished is not ignore_end_tokens
    return "".join(update.text for update in updates)


def test_only_those_that_a_request_names_are_shown(tokenizer: Any) -> None:
    assert text(tokenizer, ()) == "a größer  b"
    assert text(tokenizer, (MARK,)) == f"a größer {MARK} b{MARK}"
    assert text(tokenizer, (MARK, OTHER)) == TEXT.removeprefix("<s>")
    assert text(tokenizer, ("unknown",)) == "a größer  b"


def test_an_end_token_is_never_shown_unless_it_is_ignored_and_named(tokenizer: Any) -> None:
    assert text(tokenizer, (MARK, "</s>")) == f"a größer {MARK} b{MARK}"
    assert text(tokenizer, (MARK,), ignore_end_tokens=True) == f"a größer {MARK} b{MARK}"


def test_special_tokens_by_id(tokenizer: Any) -> None:
    found = special_tokens(tokenizer)
    assert {MARK, OTHER, "<s>", "</s>", "<pad>"} == set(found.values())
    assert all(tokenizer.convert_ids_to_tokens(token) == name for token, name in found.items())
