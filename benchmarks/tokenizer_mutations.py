"""Mutations of tokenizer.json, chat templates and tokenizer_config.json. Used by other scripts."""

from __future__ import annotations

import json
import random
from typing import Any

from mutations import change_bytes, change_json, change_values


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
STEPS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a"}, _replace({"String": " "}, "b")]},
        {"type": "Sequence", "normalizers": [_replace({"String": "e"}, "ee")] * 5},
        _replace({"Regex": r"\s+"}, " "),
        {"type": "Precompiled", "precompiled_charsmap": "AAgAAAAABAAAAAAAAAAAAA=="},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "NFKC"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ),
    "pre_tokenizer": (
        _SPLIT | {"pattern": {"Regex": r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"}},
        _SPLIT | {"pattern": {"String": " "}},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "Whitespace"}]},
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "CharDelimiterSplit", "delimiter": " "},
        {"type": "FixedLength", "length": 3},
    ),
    "decoder": (
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "ByteLevel"}]},
        {"type": "Strip", "content": "a", "start": 1, "stop": 0},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "a"},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    ),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [_TEXT], "pair": [_TEXT], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["<s>", 1], "cls": ["</s>", 2]},
        {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["a", 2], "trim_offsets": True, "add_prefix_space": True},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}]},
    ),
    "truncation": ({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},),
    "padding": (
        {
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": 8,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    ),
    "model": (
        {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[chr(97 + number), -1.0] for number in range(26)],
            "byte_fallback": False,
        },
        {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "the": 1}},
        {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0, "##b": 1}, "max_input_chars_per_word": 100},
    ),
}


def change_tokenizer(data: bytes, chosen: random.Random) -> bytes:
    """Insert steps of other tokenizers, and then change the steps or any other part."""
    if chosen.random() < 0.3:
        return change_json(data, chosen)
    try:
        values = json.loads(data)
        part = chosen.choice(list(STEPS))
        values[part] = json.loads(json.dumps(chosen.choice(STEPS[part])))
        if part == "model" and chosen.random() < 0.7:
            tokens = values["model"]["vocab"]
            for number in range(len(tokens), 250):
                tokens.append([f"w{number}", -2.0]) if isinstance(tokens, list) else tokens.update({f"w{number}": number})
    except (ValueError, KeyError, TypeError):
        return change_json(data, chosen)
    for _ in range(chosen.choice((0, 1, 1, 2, 3))):
        change_values(values[part], chosen)
    return json.dumps(values).encode()


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIECES = (
    *r"""
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 'a' * 10**9 }}
{{ 10 ** 10 ** 9 }}
{{ 10 ** 5000 }}
{{ '%c' % -1 }}
{% for a in range(10**9) %}{% endfor %}
{% for a in range(10**9) %}x{% endfor %}
{{ range(10**12) | list | length }}
{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{{ ''.__class__.__mro__ }}
{{ cycler.__init__.__globals__.os }}
{{ raise_exception('no') }}
{{ messages[9].content }}
{{ messages.append(1) }}
{% include '/etc/passwd' %}
{% extends 'x' %}
{{ undefined.x.y }}
{{ none + 1 }}
{% endfor %}
{{
{% set x =
{#
{{ 1e999 }}
{{ strftime_now('%' * 1000) }}
{{ 'x' | center(10**9) }}
{{ '{0:>1000000000}'.format(1) }}
{{ messages | tojson }}
{{ ('a' * 1000).replace('a', 'a' * 100000) }}
{{ lipsum(10**6) }}
{{ dict(a=1).b.c }}
{{ -1 | float | int * 'x' }}
{% generation %}a{% endgeneration %}
{% break %}
{{ loop }}
{{ self }}
{{ 2 ** 100000 }}
""".strip().splitlines(),
    *("(" * 500, "{{ " + "(" * 500, "\ufffe", "{{ [" * 300),
)


def change_template(data: bytes, chosen: random.Random) -> bytes:
    """Insert pieces into a template, or change its words."""
    text = data.decode(errors="replace") if chosen.random() < 0.3 else TEMPLATE
    for _ in range(chosen.choice((0, 1, 1, 2))):
        place = chosen.choice((0, len(text), text.find("{{"), chosen.randrange(len(text) + 1)))
        text = text[:place] + chosen.choice(PIECES) + text[place:]
    return change_bytes(text.encode(), chosen) if chosen.random() < 0.2 else text.encode()


def change_tokenizer_config(data: bytes, chosen: random.Random) -> bytes:
    """Change a template in tokenizer_config.json, or any other part of that file."""
    if chosen.random() < 0.5:
        return change_json(data, chosen)
    values = json.loads(data)
    values["chat_template"] = change_template(TEMPLATE.encode(), chosen).decode(errors="replace")
    return json.dumps(values).encode()
