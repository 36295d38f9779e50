"""Checks and choices of options before a model is opened: dtypes, devices, drafts, and room for the text."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import check_same_tokens
from engine.decoder.kv_cache import KV_CACHE_DTYPES
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.generation.prediction_draft import check_predicts
from engine.onnx.runtime import backend_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the compute dtype; `auto` is the checkpoint's own. Raises OptionError for an unsupported dtype."""
    if name != "auto" and name not in DTYPES:
        raise OptionError(f"dtype {name!r} is not known; choose auto, {', '.join(DTYPES)}")
    dtype = checkpoint.model_dtype if name == "auto" else DTYPES[name]
    if dtype not in (*DTYPES.values(), torch.float64):
        raise OptionError(f"{checkpoint.directory} is stored in {dtype}; choose a dtype: {', '.join(DTYPES)}")
    return dtype


def cpu_only(checkpoint: AdaptedCheckpoint, device: str) -> torch.device:
    """Return the device of a model that transformers runs. Raises OptionError for any but the CPU."""
    if device not in ("auto", "cpu"):
        raise OptionError(
            f"{checkpoint.directory}: a model of the family {checkpoint.model_type} runs through transformers here, on the "
            f"CPU only; device is {device!r}, choose auto or cpu"
        )
    return AdaptedDecoder.device


def resolve_kv_cache_dtype(name: str, computed: torch.dtype, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the KV cache; `auto` is the compute dtype.

    Raises OptionError for an unknown dtype, and for any but `auto` with a cache of transformers.
    """
    if name == "auto":
        return computed
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise OptionError(
            f"{checkpoint.directory}: transformers keeps the cache of a model of the family {checkpoint.model_type} in the "
            "compute dtype; leave the KV cache dtype at auto"
        )
    if name not in KV_CACHE_DTYPES:
        raise OptionError(f"KV cache dtype {name!r} is not known; choose auto, {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[name]


def check_pair(target: Path, draft: Path | None) -> None:
    """Raise OptionError unless `draft`, or for None the model's own layers, can draft for `target`."""
    for directory in (target,) if draft is None else (target, draft):
        if backend_of(directory, "auto") == "onnx":
            raise OptionError(f"{directory}: is an exported model, and drafting needs checkpoints; give both as such")
        checkpoint = open_mixture_checkpoint(directory)
        if isinstance(checkpoint, AdaptedCheckpoint):
            raise OptionError(
                f"{directory}: transformers runs a model of the family {checkpoint.model_type} here, and its cache cannot "
                "undo tokens, which drafting requires; leave out the draft"
            )
        if checkpoint.config.linear_layers:
            raise OptionError(
                f"{directory}: layers with a state cannot undo tokens, which drafting requires; leave out the draft"
            )
    if draft is None:
        check_predicts(Checkpoint(target), target)
    else:
        check_same_tokens(Checkpoint(target), Checkpoint(draft))


def check_room(prompt_tokens: int, max_new_tokens: int, config: DecoderConfig, name: str) -> None:
    """Raise OptionError unless a prompt and its new tokens fit into a model. name: the model's, in the message."""
    if max_new_tokens < 1:
        raise OptionError(f"the number of new tokens is {max_new_tokens}; it must be at least 1")
    if (asked := prompt_tokens + max_new_tokens) > config.max_positions:
        raise OptionError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones make {asked}, and {name} has "
            f"{config.max_positions} positions{config.why_no_more}; shorten the prompt or ask for fewer tokens"
        )
