"""The tokenizer, the chat template and the end tokens in the metadata of a GGUF file, as the files of a model directory.

They go through the checks of every other tokenizer when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.tokenizer_checks import MAX_TOKEN_LENGTH
from engine.errors import CheckpointError
from engine.families.gguf.splits import BYTE_LEVEL, NORMALIZED, SENTENCE_PIECE, SPLITS, WHOLE_TOKENS_FIRST
from engine.files.json_file import shown, write_json

NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""NAME in the metadata key `tokenizer.ggml.NAME_token_id`, by the special token's name in transformers."""
_ENDS = ("eos", "eot")
SPACE = "▁"
"""How sentencepiece writes a space."""
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that a text has whole; only the former may be left out of a text."""


def write_tokenizer(metadata: Mapping[str, Any], vocabulary: int, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, if the metadata has a vocabulary, and generation_config.json.

    Raises CheckpointError for metadata of another model and for tokenizers that are not known.
    """
    ids = special_tokens(metadata, vocabulary)
    ends = sorted({each for name in _ENDS if (each := ids[name]) is not None})
    named = {"bos_token_id": ids["bos"], "eos_token_id": ends or None, "pad_token_id": ids["padding"]}
    write_json(directory / "generation_config.json", {key: value for key, value in named.items() if value is not None})
    tokens = _strings(metadata, "tokens")
    if not tokens:
        return
    if len(tokens) > vocabulary:
        raise CheckpointError(f"the metadata has {len(tokens)} tokens and the model {vocabulary}; it is of another model")
    for token in tokens:
        if len(token) > MAX_TOKEN_LENGTH:
            raise CheckpointError(f"the token {shown(token)} has more than {MAX_TOKEN_LENGTH} characters")
    special = {name: tokens[each] for name, key in NAMED.items() if (each := ids[key]) is not None and each < len(tokens)}
    if len(set(tokens)) < len(tokens):
        raise CheckpointError("metadata: tokenizer.ggml.tokens has a token twice")
    _write_converted(metadata, tokens, special, directory)


def special_tokens(metadata: Mapping[str, Any], vocabulary: int) -> dict[str, int | None]:
    """Return the ids of special tokens, by name. Raises CheckpointError for one that the model does not have."""
    return {name: _token(metadata, name, vocabulary) for name in dict.fromkeys((*NAMED.values(), *_ENDS))}


def _token(metadata: Mapping[str, Any], name: str, vocabulary: int) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and not (type(found) is int and 0 <= found < vocabulary):
        raise CheckpointError(f"metadata: tokenizer.ggml.{name}_token_id is {shown(found)}, which is no token of the model")
    return found


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"metadata: tokenizer.ggml.{name} is not a list of texts")
    return found


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return None
    is_list = isinstance(found, list) and len(found) == count
    if not is_list or not all(type(each) in (int, float) for each in found):
        raise CheckpointError(f"metadata: tokenizer.ggml.{name} does not have one number for each of {count} tokens")
    return list(found)


def _write_converted(metadata: Mapping[str, Any], tokens: list[str], special: Mapping[str, str], directory: Path) -> None:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise CheckpointError(f"tokenizer.ggml.model is {shown(kind)}; {' and '.join(_BUILDERS)} are read")
    backend = _BUILDERS[kind](metadata, tokens)
    types = _numbers(metadata, "token_type", len(tokens)) or [0] * len(tokens)
    controls = [token for token, number in zip(tokens, types, strict=True) if number == CONTROL]
    given = [token for token, number in zip(tokens, types, strict=True) if number == USER_DEFINED]
    backend.add_special_tokens([_added(token, True) for token in dict.fromkeys((*controls, *special.values()))])
    backend.add_tokens([_added(token, False) for token in given if token not in special.values()])
    is_begun = kind == SENTENCE_PIECE or metadata.get("tokenizer.ggml.pre") in WHOLE_TOKENS_FIRST
    begins = metadata.get("tokenizer.ggml.add_bos_token", is_begun) is True
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) is True
    _surround(backend, special.get("bos_token") if begins else None, special.get("eos_token") if ends else None)
    template = metadata.get("tokenizer.chat_template")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    write_json(
        directory / "tokenizer_config.json", config | ({"chat_template": template} if isinstance(template, str) else {})
    )
    backend.save(str(directory / "tokenizer.json"))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Return the byte-level tokenizer. Raises CheckpointError if it is not known how it cuts a text, because other cuts give
    other tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {shown(name)}, which is not known; put the model's tokenizer.json and "
            "tokenizer_config.json beside the file"
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise CheckpointError(
            "metadata: tokenizer.ggml.merges is missing; put the model's tokenizer.json and tokenizer_config.json beside it"
        )
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "merges")]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise CheckpointError(f"metadata: tokenizer.ggml.merges has {shown(' '.join(wrong[0]))}, which is not a pair")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(merge[0], merge[1]) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=name in WHOLE_TOKENS_FIRST))
    if name in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Return a tokenizer as transformers converts it, with merges by the scores of the pieces.

    Spaces are as in sentencepiece and llama.cpp: one more is put before a text that begins with one.
    """
    from tokenizers import normalizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_conversion  # takes over a second

    found: dict[str, Any] = {"tokens": tokens, "scores": _numbers(metadata, "scores", len(tokens))}
    if found["scores"] is None:
        raise CheckpointError("metadata: tokenizer.ggml.scores is missing")
    if "tokenizer.ggml.merges" in metadata:
        found["merges"] = _strings(metadata, "merges")
    convert: Any = transformers_conversion.sentencepiece_tokenizer
    backend = convert(found).backend_tokenizer
    begins = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    prepended = [normalizers.Prepend(SPACE)] if begins else []
    backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    return backend


_BUILDERS: dict[Any, Callable[[Mapping[str, Any], list[str]], Any]] = {
    BYTE_LEVEL: _byte_level,
    SENTENCE_PIECE: _sentence_piece,
}


def _added(token: str, special: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(token, normalized=False, special=special)


def _surround(backend: Any, begin: str | None, end: str | None) -> None:
    """Add a token before and one after every text."""
    from tokenizers.processors import TemplateProcessing

    if begin is None and end is None:
        return
    pieces = [token for token in (begin, "$A", end) if token is not None]
    pair = [*pieces, *(f"{'$B' if piece == '$A' else piece}:1" for piece in pieces)]
    special = [(token, backend.token_to_id(token)) for token in {begin, end} if token is not None]
    backend.post_processor = TemplateProcessing(single=pieces, pair=pair, special_tokens=special)
