"""Matchers over several kinds of tokenizers: which tokens they allow, worked out from the tokens' bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers_for_tests import SPECIAL, add_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import OptionError
from engine.generation.grammar_matcher import KEPT_GRAMMARS, Grammars, Matcher
from engine.generation.guidance import Tokens

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab", "\u2581a", "abab", "\u2581"]
"""A vocabulary with a token for each byte, as those of sentencepiece have."""
END, A, B, AB, SPACE_A, ABAB, SPACE = 2, 259, 260, 261, 262, 263, 264


def regex(pattern: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


@pytest.fixture(scope="module")
def pieces() -> Any:
    """Return a tokenizer that writes a space before each text, and characters without a token as bytes."""
    vocabulary = {piece: place for place, piece in enumerate(PIECES)}
    own = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], byte_fallback=True, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("letters")
    add_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


def allowed(tokenizer: Any, pattern: str, *taken: int, size: int = len(PIECES), ends: tuple[int, ...] = (END,)) -> set[int]:
    matcher = Grammars(lambda: tokenizer, size, ends).matcher(regex(pattern))
    for token in taken:
        matcher.take(token)
    mask = matcher.allowed()
    assert mask.dtype == torch.bool and mask.shape == (size,)
    return set(mask.nonzero()[:, 0].tolist())


def test_tokens_of_several_letters_and_bytes(pieces: Any) -> None:
    """Both tokens for the letter a are allowed, that of the vocabulary and that of its byte."""
    bytes_of = {letter: 3 + ord(letter) for letter in "ab "}
    assert allowed(pieces, "(ab)+") == {A, bytes_of["a"], AB, ABAB}
    assert allowed(pieces, "a[ba]", A) == {A, B, bytes_of["a"], bytes_of["b"]}
    assert allowed(pieces, "(ab)+", AB) == {A, bytes_of["a"], AB, ABAB, END}
    assert allowed(pieces, " a|b") == {SPACE, SPACE_A, bytes_of[" "], B, bytes_of["b"]}


def test_characters_span_tokens(pieces: Any, letters: Any) -> None:
    """The letter ß has the bytes C3 9F, and à C3 A0."""
    assert allowed(pieces, "ß|à") == {3 + 0xC3}
    assert allowed(pieces, "ß|à", 3 + 0xC3) == {3 + 0x9F, 3 + 0xA0}
    (first, second), (_, third) = (letters(letter)["input_ids"] for letter in ("ß", "à"))
    assert allowed(letters, "ß|à", size=264) == {first} and allowed(letters, "ß|à", first, size=264) == {second, third}


def test_a_text_without_choice_has_the_tokenizers_tokens(pieces: Any) -> None:
    """The tokenizer would write a space before the text, so the longest tokens are taken in its place."""
    assert allowed(pieces, "abababx") == {ABAB} and allowed(pieces, "abababx", ABAB) == {AB}
    assert allowed(pieces, "abababx", ABAB, AB) == {3 + ord("x")}
    tokens = Tokens(pieces, len(PIECES), [END])
    assert tokens(b" ab") == pieces("ab", add_special_tokens=False)["input_ids"] == [SPACE, AB]
    assert tokens(b"abab\xff") == [ABAB, 3 + 0xFF] and tokens(b"") == []


def test_special_tokens_are_no_text(letters: Any) -> None:
    """The pieces <pad>, <s> and </s> are names here: a text may have their letters, and not the tokens."""
    found = allowed(letters, ".*", size=264)
    assert found & {0, 1, 2} == {2} and len(found) > 100
    assert allowed(letters, "<s>x", size=264) == {letters("<")["input_ids"][0]}
    assert SPECIAL == ("<pad>", "<s>", "</s>")


def test_a_grammar_may_name_special_tokens(tmp_path: Path) -> None:
    """By id or by name, as the marks of calls are written; text around them has the tokenizer's tokens."""
    add_tokenizer(tmp_path, call="<call>", close="</call>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    call, close = (tokenizer.convert_tokens_to_ids(name) for name in ("<call>", "</call>"))
    grammars = Grammars(lambda: tokenizer, 268, (2,))
    expected = [*tokenizer("ab")["input_ids"], call, *tokenizer("{")["input_ids"], close]
    for grammar in (f'start: "ab" <[{call}]> "{{" <[{close}]>', 'start: "ab" <call> "{" </call>'):
        matcher, found = grammars.matcher(grammar), list[int]()
        while (token := matcher.only()) is not None:
            found.append(token)
            if matcher.take(token):
                break
        assert found == expected


def test_ends_of_models_with_several_and_with_none(letters: Any) -> None:
    (x,) = letters("x")["input_ids"]
    assert allowed(letters, "x|xx", x, size=264, ends=(1, 2)) == {1, 2, x}
    assert allowed(letters, "x|xx", x, size=264, ends=()) == {x}
    matcher = Grammars(lambda: letters, 264, ()).matcher(regex("xx"))
    assert not matcher.take(x) and matcher.only() == x and matcher.take(x)


def test_an_only_token_is_named(letters: Any) -> None:
    (x,), (y,) = letters("x")["input_ids"], letters("y")["input_ids"]
    matcher = Grammars(lambda: letters, 264, (2,)).matcher(regex("xx?y"))
    assert matcher.only() == x and not matcher.take(x)
    assert matcher.only() is None and matcher.take(y)


def test_matchers_of_one_grammar_are_apart(letters: Any) -> None:
    """The tokenizer is asked for once, and the oldest compiled grammars are forgotten."""
    asked: list[int] = []

    def tokenizer() -> Any:
        asked.append(1)
        return letters

    (x,), (y,) = letters("x")["input_ids"], letters("y")["input_ids"]
    grammars = Grammars(tokenizer, 264, (2,))
    first, second = grammars.matcher(regex("x(x|y)")), grammars.matcher(regex("x(x|y)"))
    first.take(x)
    assert set(first.allowed().nonzero()[:, 0].tolist()) == {x, y} and second.only() == x
    for place in range(KEPT_GRAMMARS + 5):
        grammars.matcher(regex(f"x{{{place + 1}}}"))
    assert len(grammars._kept) == KEPT_GRAMMARS and asked == [1]
    assert second.take(x) is False


def test_a_wrong_token_is_no_text(letters: Any) -> None:
    matcher = Grammars(lambda: letters, 264, (2,)).matcher(regex("x+"))
    with pytest.raises(OptionError, match="cannot follow its grammar"):
        matcher.take(letters("y")["input_ids"][0])


def test_errors_of_compiling(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(lambda: letters, 264, (2,))
    with pytest.raises(OptionError, match=r"cannot be compiled: .*unknown name"):
        grammars.matcher("start: unknown")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match="llguidance, which is not installed"):
        grammars.matcher("start: /x/")


def test_a_panic_of_the_library_ends_one_text() -> None:
    """A library in Rust that panics raises no Exception, which would end the engine's thread."""
    panic = type("PanicException", (BaseException,), {})

    class Broken:
        def compute_bitmask(self) -> bytes:
            raise panic("broken")

        def consume_token(self, token: int) -> bool:
            raise panic("broken")

    matcher = Matcher(Broken(), 264)
    matcher.prepare()
    assert matcher.only() is None
    with pytest.raises(OptionError, match="llguidance fails on this grammar"):
        matcher.allowed()
    with pytest.raises(OptionError, match="llguidance fails on this grammar"):
        matcher.take(5)
