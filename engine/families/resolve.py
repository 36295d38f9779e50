"""Resolution of a config.json to a `DecoderConfig`: the family's row is found, and each of its parts resolves itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.architecture import Architecture
from engine.families.attention import Heads
from engine.families.block_configs import (
    block_config_counts,
    block_config_dense_width,
    block_config_shared_width,
    block_config_widths,
)
from engine.families.checks import check_flags, refuse_absurd, refuse_unsupported
from engine.families.classifiers import classified
from engine.families.config import DecoderConfig
from engine.families.encoder_decoders import ENCODER_DECODERS
from engine.families.layer_config import LayerConfig, MoeConfig
from engine.families.plain_config import read_plainly
from engine.families.table import ARCHITECTURES
from engine.families.values import flag, positive, with_floats
from engine.families.wrappers import WRAPPERS

_WITHHELD_KEYS = frozenset(["model_type", "auto_map", "block_configs", "quantization_config"])


def is_left_to_transformers(config: Mapping[str, Any]) -> bool:
    """Return whether a raw config of a family with a row asks for what transformers has and our decoder lacks.

    config: also that of a model around such a language model (WRAPPERS).
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    own: Any = config if wrapper is None else config.get(wrapper.config_key)
    row = ARCHITECTURES.get(str(own.get("model_type"))) if isinstance(own, Mapping) else None
    return row is not None and any(own.get(key) for key in row.left_to_transformers)


def runs_through_transformers(config: Mapping[str, Any]) -> bool:
    """Return whether transformers runs a decoder of a raw config: its family has no row, or is left to transformers."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or classified(config) is not None:
        return False
    return model_type not in {*ARCHITECTURES, *WRAPPERS, *ENCODER_DECODERS} or is_left_to_transformers(config)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the row for a raw config.json. Raises UnsupportedError naming an unknown family."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type; is this a Hugging Face checkpoint?")
    if model_type in ENCODER_DECODERS:
        raise UnsupportedError(
            f"model family {model_type!r} is an encoder-decoder, which this command does not take; `compress densify` makes "
            "mixtures of that kind dense, `compress export` writes ONNX graphs of them, and transformers runs them"
        )
    if (what := classified(config)) is not None:
        raise UnsupportedError(
            f"this {model_type!r} is a classifier of {what}, which this command does not take; distill, evaluate, bench, "
            "export and inspect do"
        )
    if model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"model family {model_type!r} is not supported; supported families: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def load_transformers_config(config: Mapping[str, Any], *, plainly: bool = False) -> Any:
    """Return the family's transformers config object for a raw config.json. Raises CheckpointError if it cannot be made.

    plainly: whether to return a PlainConfig instead, if the values can be resolved without transformers.
    """
    refuse_absurd(config)
    check_flags(config)
    row = ARCHITECTURES.get(config["model_type"])
    renamed = dict(config) if row is None else row.words.renamed(config)
    values = {key: with_floats(value) for key, value in renamed.items() if key not in _WITHHELD_KEYS}
    read_as = str((row and row.words.read_as) or config["model_type"])
    if plainly and (plain := read_plainly(read_as, values)) is not None:
        return plain
    from transformers import CONFIG_MAPPING  # takes over a second; most configs are read without it

    try:
        return CONFIG_MAPPING[read_as](**values)
    except Exception as error:  # transformers and huggingface_hub have exception classes of their own for validation
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"config.json cannot be read as a {config['model_type']} config: {reason}") from error


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Resolve a raw config.json. Raises UnsupportedError naming each attribute that the decoder cannot honor."""
    row = architecture_of(config)
    config = row.words.renamed(config)
    family = load_transformers_config(config, plainly=True)
    refuse_unsupported(row, config, family)
    counts = experts_per_layer(row, config, family)
    count = positive(family, "num_attention_heads")
    hidden = positive(family, "hidden_size")
    heads = row.attention.heads(config, family, hidden, count)
    positions, dense_positions = positive(family, "max_position_embeddings"), row.attention.dense_positions(family)
    rotated = heads.latent.rotary_dimension if heads.latent else row.rotation.dimension(family, heads.size)
    return DecoderConfig(
        architecture=row,
        vocabulary_size=positive(family, "vocab_size"),
        hidden_size=hidden,
        attention_heads=count,
        key_value_heads=heads.groups,
        head_dimension=heads.size,
        rotary_dimension=rotated,
        rotary_pairs=flag(row.rotation.pairs, family),
        latent=heads.latent,
        qk_norm=row.attention.norm(family),
        norm_epsilon=row.norms.epsilon(family),
        qkv_bias=flag(row.attention.qkv_bias, family),
        output_bias=flag(row.attention.output_bias, family),
        head_bias=flag(row.head.bias, family),
        clip_qkv=row.attention.clip(family),
        tied_embeddings=bool(family.tie_word_embeddings),
        max_positions=positions if dense_positions is None else min(positions, dense_positions),
        dense_positions=dense_positions,
        prediction_layers=row.prediction.number(family) if row.prediction else 0,
        layers=tuple(_layer_config(row, config, family, index, experts, heads) for index, experts in enumerate(counts)),
        multipliers=row.residual.multipliers(family),
        temperature=row.rotation.temperature(family),
        has_sinks=row.attention.has_sinks,
        output_gate=row.attention.has_output_gate,
        layer_norm=row.norms.layer_norm,
        zero_centered=row.norms.zero_centered,
        rope_mscales=row.rotation.has_mscales,
        transformers_config=family,
        value_norm=row.attention.has_value_norm,
        output_norms=row.residual.has_output_norms,
        logit_cap=row.head.logit_cap(family),
    )


def experts_per_layer(row: Architecture, config: Mapping[str, Any], family: Any) -> list[int]:
    """Return the number of routed experts per decoder layer, 0 for a dense layer."""
    layers, keys = positive(family, "num_hidden_layers"), row.count_keys
    if not keys:
        return [0] * layers
    declared = [config[key] for key in keys if isinstance(config.get(key), int)]
    if len(set(declared)) > 1:
        raise CheckpointError(f"config.json: {' and '.join(keys)} disagree: {declared}")
    experts, per_token = positive(family, keys[0]), positive(family, row.experts_per_token_key)
    if per_token > experts:
        raise CheckpointError(
            f"config.json: a token cannot use {per_token} of {experts} experts ({row.experts_per_token_key})"
        )
    counts = [experts if row.layers.holds_experts(family, index) else 0 for index in range(layers)]
    blocks = config.get("block_configs")
    return counts if blocks is None else block_config_counts(blocks, counts)


def _layer_config(
    row: Architecture, config: Mapping[str, Any], family: Any, index: int, experts: int, heads: Heads
) -> LayerConfig:
    moe = _moe_config(row, config, family, index, experts) if experts else None
    rotates, unit_norm = row.rotation.of_layer(family, index)
    window = row.attention.window.of_layer(family, index)
    linear = row.attention.linear(family, index, heads)
    residuals = row.residual.of_layer(family, linear is not None)
    dense_width = row.layers.ffn_width(family, index)
    if moe is None and dense_width and row.count_keys:
        dense_width = block_config_dense_width(config.get("block_configs"), index, dense_width)
    indexer = row.attention.indexer(family, index)
    own = row.attention.of_layer(family, index), row.rotation.kind(family, index)
    return LayerConfig(
        *(window, moe, dense_width, rotates, unit_norm, linear, residuals, indexer, *own),
        attends=row.layers.attends(family, index),
    )


def _moe_config(row: Architecture, config: Mapping[str, Any], family: Any, index: int, experts: int) -> MoeConfig:
    declared = row.experts.width_of(family, index, experts)
    width, widths = block_config_widths(config.get("block_configs"), index, experts, declared)
    moe = row.router.layer(config, family, index, experts, width)
    shared_width = row.shared.width_of(family, row.experts) if row.shared else 0
    shared_width = block_config_shared_width(config.get("block_configs"), index, shared_width)
    return replace(moe, expert_widths=widths, shared_width=shared_width, swiglu=row.experts.activation(family))
