"""The tokenizer, the chat template and the end tokens in the metadata of a GGUF file, as the files of a model directory.

transformers converts the vocabulary. Its result is written, so that it goes through the checks of every other tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.tokenizer_checks import MAX_TOKEN_LENGTH
from engine.errors import CheckpointError
from engine.files.json_file import shown, write_json

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The part of the metadata's key, by the name of the special token."""
_ENDS = ("eos", "eot")
_BYTE_LEVEL, _SENTENCE_PIECE = "gpt2", "llama"
_PLAIN_SPLITS = frozenset(["gpt-2", "gpt2", "olmo", "phi-2", "jais", "mpt"])
"""Values of `tokenizer.ggml.pre` that mean the first byte-level pre-tokenizer, without a pattern of its own."""
_DIGITS_ALONE = frozenset(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"])
"""Values that mean the same one after each digit was split off."""
_SAME_SPLIT = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "stablelm2": "qwen2"}
"""Values for which transformers lacks a pattern, by one with the same pattern."""


def write_tokenizer(metadata: Mapping[str, Any], vocabulary: int, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, if the metadata has a vocabulary, and generation_config.json.

    Raises CheckpointError for metadata of another model and for tokenizers that are not known.
    """
    ids = {name: _token(metadata, name, vocabulary) for name in (*_NAMED.values(), *_ENDS)}
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
    special = {name: tokens[each] for name, key in _NAMED.items() if (each := ids[key]) is not None and each < len(tokens)}
    _write_converted(metadata, tokens, special, directory)


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
    from transformers import PreTrainedTokenizerFast  # here and below: transformers takes over a second
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
    if kind not in (_BYTE_LEVEL, _SENTENCE_PIECE):
        raise CheckpointError(f"tokenizer.ggml.model is {shown(kind)}; {_BYTE_LEVEL} and {_SENTENCE_PIECE} are read")
    found: dict[str, Any] = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": _SAME_SPLIT.get(str(split), split),
        "tokens": tokens,
        "scores": _numbers(metadata, "scores", len(tokens)),
        "token_type": _numbers(metadata, "token_type", len(tokens)),
    }
    if "tokenizer.ggml.merges" in metadata:
        found["merges"] = _strings(metadata, "merges")
    backend: Any = convert_gguf_tokenizer(str(metadata.get("general.architecture")), found)[0]
    if kind == _BYTE_LEVEL:
        _split_as(backend, str(split))
    adds_begin = metadata.get("tokenizer.ggml.add_bos_token", kind == _SENTENCE_PIECE)
    adds_end = metadata.get("tokenizer.ggml.add_eos_token", False)
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(
        tokenizer_object=backend,
        **special,
        add_bos_token=adds_begin is True and "bos_token" in special,
        add_eos_token=adds_end is True and "eos_token" in special,
        clean_up_tokenization_spaces=False,
    )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def _split_as(backend: Any, split: str) -> None:
    """Set how text is cut before merging, where transformers has no pattern for it.

    Raises CheckpointError for a value whose meaning is not known, because other cuts give other tokens.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in _PLAIN_SPLITS:
        backend.pre_tokenizer = bytes_alone
    elif split in _DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])
    elif _SAME_SPLIT.get(split, split) not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {shown(split)}, which is not known; put the model's tokenizer.json and "
            "tokenizer_config.json beside the file"
        )
