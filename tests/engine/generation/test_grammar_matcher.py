"""Matchers over several kinds of tokenizers: which tokens they allow, worked out from the tokens' bytes."""

from __future__ import annotations

import sys
from contextlib import suppress
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


def test_tokens_on_trial_are_undone(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a place is computed once where the text goes as the trial went, and anew where it does not."""
    computed, prepare = list[str](), Matcher.prepare

    def noted(self: Matcher) -> None:
        if self._place.allowed_V is None:
            computed.append(name)
        prepare(self)

    monkeypatch.setattr(Matcher, "prepare", noted)
    x, y, z = (letters(letter)["input_ids"][0] for letter in "xyz")
    for name in ("alone", "as drafted", "otherwise"):
        matcher = Grammars(lambda: letters, 264, (2,), drafts=True).matcher(regex("x[xy](z|zz)"))
        if name != "alone":
            drafted = (x, x, z) if name == "as drafted" else (x, y, z)
            assert matcher.only() == x
            for token in drafted:
                assert not matcher.draft(token)
                matcher.prepare()
            matcher.undo()
        found = []
        for token in (x, x, z, z):
            found.append(set(matcher.allowed().nonzero()[:, 0].tolist()))
            assert matcher.take(token) == (len(found) == 4)
        assert found == [{x}, {x, y}, {z}, {2, z}]
    assert [computed.count(name) for name in ("alone", "as drafted", "otherwise")] == [4, 4, 6]


def test_a_trial_may_end_the_text(letters: Any) -> None:
    (x,) = letters("x")["input_ids"]
    matcher = Grammars(lambda: letters, 264, (2,), drafts=True).matcher(regex("xx"))
    assert not matcher.draft(x) and matcher.draft(x)
    matcher.undo()
    assert matcher.only() == x and not matcher.take(x) and matcher.take(x)


def test_an_error_on_trial_leaves_the_text_alone(letters: Any) -> None:
    """After xa the expression is too large to follow. All copies of a compiled grammar share llguidance's limits."""
    a, x, y = (letters(letter)["input_ids"][0] for letter in "axy")
    grammars = Grammars(lambda: letters, 264, (2,), drafts=True)
    grammar = "start: /y+|x(a{1000}){1000}/"
    failing, other = grammars.matcher(grammar), grammars.matcher(grammar)
    assert not failing.draft(x) and bool(failing.allowed()[a])
    with pytest.raises(OptionError, match="cannot follow its grammar"):
        failing.draft(a)
    failing.undo()
    for matcher in (failing, other):
        for _ in range(3):
            with suppress(OptionError):  # trials of this grammar fail from now on
                matcher.draft(y)
            matcher.prepare()
            matcher.undo()
            assert not matcher.take(y) and set(matcher.allowed().nonzero()[:, 0].tolist()) == {2, y}


def test_without_a_second_matcher_there_is_no_trial(letters: Any) -> None:
    matcher = Grammars(lambda: letters, 264, (2,)).matcher(regex("xx"))
    with pytest.raises(OptionError, match="on trial"):
        matcher.draft(letters("x")["input_ids"][0])
