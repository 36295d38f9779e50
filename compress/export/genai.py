"""Files of the format onnx-genai: genai_config.json, and a check that onnxruntime-genai reads the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import ONNX_NAME
from engine.checkpoint.tokenizer import end_tokens
from engine.errors import OptionError, UnsupportedError
from engine.files.json_file import write_json
from engine.onnx.runtime import HEAD_MULTIPLE

FILE_NAME = "genai_config.json"


def check_genai(checkpoint: Checkpoint, portable: bool) -> None:
    """Raise an error where the graph cannot have the shared cache that onnxruntime-genai requires."""
    if portable:
        raise OptionError("format 'onnx-genai' needs operators of onnxruntime; leave out --experts portable")
    if checkpoint.config.latent is not None:
        raise UnsupportedError(
            f"{checkpoint.directory}: its latent attention caches no keys and values of heads, as onnx-genai's cache has; "
            "use --format onnx"
        )
    if checkpoint.config.head_dimension % HEAD_MULTIPLE:
        raise UnsupportedError(
            f"{checkpoint.directory}: its heads have {checkpoint.config.head_dimension} dimensions, and onnx-genai takes "
            f"multiples of {HEAD_MULTIPLE}; use --format onnx"
        )


def write_genai_config(checkpoint: Checkpoint, directory: Path) -> None:
    """Write names of the graph's inputs and outputs, sizes, special tokens, and greedy search over a shared cache."""
    config, family = checkpoint.config, checkpoint.config.transformers_config
    ends = sorted(end_tokens(checkpoint))
    first_end = ends[0] if ends else 0
    cache = {f"{when}_{part}_names": f"{name}.%d.{part}" for when, name in _CACHES.items() for part in ("key", "value")}
    decoder: dict[str, Any] = {
        "session_options": {"provider_options": []},
        "filename": ONNX_NAME,
        "head_size": config.head_dimension,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.attention_heads,
        "num_key_value_heads": config.key_value_heads,
        "num_hidden_layers": len(config.layers),
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"}
        | {name: pattern for name, pattern in cache.items() if name.startswith("past")},
        "outputs": {"logits": "logits"} | {name: pattern for name, pattern in cache.items() if name.startswith("present")},
    }
    model = {
        "type": "decoder",
        "bos_token_id": _token(family, "bos_token_id", first_end),
        "eos_token_id": ends if len(ends) > 1 else first_end,
        "pad_token_id": _token(family, "pad_token_id", first_end),
        "vocab_size": config.vocabulary_size,
        "context_length": config.max_positions,
        "decoder": decoder,
    }
    search = {"max_length": config.max_positions, "do_sample": False, "num_beams": 1, "past_present_share_buffer": True}
    write_json(directory / FILE_NAME, {"model": model, "search": search})


_CACHES = {"past": "past_key_values", "present": "present"}


def _token(family: Any, key: str, otherwise: int) -> int:
    value = getattr(family, key, None)
    return value if type(value) is int else otherwise


def tokenizer_problem(directory: Path) -> str | None:
    """Return why onnxruntime-genai cannot read the tokenizer, or None where it can.

    Generation from token ids needs no tokenizer. Raises UnsupportedError where onnxruntime-genai does not load the
    directory.
    """
    import onnxruntime_genai

    try:
        model = onnxruntime_genai.Model(str(directory))
    except Exception as error:  # the package raises errors of its own and plain RuntimeErrors
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(f"{directory}: onnxruntime-genai does not load it ({reason}); use --format onnx") from error
    try:
        onnxruntime_genai.Tokenizer(model)
    except Exception as error:
        return " ".join(str(error).split())[:200]
    return None
