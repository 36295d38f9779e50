"""config.json for smaller models, with other numbers of experts or dense; and the programs that load them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import UnsupportedError
from engine.families.architecture import Architecture
from engine.families.block_configs import block_config, has_expert_widths
from engine.families.config import DecoderConfig
from engine.families.encoder_decoders import ENCODER_DECODERS, EncoderDecoder
from engine.families.resolve import architecture_of, decoder_config, load_transformers_config
from engine.families.router import GATE_WIDTH_KEY
from engine.families.table import ARCHITECTURES
from engine.families.values import positive
from engine.files.json_file import shown

_EXPERT_NUMBERS = re.compile(r"^re:.*\\\.experts\\\.\(?\d")
"""A regular expression that names experts by their numbers (engine/checkpoint/pack_quantized.py)."""
_OF_ANOTHER = frozenset(["block_configs", "auto_map", "quantization_config", GATE_WIDTH_KEY])
"""Config keys that describe the source's weights and do not apply to a result."""


def with_experts(
    config: dict[str, Any],
    counts: list[int],
    groups: Mapping[int, Sequence[int]] | None = None,
    widths: Mapping[int, Sequence[int]] | None = None,
    common: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Return the config.json of the model with other expert counts and widths. A count of 0 means that the layer was dense
    and stays dense.

    counts: experts of each decoder layer. groups: the group of each expert, by layer, for layers that have groups.
    widths: the number of hidden units of each expert, by layer; None for the width that the family's own key says.
    common: the number of hidden units of the shared expert, or of the FFN of a dense layer, likewise.

    Uniform counts, also in all groups, and one width of all experts, of all shared experts and of all dense FFNs give a
    plain config of the family. All others add `block_configs`; the caller adds `auto_map`.
    """
    row, of_layers = architecture_of(config), groups or {}
    family = load_transformers_config(config, plainly=True)
    distinct = {count for count in counts if count}
    width, changed_width = _one_width(row, family, counts, widths or {}, common or {})
    changed = {key: value for key, value in row.words.renamed(config).items() if key not in _OF_ANOTHER}
    changed |= {"model_type": row.words.written_as or row.model_type} | without_prediction_layers(row)
    even = len(distinct) == 1 and _is_plain(row, max(distinct), row.router.group_count(family), of_layers.values())
    changed |= row.experts.with_counts(family, counts, width or row.experts.declared_width(family))
    changed |= changed_width
    changed |= row.router.with_counts(config, family, counts, even)
    if not even or width is None:
        own = {} if even else of_layers  # the family's own rule finds even groups
        each = {} if width is not None or widths is None else widths
        others = {} if width is not None or common is None else _other_than_declared(row, family, counts, common)
        changed["block_configs"] = [
            block_config(count, own.get(i), each.get(i, ()), others.get(i)) for i, count in enumerate(counts)
        ]
    return changed


def _one_width(
    row: Architecture,
    family: Any,
    counts: Sequence[int],
    widths: Mapping[int, Sequence[int]],
    common: Mapping[int, int],
) -> tuple[int | None, dict[str, Any]]:
    """Return the width of all experts, and the entries by which all other parts of the model have theirs.

    The width is None if experts, shared experts or dense FFNs differ in width, or if the family has one key for two widths.
    """
    declared = declared_width(row, family)
    every = {width for own in widths.values() for width in own} or {declared}
    own_common = _declared_common(row, family, counts) | dict(common)
    shared = {width for index, width in own_common.items() if counts[index]}
    dense = {width for index, width in own_common.items() if not counts[index]}
    if max(len(every), len(shared), len(dense)) > 1:
        return None, {}
    width, key = max(every), row.layers.dense_width
    changed = shared_entries(row, family, width, max(shared, default=0))
    if changed is None or (dense and key == row.experts.width and dense != {width}):
        return None, {}
    return width, changed | (dict.fromkeys([key], *dense) if dense - {getattr(family, key)} else {})


def _declared_common(row: Architecture, family: Any, counts: Sequence[int]) -> dict[int, int]:
    """Return the widths of shared experts and of dense FFNs that a config of the family says by its own keys, by layer."""
    shared = declared_shared_width(row, family)
    widths = (shared if count else row.layers.ffn_width(family, index) for index, count in enumerate(counts))
    return {index: width for index, width in enumerate(widths) if width}


def _other_than_declared(row: Architecture, family: Any, counts: Sequence[int], common: Mapping[int, int]) -> dict[int, int]:
    declared = _declared_common(row, family, counts)
    return {index: width for index, width in common.items() if width != declared[index]}


def declared_width(row: Architecture, family: Any) -> int:
    """Return the width of the experts that a config of the family says by its own key."""
    return row.experts.declared_width(family)


def declared_shared_width(row: Architecture, family: Any) -> int:
    """Return the width of the shared expert that a config of the family says by its own key; 0 if there is none."""
    return row.shared.width_of(family, row.experts) if row.shared else 0


def dense_width(row: Architecture, family: Any) -> tuple[str, int]:
    """Return the config key of the width of dense FFNs, and that width."""
    return row.layers.dense_width, positive(family, row.layers.dense_width)


def shared_entries(row: Architecture, family: Any, width: int, shared: int) -> dict[str, Any] | None:
    """Return the entries of a config by which the shared expert has `shared` hidden units, beside experts of `width`.

    None if no entries do.
    """
    return {} if row.shared is None else row.shared.with_width(family, row.experts, width, shared)


def width_entries(row: Architecture, family: Any, width: int, shared: int) -> dict[str, Any] | None:
    """Return the entries of a config by which experts have `width` hidden units and the shared expert has `shared`.

    None if no entries do.
    """
    others = shared_entries(row, family, width, shared)
    return None if others is None else {row.experts.width: width} | others


def with_prediction_layers(changed: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a changed config.json by which a model has as many layers for multi-token prediction as by `config`."""
    own = without_prediction_layers(architecture_of(config)).keys()
    others = {key: value for key, value in changed.items() if key not in own}
    return others | {key: config[key] for key in own if key in config}


def without_prediction_layers(row: Architecture) -> dict[str, Any]:
    """Return the entry of a config.json by which a model has no layers for multi-token prediction."""
    return {} if row.prediction is None else {row.prediction.count: 0}


def _is_plain(row: Architecture, experts: int, groups: int, of_layers: Iterable[Sequence[int]]) -> bool:
    """Return whether the family's own classes build layers of so many experts, whose groups are `of_layers`."""
    each, rest = divmod(experts, groups)
    even = [expert // max(each, 1) for expert in range(experts)]
    if rest or any(list(own) != even for own in of_layers):
        return False
    # transformers scores every group by its two best experts, also if all experts are one group.
    return each >= 2 or row.router.scores != "sigmoid" or not row.in_transformers


def otherwise_in_transformers(config: Mapping[str, Any]) -> str | None:
    """Return why transformers' class computes another function than the trained model, or None if it does not."""
    if not architecture_of(config).rotation.unknown_to_transformers:
        return None
    whole = decoder_config(config)
    if whole.rotary_dimension == whole.head_dimension:
        return None
    return f"its class rotates all of a head's {whole.head_dimension} dimensions, and this model {whole.rotary_dimension}"


def too_ragged_for_transformers(config: Mapping[str, Any], few_bits: bool = False) -> str | None:
    """Return why transformers cannot load experts whose widths differ within a layer, or None if it can.

    few_bits: whether the checkpoint has packed low-bit weights.
    """
    row = architecture_of(config)
    if not row.in_transformers or not has_expert_widths(config):
        return None
    differ = "experts of one layer differ in width, and transformers"
    if row.experts.names.stacks:
        return f"{differ} reads those of a {row.model_type} as one stack"
    return f"{differ} stacks low-bit ones of one width only" if few_bits else None


def mixes_bits(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes experts of one layer with different bits, by their numbers."""
    values = config.get("quantization_config")
    groups = values.get("config_groups") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(groups, dict):
        return False
    targets = [each for group in groups.values() if isinstance(group, dict) for each in group.get("targets") or ()]
    return any(_EXPERT_NUMBERS.search(str(each)) for each in (*targets, *(values.get("ignore") or ())))


def loading_note(config: Mapping[str, Any], few_bits: bool = False) -> str | None:
    """Return the programs that load a checkpoint with this config.json, as a clause; None if transformers loads it.

    few_bits: whether the checkpoint has packed low-bit weights, which are always stored one by one.
    """
    row = architecture_of(config)
    if few_bits and (row.experts.names.stacks or (row.shared and row.shared.stacks)):
        return f"only moe-compress loads it: experts of a {row.model_type} are stacked elsewhere, and here packed one by one"
    if (reason := too_ragged_for_transformers(config, few_bits)) is not None:
        return f"only moe-compress loads it: {reason}; what `compress prune --uniform` makes loads everywhere"
    if few_bits and mixes_bits(config):
        return (
            "only moe-compress loads it: experts of a layer have different bits, and other programs compute all experts of "
            "a layer with those of the first one"
        )
    if few_bits and not row.in_transformers:
        return f"only moe-compress loads it: transformers has no {row.model_type}"
    if (reason := otherwise_in_transformers(config)) is not None:
        return f"transformers loads another model: {reason}; moe-compress loads it as it was trained"
    if row.in_transformers:
        return None
    if "block_configs" in config or GATE_WIDTH_KEY in config:
        network = " and as many hidden units in every gate network" if row.router.names.hidden else ""
        return (
            f"only moe-compress loads it: transformers has no {row.model_type}, and the class that its authors publish "
            f"needs as many experts of one width in every layer{network}"
        )
    return f"transformers has no {row.model_type}: moe-compress loads it, and the class that its authors publish"


def check_onnx(config: DecoderConfig) -> None:
    """Raise UnsupportedError for a model that cannot be written as an ONNX graph."""
    row = config.architecture
    if row.onnx_obstacle is not None:
        raise UnsupportedError(f"a {row.model_type} cannot be exported: {row.onnx_obstacle}")


def as_dense(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Return the config.json of the dense sibling, with FFNs that are `width` wide.

    A family without a sibling keeps its own config, with one expert of that width in each MoE layer. Every token uses this
    expert with weight 1. This is as dense a model as the family's checkpoints can express.
    """
    row = architecture_of(config)
    if row.dense_sibling is None:
        counts = [int(layer.moe is not None) for layer in decoder_config(config).layers]
        plain = with_experts(config, counts, widths={index: [width] for index, count in enumerate(counts) if count})
        return plain | {"architectures": [row.causal_lm_class]}
    sibling, family = ARCHITECTURES[row.dense_sibling], load_transformers_config(config)
    kind = {"model_type": sibling.model_type, "architectures": [sibling.causal_lm_class], "intermediate_size": width}
    if (dense := sibling.layers.all_dense(family)) is not None:
        # The sibling is the mixture's own family, whose layers may all be dense.
        kept = {key: value for key, value in config.items() if key not in _OF_ANOTHER}
        return kept | kind | dense | without_prediction_layers(sibling)
    # The rotary parameters are always written whole, because old configs have them under other names.
    meant = family.to_dict()
    known, kept = _as_meant(config, meant, sibling.model_type, "rope_theta", "torch_dtype")
    kept["rope_parameters"] = meant["rope_parameters"]
    if known.get("head_dim") is not None and "head_dim" not in meant:
        kept["head_dim"] = decoder_config(config).head_dimension
    kept |= kind
    kept.setdefault("sliding_window", None)
    return kept


def _as_meant(
    config: Mapping[str, Any], meant: Mapping[str, Any], sibling: str, *others: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defaults of a sibling's config, and the entries that it needs to mean the same as this config.

    These entries are this config's values under keys of the sibling or `others`, and the defaults of this family where the
    sibling's defaults differ.
    """
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[sibling]().to_dict()
    kept = {key: value for key, value in config.items() if key in known or key in others}
    kept |= {key: meant[key] for key in known if key not in config and key in meant and meant[key] != known[key]}
    return known, kept


def as_dense_encoder_decoder(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Return the config.json of the dense sibling of an encoder-decoder mixture, with FFNs that are `width` wide.

    Raises UnsupportedError naming the settings that the sibling cannot express.
    """
    row = ENCODER_DECODERS[config["model_type"]]
    assert row.dense_sibling is not None
    sibling = ENCODER_DECODERS[row.dense_sibling]
    meant = load_transformers_config(config).to_dict()
    _refuse_what_has_no_place(row, sibling, config, meant)
    _, kept = _as_meant(config, meant, sibling.model_type, "torch_dtype")
    return kept | {
        # The sibling's own config does not have this key, but its models read it from there.
        "decoder_start_token_id": meant["decoder_start_token_id"],
        "model_type": sibling.model_type,
        "architectures": [sibling.model_class],
        row.width_key: width,
        sibling.activation_key: meant[row.activation_key],
    }


def _refuse_what_has_no_place(
    row: EncoderDecoder, sibling: EncoderDecoder, config: Mapping[str, Any], meant: Mapping[str, Any]
) -> None:
    from transformers.activations import ACT2FN

    activation, lacking = meant[row.activation_key], []
    for key in dict.fromkeys((row.activation_key, sibling.activation_key)):
        # Old configs have the sibling's key too. Both keys must name the same plain activation.
        if config.get(key, activation) != activation or activation not in ACT2FN or "-" in activation:
            lacking.append(f"{key}={shown(config.get(key, activation))}")
    if config.get("is_gated_act"):
        lacking.append("is_gated_act=true")
    if not meant["tie_word_embeddings"]:
        lacking.append(f"tie_word_embeddings=false (a {sibling.model_type} has no place for {row.head})")
    lacking += [f"no {key}" for key in ("pad_token_id", "decoder_start_token_id") if not isinstance(meant.get(key), int)]
    if lacking:
        raise UnsupportedError(
            f"config.json of this {row.model_type} asks for what a {sibling.model_type} made of it cannot have: "
            f"{', '.join(lacking)}; this model cannot be made dense"
        )
