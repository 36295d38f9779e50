"""Checks of the content of tokenizer.json before the tokenizers library reads it.

That library ends the process, or panics, on some contents: normalizers that double a text forty times, padding to 10¹²
tokens, a damaged character map. The limits here are well above the values in published tokenizers.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.regex_checks import MAX_PATTERN, problem_of_regex
from engine.errors import CheckpointError, CompressError, is_panic
from engine.files.json_file import MAX_JSON_BYTES, load_json, shown

MAX_DEPTH, MAX_STEPS = 8, 64
"""Limits on nested sequences and on all steps of one part, such as the normalizer. Published tokenizers have 2 and 10."""
MAX_GROWTH = 64
"""Limit on how many times longer one part may make a text. Published tokenizers: 12 (a prefix and a wider space)."""
MAX_TOKEN_LENGTH = 4_096
MAX_LENGTH = 1 << 24
"""Largest length in tokens for padding and truncation."""
MAX_WORD = 10_000
"""Longest word in characters for WordPiece, whose time is quadratic in this length."""
MAX_MAPPED_BYTES = 128
"""Longest text in bytes that a precompiled map may give one character; the longest in Unicode is 33."""
MAX_ADDED_TEXT = 4 << 20
"""Limit on the characters of all added tokens, which normalizers process too."""
MAX_PIECES = 64
"""Limit on the pieces of a template, and on the ids of one special token."""
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
OTHER_FILES = ("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")

Node = Mapping[str, Any]


class _Bad(Exception):
    """A problem in the file; the caller adds the file's name."""


@contextmanager
def tokenizing(directory: Path) -> Iterator[None]:
    """Turn any error that a damaged tokenizer raises in the body into a CheckpointError."""
    try:
        yield
    except CompressError:
        raise
    except BaseException as error:
        # tokenizers raises plain Exception; its panics are not subclasses of Exception.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{directory}: the tokenizer cannot be read: {reason}") from error


def check_tokenizer_files(directory: Path, vocabulary: int) -> None:
    """Raise CheckpointError for files that cannot belong to a tokenizer with `vocabulary` tokens."""
    for name in (*FILES, *OTHER_FILES):
        path = directory / name
        if path.is_file() and path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: tokenizer file is longer than {MAX_JSON_BYTES} bytes; fetch it again")
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    values = load_json(path, "tokenizer")
    try:
        check_tokenizer(values, vocabulary)
    except _Bad as error:
        raise CheckpointError(f"{path}: {error}; fetch the model's own tokenizer again") from error


def check_tokenizer(values: Node, vocabulary: int) -> None:
    """Raise _Bad, naming the problem, for content of tokenizer.json that cannot belong to such a tokenizer."""
    _check_model(values.get("model"), vocabulary)
    _check_added_tokens(values.get("added_tokens"), vocabulary)
    _check_normalizers(values.get("normalizer"))
    _check_pre_tokenizers(values.get("pre_tokenizer"))
    _check_decoders(values.get("decoder"))
    for step in _steps(values.get("post_processor"), "post_processor", "processors", POST_PROCESSORS):
        if step["type"] == "TemplateProcessing":
            _check_template(step, vocabulary)
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            for name in ("sep", "cls"):
                _check_pair(step.get(name), f"post_processor {step['type']}, {name}", vocabulary)
    _check_truncation(values.get("truncation"))
    _check_padding(values.get("padding"), vocabulary)


# Parts


NORMALIZERS = (
    *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace"),
    *("Strip", "StripAccents"),
)
PRE_TOKENIZERS = (
    *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split"),
    *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
)
DECODERS = ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")
POST_PROCESSORS = ("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")
GROWING_PRE_TOKENIZERS, MAX_GROWING = ("ByteLevel", "Metaspace"), 2


def _steps(node: Any, part: str, key: str, known: tuple[str, ...]) -> list[Node]:
    """Return all steps of a part, with sequences flattened."""
    found = list(_flattened(node, part, key, known, 0))
    if len(found) > MAX_STEPS:
        raise _Bad(f"{part} has {len(found)} steps, and at most {MAX_STEPS} are read")
    return found


def _flattened(node: Any, part: str, key: str, known: tuple[str, ...], depth: int) -> Iterator[Node]:
    if node is None:
        return
    if not isinstance(node, dict) or node.get("type") not in (*known, "Sequence"):
        kind = node.get("type") if isinstance(node, dict) else node
        raise _Bad(f"{part} has a step of type {shown(kind)}, which is not known")
    if node["type"] != "Sequence":
        yield node
        return
    inner = node.get(key)
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise _Bad(f"{part} has a Sequence whose {key} are not a list of steps")
    if depth >= MAX_DEPTH or len(inner) > MAX_STEPS:
        raise _Bad(f"{part} has sequences of more than {MAX_STEPS} steps, or more than {MAX_DEPTH} deep")
    for each in inner:
        yield from _flattened(each, part, key, known, depth + 1)


def _check_normalizers(node: Any) -> None:
    growth, maps = 1.0, 0
    for step in _steps(node, "normalizer", "normalizers", NORMALIZERS):
        growth *= _growth(step, "normalizer")
        if step["type"] == "Precompiled":
            maps += 1
            _check_charsmap(step.get("precompiled_charsmap"))
    if growth > MAX_GROWTH or maps > 1:
        raise _Bad(f"normalizer lengthens a text up to {growth:.0f} times, or has several character maps")


def _check_pre_tokenizers(node: Any) -> None:
    growing = 0
    for step in _steps(node, "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS):
        growing += step["type"] in GROWING_PRE_TOKENIZERS
        if step["type"] == "Split":
            _pattern_length(step.get("pattern"), "pre_tokenizer")
        if step["type"] == "FixedLength":
            _check_integer(step.get("length", 5), "pre_tokenizer FixedLength, length", 1, MAX_LENGTH)
    if growing > MAX_GROWING:
        raise _Bad(f"pre_tokenizer has {growing} steps that lengthen a text, and at most {MAX_GROWING} are read")


def _check_decoders(node: Any) -> None:
    growth = 1.0
    for step in _steps(node, "decoder", "decoders", DECODERS):
        growth *= _growth(step, "decoder")
        if step["type"] == "Strip":
            _check_integer(step.get("start"), "decoder Strip, start", 0, MAX_TOKEN_LENGTH)
            _check_integer(step.get("stop"), "decoder Strip, stop", 0, 0)  # otherwise the library panics on a shorter token
    if growth > MAX_GROWTH:
        raise _Bad(f"decoder lengthens a text up to {growth:.0f} times")


def _growth(step: Node, part: str) -> float:
    """Return an upper bound on how many times longer a step may make a text."""
    if step["type"] == "Prepend":
        return 1.0 + len(_text(step.get("prepend"), f"{part} Prepend").encode())  # for each piece between special tokens
    if step["type"] == "Replace":
        content, shortest = (
            _text(step.get("content"), f"{part} Replace").encode(),
            _pattern_length(step.get("pattern"), part),
        )
        return max(1.0, len(content) / shortest if shortest else 1.0 + len(content))
    return 1.0


def _pattern_length(pattern: Any, part: str) -> int:
    """Return the length in bytes of the shortest text that a pattern matches; 0 if unknown."""
    if not isinstance(pattern, dict) or len(pattern) != 1:
        raise _Bad(f"{part} has a pattern that is neither a String nor a Regex")
    ((kind, text),) = pattern.items()
    text = _text(text, f"{part}, pattern", MAX_PATTERN)
    if kind == "String":
        return len(text.encode())
    if kind != "Regex":
        raise _Bad(f"{part} has a pattern of kind {shown(kind)}")
    problem = problem_of_regex(text)
    if problem is not None:
        raise _Bad(f"{part} has the regular expression {shown(text)}, which {problem}")
    return 0


def _check_charsmap(text: Any) -> None:
    """Check a precompiled character map of sentencepiece: a double-array trie, and the replacement texts."""
    try:
        data = base64.b64decode(_text(text, "normalizer Precompiled", MAX_JSON_BYTES), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Bad("normalizer has a precompiled character map that is not base64") from error
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 0 < size <= len(data) - 4:
        raise _Bad("normalizer has a precompiled character map whose length is not that of its table")
    units, texts = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64), data[4 + size :]
    for start in _values(units).tolist():
        end = texts.find(b"\0", start)
        if start >= len(texts) or not 0 <= end - start <= MAX_MAPPED_BYTES or (texts[start] & 0xC0) == 0x80:
            raise _Bad("normalizer has a precompiled character map that leads out of its texts")
    try:
        texts.decode()
    except UnicodeDecodeError as error:
        raise _Bad("normalizer has a precompiled character map that is not UTF-8") from error


def _values(units: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of the replacement texts that a walk through the double array can reach.

    Raises _Bad if the walk can leave the array. A unit holds a label (8 bits, and bit 31 in units that are values), a
    flag for a following value (bit 8), and an offset.
    """
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    seen, found = np.zeros(len(units), dtype=bool), [np.zeros(0, dtype=np.int64)]
    front, labels = offsets[:1], np.arange(1, 256)
    while len(front):
        if int(front.max() | 0xFF) >= len(units):  # any byte may follow
            raise _Bad("normalizer has a precompiled character map that leads out of its table")
        seen[front] = True
        following = []
        for states in np.array_split(front, -(-len(front) // 1024)):
            places = states[:, None] ^ labels
            places = places[(units[places] & 0x800000FF) == labels]
            following.append(places)
        places = np.concatenate(following)
        reached = places ^ offsets[places]
        if len(reached) and int(reached.max()) >= len(units):
            raise _Bad("normalizer has a precompiled character map that leads out of its table")
        found.append(units[reached[(units[places] & (1 << 8)) != 0]] & 0x7FFFFFFF)
        front = np.unique(reached)
        front = front[~seen[front]]
    return np.unique(np.concatenate(found))


def _check_template(step: Node, vocabulary: int) -> None:
    where = "post_processor TemplateProcessing"
    special = step.get("special_tokens")
    if not isinstance(special, dict):
        raise _Bad(f"{where} has special_tokens that are not an object")
    for name, token in special.items():
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or len(ids) > MAX_PIECES:
            raise _Bad(f"{where}, special token {shown(name)}: ids are not a list of at most {MAX_PIECES}")
        for number in ids:
            _check_id(number, f"{where}, special token {shown(name)}", vocabulary)
    for form, allowed in (("single", ("A",)), ("pair", ("A", "B"))):
        pieces = step.get(form)
        if not isinstance(pieces, list) or len(pieces) > MAX_PIECES or not all(map(_is_piece, pieces)):
            raise _Bad(f"{where}, {form}: is not a list of at most {MAX_PIECES} sequences and special tokens")
        sequences = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        if len(set(sequences)) < len(sequences) or not set(sequences) <= set(allowed):
            raise _Bad(f"{where}, {form}: has a sequence twice, or one that is not an input")
        for piece in pieces:
            if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in special:
                raise _Bad(f"{where}, {form}: names {shown(piece['SpecialToken']['id'])}, which is not in special_tokens")


def _is_piece(piece: Any) -> bool:
    if not isinstance(piece, dict) or len(piece) != 1 or not set(piece) <= {"Sequence", "SpecialToken"}:
        return False
    (inner,) = piece.values()
    return isinstance(inner, dict) and isinstance(inner.get("id"), str)


def _check_pair(pair: Any, where: str, vocabulary: int) -> None:
    if not isinstance(pair, list) or len(pair) != 2:
        raise _Bad(f"{where}: is not a token and its id")
    _text(pair[0], where)
    _check_id(pair[1], where, vocabulary)


def _check_truncation(values: Any) -> None:
    if values is None:
        return
    if not isinstance(values, dict):
        raise _Bad("truncation is not an object")
    _check_integer(values.get("max_length"), "truncation, max_length", 0, MAX_LENGTH)
    _check_integer(values.get("stride", 0), "truncation, stride", 0, MAX_LENGTH)


def _check_padding(values: Any, vocabulary: int) -> None:
    if values is None:
        return
    if not isinstance(values, dict):
        raise _Bad("padding is not an object")
    strategy = values.get("strategy")
    if isinstance(strategy, dict):
        _check_integer(strategy.get("Fixed"), "padding, strategy Fixed", 0, MAX_LENGTH)
    if values.get("pad_to_multiple_of") is not None:
        _check_integer(values["pad_to_multiple_of"], "padding, pad_to_multiple_of", 0, MAX_LENGTH)
    _check_id(values.get("pad_id", 0), "padding, pad_id", vocabulary)
    _text(values.get("pad_token", ""), "padding, pad_token")


# The model, and tokens


def _check_model(model: Any, vocabulary: int) -> None:
    if not isinstance(model, dict):
        raise _Bad("model is not an object")
    kind = model.get("type", "BPE")  # old files have no type
    check = MODELS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise _Bad(f"model is of type {shown(kind)}; there are {', '.join(MODELS)}")
    check(model, vocabulary)


def _check_vocabulary(model: Node, vocabulary: int) -> Mapping[str, int]:
    tokens = model.get("vocab")
    if not isinstance(tokens, dict) or not tokens:
        raise _Bad("model has a vocab that is not an object of tokens")
    for token, number in tokens.items():
        if type(number) is not int or not 0 <= number < vocabulary or len(token) > MAX_TOKEN_LENGTH:
            _check_id(number, f"model, vocab, {shown(token)}", vocabulary)
            _text(token, "model, vocab")
    return tokens


def _check_bpe(model: Node, vocabulary: int) -> None:
    tokens = _check_vocabulary(model, vocabulary)
    _check_unknown(model, tokens, needed=False)
    prefix = model.get("continuing_subword_prefix")
    suffix = model.get("end_of_word_suffix")
    for name, value in (("continuing_subword_prefix", prefix), ("end_of_word_suffix", suffix)):
        if value is not None:
            _text(value, f"model, {name}")
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise _Bad("model has merges that are not a list")
    if prefix:
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            right = pair[-1] if isinstance(pair, list) and pair else None
            if not isinstance(right, str) or not right.startswith(prefix):  # the library cuts it off unchecked
                raise _Bad(f"model has the merge {shown(merge)}, whose second part lacks the prefix {shown(prefix)}")


def _check_unigram(model: Node, vocabulary: int) -> None:
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not 0 < len(pieces) <= vocabulary:
        raise _Bad(f"model has a vocab that is not a list of at most {vocabulary} pieces, as many as the model has")
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2 or type(piece[1]) not in (int, float):
            raise _Bad(f"model, vocab: {shown(piece)} is not a piece and its score")
        _text(piece[0], "model, vocab")
        if not math.isfinite(piece[1]):
            raise _Bad(f"model, vocab: {shown(piece)} has a score that is not finite")
    unknown = model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(pieces):
        raise _Bad(f"model has unk_id {shown(unknown)}, which is none of its {len(pieces)} pieces")


def _check_word_piece(model: Node, vocabulary: int) -> None:
    _check_unknown(model, _check_vocabulary(model, vocabulary), needed=True)
    _check_integer(model.get("max_input_chars_per_word", 100), "model, max_input_chars_per_word", 0, MAX_WORD)
    _text(model.get("continuing_subword_prefix", "##"), "model, continuing_subword_prefix")


def _check_word_level(model: Node, vocabulary: int) -> None:
    _check_unknown(model, _check_vocabulary(model, vocabulary), needed=True)


def _check_unknown(model: Node, tokens: Mapping[str, int], *, needed: bool) -> None:
    """Check the token for unknown characters; if it is missing, the library raises at the first such character."""
    unknown = model.get("unk_token")
    if (needed or unknown is not None) and (not isinstance(unknown, str) or unknown not in tokens):
        raise _Bad(f"model has unk_token {shown(unknown)}, which is not in its vocab")


MODELS: dict[str, Callable[[Node, int], None]] = {
    "BPE": _check_bpe,
    "Unigram": _check_unigram,
    "WordPiece": _check_word_piece,
    "WordLevel": _check_word_level,
}


def _check_added_tokens(tokens: Any, vocabulary: int) -> None:
    if tokens is None:
        return
    if not isinstance(tokens, list) or len(tokens) > vocabulary:
        raise _Bad(f"added_tokens are not a list of at most {vocabulary}, as many as the model has")
    for token in tokens:
        if not isinstance(token, dict):
            raise _Bad(f"added_tokens: {shown(token)} is not an object")
        content = _text(token.get("content"), "added_tokens, content")
        _check_id(token.get("id"), f"added_tokens, {shown(content)}", vocabulary)
    if sum(len(token["content"]) for token in tokens) > MAX_ADDED_TEXT:
        raise _Bad(f"added_tokens have more than {MAX_ADDED_TEXT} characters together")


def _check_id(number: Any, where: str, vocabulary: int) -> None:
    if type(number) is not int or not 0 <= number < vocabulary:
        raise _Bad(f"{where}: id {shown(number)} is not one of the model's {vocabulary} tokens")


def _check_integer(number: Any, where: str, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise _Bad(f"{where}: is {shown(number)} and must be an integer from {least} to {most}")


def _text(value: Any, where: str, longest: int = MAX_TOKEN_LENGTH) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise _Bad(f"{where}: {shown(value)} is not a text of at most {longest} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Bad(f"{where}: {shown(value)} is not valid Unicode") from error
    return value
