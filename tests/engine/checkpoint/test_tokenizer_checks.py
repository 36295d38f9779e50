"""Tokenizers that would harm the library are refused before it reads them. Tokenizers of published forms are accepted."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.checkpoint.regex_checks import problem_of_regex
from engine.checkpoint.tokenizer_checks import check_tokenizer_files
from engine.errors import CheckpointError

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "GPT-2": GPT_2,
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "Llama 3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen 2, Qwen 3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "GPT-OSS": O200K,
    "Mistral Nemo": O200K.replace(CONTRACTIONS + "?", "").replace("{1,3}", ""),
    "DeepSeek V2": r"[!-/:-~！-／：-～‘-‟　-。]+",
    "DeepSeek V2, letters": r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ𞤀-𞥃]+",
    "DeepSeek V2, ends": r"\s+$",
    "DeepSeek V3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek V3, CJK": "[一-龥぀-ゟ゠-ヿ]+",
    "Kimi": r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    + CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "digits from the right": r"(?=(\d{3})+(?!\d))",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "T5": " {2,}",
    "line ends": r"\r?\n",
}
EXPLOSIVE = ("(a+)+$", "(a|aa)*$", "(?:a?a)+b", "((a{1,2}){2,})b", r"(\s*\w+)*!", "(?:(?:a+)+)", "(x+x+)+y", "(a{1,3})+b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_pass(name: str) -> None:
    assert problem_of_regex(PUBLISHED[name]) is None


@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_patterns_of_exponential_time_are_refused(pattern: str) -> None:
    assert "exponential" in str(problem_of_regex(pattern))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(a)\1", "refers to a group"),
        (r"(?<x>a\g<x>?)", "refers to a group"),
        ("(?{code})", "kind of group"),
        ("(*FAIL)", "kind of group"),
        ("a*b*c*d*e*f", "in a row"),
        ("a{100000}", "more than 1000 times"),
        ("(?:(?:a{100}){100})", "more than 1000 times"),
        ("(" * 100 + ")" * 100, "deep"),
        ("x" * 20_001, "longer"),
        ("[a", "does not close"),
        ("(a", "does not close"),
        ("a)", "not opened"),
    ],
)
def test_other_patterns_that_are_refused(pattern: str, said: str) -> None:
    assert said in str(problem_of_regex(pattern))


# Whole files


def charsmap(change: Any = None) -> str:
    """Return a map of "A" to "a" in the format of sentencepiece. `change` is given its units and its texts."""
    units = np.zeros(512, dtype="<u4")
    units[0] = 256 << 10  # from the root to state 256
    place = 256 ^ ord("A")
    units[place] = ord("A") | 1 << 8 | (place ^ 384) << 10  # a value follows, in state 384
    units[384] = 1 << 31 | 2
    texts = bytearray(b"b\0a\0")
    if change is not None:
        change(units, texts)
    data = units.tobytes()
    return base64.b64encode(len(data).to_bytes(4, "little") + data + texts).decode()


def tokenizer(**parts: Any) -> dict[str, Any]:
    """Return a small tokenizer with other parts."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "▁": 2, "ab": 3}, "merges": [["a", "b"]]}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(names) | parts


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


PREFIX = {"type": "Prepend", "prepend": "▁"}
WIDE_SPACE = replace({"String": " "}, "▁")
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}


def template(single: Any, special: Any = None) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [A, B], "special_tokens": special or {}}


GOOD: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "normalizer": sequence("normalizers", PREFIX, WIDE_SPACE),
        "post_processor": template([BOS, A], {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}),
        "decoder": sequence(
            "decoders",
            replace({"String": "▁"}, " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
    },
    "Gemma": {
        "normalizer": WIDE_SPACE,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    },
    "Llama 3": {
        "pre_tokenizer": sequence(
            "pretokenizers",
            {"type": "Split", "pattern": {"Regex": PUBLISHED["Llama 3"]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    },
    "T5": {
        "normalizer": sequence(
            "normalizers",
            {"type": "Precompiled", "precompiled_charsmap": charsmap()},
            replace({"Regex": " {2,}"}, "▁"),
        ),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": [["a", -1.0], ["b", 0.0]], "byte_fallback": False},
    },
    "BERT": {
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            **{"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": 8},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        },
        "normalizer": {
            **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 0]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            **{"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
            "vocab": {"a": 0, "b": 1},
        },
    },
}


def check(directory: Path, values: dict[str, Any]) -> None:
    (directory / "tokenizer.json").write_text(json.dumps(values))
    check_tokenizer_files(directory, 4)


@pytest.mark.parametrize("name", GOOD)
def test_published_tokenizers_pass(tmp_path: Path, name: str) -> None:
    values = tokenizer(**GOOD[name])
    check(tmp_path, values)
    Tokenizer.from_str(json.dumps(values)).encode("a b")


def test_a_good_map_of_characters_is_used() -> None:
    values = tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap()})
    assert Tokenizer.from_str(json.dumps(values)).normalizer.normalize_str("AAx") == "aax"


def deep(steps: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "NFC"}
    for _ in range(steps):
        node = sequence("normalizers", node)
    return node


def mapped(change: Any) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(change)}}


def units(place: int, value: int) -> Any:
    return mapped(lambda found, _: found.__setitem__(place, value))


def model(**changes: Any) -> dict[str, Any]:
    return {"model": tokenizer()["model"] | changes}


DOUBLED = [replace({"String": "a"}, "aa")] * 40
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "doubling normalizers": (
        {"normalizer": sequence("normalizers", *DOUBLED)},
        "lengthens a text up to 1099511627776 times",
    ),
    "doubling decoders": ({"decoder": sequence("decoders", *DOUBLED)}, "decoder lengthens"),
    "a megabyte of content": ({"normalizer": replace({"String": "a"}, "a" * 1_000_000)}, "at most 4096"),
    "content between characters": ({"normalizer": replace({"Regex": "x"}, "a" * 100)}, "101 times"),
    "prefixes": ({"normalizer": sequence("normalizers", *[PREFIX] * 10)}, "lengthens"),
    "many steps": ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 100)}, "more than 64 steps"),
    "deep steps": ({"normalizer": deep(20)}, "deep"),
    "unknown step": ({"normalizer": {"type": "Explode"}}, "'Explode', which is not known"),
    "no type": ({"pre_tokenizer": {"pattern": {"String": "a"}}}, "None, which is not known"),
    "byte levels": ({"pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel"}] * 9)}, "9 steps that lengthen"),
    "exponential": ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}}, "exponential"),
    "empty pieces": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "FixedLength, length"),
    "map not base64": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!!"}}, "not base64"),
    "map of another length": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 100).decode()}},
        "not that of its table",
    ),
    "map out of its table": (units(0, 512 << 10), "out of its table"),
    "map to a value out of its table": (units(256 ^ 65, 65 | 1 << 8 | 4096 << 10), "out of its table"),
    "map out of its texts": (units(384, 1 << 31 | 1000), "out of its texts"),
    "map to a text without an end": (mapped(lambda _, texts: texts.pop()), "out of its texts"),
    "map to a part of a character": (
        mapped(lambda _, texts: texts.__setitem__(slice(1, 4), b"\0\x81\0")),
        "out of its texts",
    ),
    "map to a long text": (mapped(lambda _, texts: texts.__setitem__(slice(2, 3), b"a" * 1000)), "out of its texts"),
    "padding": ({"padding": {"strategy": {"Fixed": 10**12}}}, "strategy Fixed: is 1000000000000"),
    "padding to a multiple": ({"padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 10**12}}, "pad_to_multiple_of"),
    "truncation": ({"truncation": {"max_length": 4, "stride": 10**12}}, "stride"),
    "text twice": ({"post_processor": template([A, A])}, "a sequence twice"),
    "text a thousand times": ({"post_processor": template([A] * 1000)}, "at most 64"),
    "text that is not there": ({"post_processor": template([B])}, "one that is not an input"),
    "special token that is not there": ({"post_processor": template([BOS, A])}, "not in special_tokens"),
    "special token beyond": ({"post_processor": template([BOS, A], {"<s>": {"ids": [2**32 - 1]}})}, "id 4294967295"),
    "separator beyond": ({"post_processor": {"type": "BertProcessing", "sep": ["a", 0], "cls": ["b", 9]}}, "cls: id 9"),
    "id beyond": (model(vocab={"a": 2**32 - 1}, merges=[]), "id 4294967295"),
    "id negative": (model(vocab={"a": -1}, merges=[]), "id -1"),
    "id a text": (model(vocab={"a": "0"}, merges=[]), "id '0'"),
    "added id beyond": ({"added_tokens": [TOKEN | {"id": 4, "content": "<x>"}]}, "id 4 is not"),
    "added token a list": ({"added_tokens": [TOKEN | {"id": 0, "content": []}]}, "not a text"),
    "half a character": ({"added_tokens": [TOKEN | {"id": 0, "content": "\ud800"}]}, "not valid Unicode"),
    "unknown token": (model(unk_token="zz"), "unk_token 'zz'"),
    "merge without the prefix": (model(continuing_subword_prefix="éé"), "lacks the prefix"),
    "no pieces": ({"model": {"type": "Unigram", "unk_id": 0, "vocab": []}}, "vocab that is not a list"),
    "piece without an unknown": ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}}, "unk_id None"),
    "long words": (
        {"model": GOOD["BERT"]["model"] | {"max_input_chars_per_word": 2**63}},
        "max_input_chars_per_word",
    ),
    "words without an unknown": ({"model": GOOD["BERT"]["model"] | {"unk_token": "[UNK]"}}, "unk_token '[UNK]'"),
    "model unknown": ({"model": {"type": "Oracle"}}, "type 'Oracle'"),
    "model a list": ({"model": []}, "not an object"),
    "strip from the end": ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}}, "stop"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_tokenizer_has_is_refused(tmp_path: Path, name: str) -> None:
    parts, said = BAD[name]
    with pytest.raises(CheckpointError) as caught:
        check(tmp_path, tokenizer(**parts))
    assert said in str(caught.value) and "tokenizer.json" in str(caught.value)


def test_long_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "merges.txt").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(CheckpointError, match=r"merges\.txt: tokenizer file is longer"):
        check_tokenizer_files(tmp_path, 4)
