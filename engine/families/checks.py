"""Checks of a config.json as a whole: unrealistic sizes, special tokens, and settings that the decoder cannot honor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.architecture import Architecture
from engine.families.plain_config import known_keys
from engine.files.json_file import shown

# Keys that a config.json may have without an effect on the decoder's results.
HARMLESS_KEYS = frozenset(
    [
        "auto_map",
        "block_configs",
        "quantization_config",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "router_jitter_noise",
        "output_router_logits",
        "router_aux_loss_coef",
        "initializer_range",
        "attention_dropout",
        "num_experts",
        "num_local_experts",
        "norm_topk_prob",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_type",
        "max_window_layers",
        "use_sliding_window",
        "sliding_window",
        "head_dim",
        "layer_types",
        "moe_layers",
        "unsloth_version",
        "_name_or_path",
        "architectures",
        "model_type",
        "num_labels",
        "id2label",
        "label2id",
    ]
)
_FLAGS = ("output_hidden_states", "output_attentions", "return_dict", "use_cache", "tie_word_embeddings", "is_decoder")
_COUNTS = frozenset(["num_labels", "n_layer", "num_experts_per_tok"])
_SIZES = (
    "_size",
    "_dim",
    "_heads",
    "_rank",
    "_width",
    "_channels",
    "_inner",
    "_embd",
    "d_model",
    "d_ff",
    "_groups",
    "_group",
)
MAX_HEAD, MAX_SIZE, MAX_NUMBER = 1 << 16, 1 << 24, (1 << 31) - 1
"""Maximum dimension of a head, maximum size of any other dimension, and maximum of any other integer in config.json."""
MAX_LIST = 10_000
"""Maximum length of lists. transformers makes lists as long as some keys of config.json say, and no real model needs
more."""


def refuse_absurd(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for unrealistic sizes, before transformers makes lists or tables of them."""
    pending: list[Any] = [config]
    while pending:
        found = pending.pop()
        for key, value in found.items() if isinstance(found, Mapping) else [(None, each) for each in found]:
            if isinstance(value, Mapping | list):
                pending.append(value)
            elif isinstance(value, int) and not -MAX_NUMBER <= value <= _most(key):
                where = "a number in a list" if key is None else key if key.isprintable() else shown(key)
                raise CheckpointError(f"config.json: {where} is {shown(value)}; that is no real model")


def _most(key: str | None) -> int:
    """Return the largest number that this key of config.json may have."""
    if key is None:
        return MAX_NUMBER
    if key in _COUNTS or (key.startswith("n") and key.endswith(("_layers", "_experts"))):
        return MAX_LIST
    if key.endswith("head_dim") or key in ("d_kv", "rotary_dim"):
        return MAX_HEAD
    return MAX_SIZE if key.endswith(_SIZES) else MAX_NUMBER


def check_flags(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for flags that are neither true nor false. transformers accepts any value for some of them."""
    for key in _FLAGS:
        if not isinstance(config.get(key), bool | None):
            raise CheckpointError(f"config.json: {key} is {shown(config[key])}; it must be true or false")


def check_token_ids(where: str, values: Mapping[str, Any], vocabulary: int) -> None:
    """Raise CheckpointError unless the special tokens of a config are in the vocabulary; -1 stands for no token."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and -1 <= token < vocabulary):
                raise CheckpointError(
                    f"{where}: {key} is {shown(value)}; it must be a token below {vocabulary}, or a list of tokens"
                )


def refuse_unsupported(row: Architecture, config: Mapping[str, Any], family: Any) -> None:
    """Raise UnsupportedError naming every setting of the config that the decoder cannot honor."""
    if lacking := [*_lacking(row, config, family)]:
        raise UnsupportedError(
            f"config.json of this {row.model_type} asks for what the engine does not have: {', '.join(lacking)[:500]}; "
            "remove it only if it has no effect on this model"
        )


def _lacking(row: Architecture, config: Mapping[str, Any], family: Any) -> Iterator[str]:
    if (act := getattr(family, "hidden_act", "silu")) not in ("silu", "swish"):
        yield f"hidden_act={act!r}"
    if getattr(family, "mlp_bias", False):
        yield "mlp_bias=true"
    yield from row.rotation.lacking(family)
    yield from row.attention.lacking(family)
    for key, honored in row.all_settings.items():
        values = config[key] if isinstance(config.get(key), list) else [config.get(key)]
        is_said = key in config or row.words.renames  # the authors' keys have defaults of their own
        if honored is not None and is_said and any(value not in honored for value in values):
            yield f"{key}={config.get(key)!r}"
    known = known_keys(family) | HARMLESS_KEYS | set(row.all_settings) | row.reads
    yield from (f"{key}={config[key]!r}" for key in config if key not in known and config[key] not in (None, False))
