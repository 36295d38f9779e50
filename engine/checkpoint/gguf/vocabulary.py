"""A model's tokenizer, chat template and end tokens as metadata of a GGUF file: the reverse of `tokenizer.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.checkpoint.gguf.tokenizer import CONTROL, NAMED, SPACE, USER_DEFINED
from engine.checkpoint.model_directory import ModelDirectory
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer
from engine.errors import CheckpointError, UnsupportedError
from engine.families.gguf.splits import BYTE_LEVEL, GPT2, SENTENCE_PIECE, split_name
from engine.files.json_file import shown

NO_VOCABULARY = "none"
"""Value of `tokenizer.ggml.model` of a file without a tokenizer."""
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_NORMAL, _UNKNOWN, _UNUSED, _BYTE = 1, 2, 5, 6
"""Types of tokens."""
_PREFIX = "tokenizer.ggml."


def has_tokenizer(checkpoint: ModelDirectory) -> bool:
    """Return whether a model has a tokenizer at all."""
    return any((checkpoint.files_directory / name).is_file() for name in _FILES)


def tokenizer_metadata(checkpoint: ModelDirectory) -> dict[str, Any]:
    """Return the metadata of a model's tokenizer, or of a model without one.

    Raises CheckpointError for a damaged tokenizer, UnsupportedError for one that GGUF files have no form for.
    """
    try:
        is_there = has_tokenizer(checkpoint)
    except CheckpointError as error:  # the tokenizer of a GGUF file, which is made when it is asked for
        raise UnsupportedError(str(error)) from error
    if not is_there:
        return without_tokenizer(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    vocabulary = tokenizer.backend_tokenizer.get_vocab(True)
    named = {key: vocabulary.get(tokenizer.special_tokens_map.get(name)) for name, key in NAMED.items()}
    special = _special(checkpoint, named)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    size, is_byte_level = checkpoint.config.vocabulary_size, _has(content["pre_tokenizer"], "ByteLevel")
    made = _byte_level(content) if is_byte_level else _sentence_piece(content, vocabulary, size)
    template = {"tokenizer.chat_template": tokenizer.chat_template} if isinstance(tokenizer.chat_template, str) else {}
    return (
        {f"{_PREFIX}{key}": value for key, value in made.items()}
        | _tokens(content, vocabulary, size, named["unknown"])
        | special
        | _surrounded(tokenizer, *(special.get(f"{_PREFIX}{name}_token_id") for name in ("bos", "eos")))
        | template
    )


def without_tokenizer(checkpoint: ModelDirectory) -> dict[str, Any]:
    """Return the metadata of a file that has the ids of special tokens and no vocabulary."""
    special = _special(checkpoint, {}) if checkpoint.gguf is None else _written(checkpoint.gguf.special_tokens)
    return {f"{_PREFIX}model": NO_VOCABULARY} | special


def _special(checkpoint: ModelDirectory, named: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the ids of special tokens. Generation ends at the end token or at another one, the end of a turn.

    `named`: those that the tokenizer has names for; the config's own take the place of others.
    """
    config, ends = checkpoint.config.transformers_config, sorted(each for each in end_tokens(checkpoint) if each >= 0)
    end = named.get("eos")
    if end not in ends:
        end = ends[0] if ends else None
    found = {"unknown": named.get("unknown"), "eos": end, "eot": next((each for each in ends if each != end), None)}
    for key, own in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        given = named.get(key)
        found[key] = getattr(config, own, None) if given is None else given
    return _written(found)


def _written(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return ids of special tokens as metadata, without those that stand for no token: None, and -1 in a config."""
    return {f"{_PREFIX}{name}_token_id": number for name, number in ids.items() if type(number) is int and number >= 0}


def _tokens(content: Mapping[str, Any], vocabulary: Mapping[str, int], size: int, unknown: int | None) -> dict[str, Any]:
    """Return all tokens in the order of their numbers, and their types. Numbers without a token become unused tokens."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for token, number in vocabulary.items():
        if token == tokens[number]:
            continue  # read from a GGUF file, where it was unused
        is_byte = content["model"].get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
        tokens[number], types[number] = token, _BYTE if is_byte else _NORMAL
    for added in content["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if unknown is not None:
        types[unknown] = _UNKNOWN
    return {f"{_PREFIX}tokens": tokens, f"{_PREFIX}token_type": types}


def _byte_level(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model, the name of the splits, and the merges. Raises UnsupportedError for splits without a name."""
    model = content["model"]
    patterns = tuple(_patterns(content["pre_tokenizer"]))
    normalizers = [step["type"] for step in _normalizers(content)]
    if normalizers not in ([], ["NFC"]):
        raise UnsupportedError(f"its tokenizer changes texts by {shown(normalizers)}, for which GGUF files have no form")
    name = split_name(patterns, bool(model.get("ignore_merges")), bool(normalizers))
    if model["type"] != "BPE" or name is None:
        raise UnsupportedError("the way in which its tokenizer cuts a text has no name in GGUF files")
    return {"model": BYTE_LEVEL, "pre": name, "merges": [" ".join(_pair(merge)) for merge in model["merges"]]}


def _normalizers(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps that change a text before it is cut, in order."""
    pending, found = [content.get("normalizer")], list[Mapping[str, Any]]()
    while pending:
        step = pending.pop(0)
        if step and step["type"] == "Sequence":
            pending = [*step["normalizers"], *pending]
        elif step:
            found.append(step)
    return found


def _patterns(step: Mapping[str, Any]) -> list[str]:
    """Return the patterns by which a text is cut. Raises UnsupportedError for another way."""
    kind = step["type"]
    if kind == "Sequence":
        return [pattern for each in step["pretokenizers"] for pattern in _patterns(each)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2] if step.get("use_regex", True) else []
    if kind == "Digits" and step["individual_digits"]:
        return [r"\p{N}"]
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return [step["pattern"]["Regex"]]
    raise UnsupportedError(f"its tokenizer cuts a text by {kind}, in a way that GGUF files have no name for")


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two pieces of a merge, which older tokenizer.json have in one text."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _sentence_piece(content: Mapping[str, Any], vocabulary: Mapping[str, int], size: int) -> dict[str, Any]:
    """Return the model and the scores of pieces. A piece that is merged earlier has a higher score.

    Raises UnsupportedError for anything but merges of sentencepiece.
    """
    model = content["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        raise UnsupportedError(f"its tokenizer, a {model['type']}, has no form in GGUF files")
    if any(step["type"] != "Prepend" and not _writes_spaces(step) for step in _normalizers(content)):
        raise UnsupportedError("its tokenizer changes texts in a way that GGUF files have no form for")
    scores = [-float(len(model["merges"]))] * size
    for rank, merge in reversed(list(enumerate(model["merges"]))):
        scores[vocabulary["".join(_pair(merge))]] = -float(rank)
    normalizer, pre_tokenizer = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    begins = _has(normalizer, "Prepend") or pre_tokenizer.get("prepend_scheme", "never") != "never"
    return {"model": SENTENCE_PIECE, "pre": "default", "scores": scores, "add_space_prefix": begins}


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    """Return whether a step of a tokenizer writes spaces as sentencepiece does, and changes nothing else."""
    return step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE)


def _has(step: Mapping[str, Any] | None, kind: str) -> bool:
    """Return whether a step of a tokenizer, or a step within it, is of a kind."""
    if not step:
        return False
    inner = [each for key in ("pretokenizers", "normalizers") for each in step.get(key, ())]
    return step["type"] == kind or any(_has(each, kind) for each in inner)


def _surrounded(tokenizer: Any, begin: int | None, end: int | None) -> dict[str, Any]:
    """Return, as metadata, whether the tokenizer adds a token before, and one after, every text."""
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    is_begun, is_ended = whole[:1] != bare[:1], whole[-1:] != bare[-1:]
    if (is_begun and whole[0] != begin) or (is_ended and whole[-1] != end) or len(whole) != len(bare) + is_begun + is_ended:
        raise UnsupportedError("its tokenizer adds tokens to a text that GGUF files cannot say")
    return {f"{_PREFIX}add_bos_token": is_begun, f"{_PREFIX}add_eos_token": is_ended}
