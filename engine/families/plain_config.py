"""Resolution of a family's config.json without transformers, whose import takes over a second and needs torch.

config_fields.json records the fields of transformers' config classes, with their defaults and types, for each model_type
that our families are read as. `read_plainly` fills in the missing values in the way of those classes. It accepts plain
values only: it returns None for any value that is unknown, unusual, of another type or refused by transformers. The caller
then asks transformers, so that one place decides what is refused and with which message. `python -m
engine.families.plain_config` records the fields again, from the installed transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORD = Path(__file__).with_name("config_fields.json")
DTYPES = ("float32", "bfloat16", "float16", "float64")
_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
_ROPE_KEYS = frozenset(["rope_type", "rope_theta", "partial_rotary_factor"])
_SPECIAL = frozenset(["attn_implementation", "experts_implementation", "mlp_layer_types", "mtp_layer_types"])
"""Keys that transformers handles specially without declaring them."""
_LAYER_TYPES = (
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
    *("conv", "indexed_attention"),
)
_MISTRAL_TOKENS = 100_000


class _Unusual(Exception):
    """Raised for a config that only transformers can interpret."""


class PlainConfig(SimpleNamespace):
    """The values of a config, as attributes with the names of transformers' config classes.

    `read_as` is the model_type of the represented class.
    """

    def __init__(self, model_type: str, values: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        super().__init__(**values)
        self.read_as, self._aliases = model_type, aliases

    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("_aliases", {}).get(name)
        if own is None or own not in vars(self):
            raise AttributeError(name)
        return vars(self)[own]


def read_plainly(model_type: str, config: Mapping[str, Any]) -> PlainConfig | None:
    """Return the values of a config.json, without its model_type, for a model_type of transformers.

    The result is None if only transformers can interpret or refuse them.
    """
    if model_type not in _FINISHED or model_type not in _record()["families"]:
        return None
    record = _record()["families"][model_type]
    fields, aliases = record["fields"], record["aliases"]
    try:
        values = {name: _checked(config.get(name, default), default, types) for name, (default, types) in fields.items()}
        extras = {key: value for key, value in config.items() if key not in fields}
        _check_extras(extras)
        for finish in _FINISHED[model_type]:
            finish(values, extras)
        values["rope_parameters"] = _rope(values["rope_parameters"], extras, record)
        held = {aliases.get(key, key): value for key, value in values.items() if key != "dtype"}
        held |= {aliases.get(key, key): value for key, value in extras.items() if key not in _record()["dropped"]}
        _check_whole(SimpleNamespace(**held))
    except _Unusual:
        return None
    return PlainConfig(model_type, held, aliases)


def has_generic_tokenizer(family: PlainConfig) -> bool:
    """Return whether transformers loads the generic class if this family's tokenizer_config.json names that class."""
    return bool(_record()["families"][family.read_as]["generic_tokenizer"])


def may_be_corrected(family: PlainConfig, tokens: int) -> bool:
    """Whether transformers looks for a wrong expression in a tokenizer of this family with so many tokens."""
    return family.read_as == "mistral" and tokens > _MISTRAL_TOKENS


def known_keys(family: Any) -> frozenset[str]:
    """Return the keys that a family's config class writes by default. family: a PlainConfig or transformers' object."""
    if isinstance(family, PlainConfig):
        return frozenset(_record()["families"][family.read_as]["known"])
    return frozenset(type(family)().to_dict())


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def _checked(value: Any, default: Any, types: str) -> Any:
    """Return a field's value if it is the default or has exactly one of the field's types."""
    if type(value) is type(default) and value == default:
        return value
    if types == "dtype" and value in DTYPES:
        return value
    if types == "rope" and type(value) is dict:
        return value
    if not any(type(value) is _TYPES.get(name) or _is_list_of(name, value) for name in types.split(" | ")):
        raise _Unusual
    return value


def _is_list_of(name: str, value: Any) -> bool:
    if not (name.startswith("list[") and type(value) is list):
        return False
    return all(type(each) is _TYPES[name[len("list[") : -1]] for each in value)


def _check_extras(extras: Mapping[str, Any]) -> None:
    """Accept keys that the class does not declare, if the class only stores them."""
    for key in extras:
        has_meaning = key in _record()["reserved"] or key in _SPECIAL or key.startswith("_") or not key.isidentifier()
        if has_meaning and not _is_known(key, extras[key]):
            raise _Unusual


def _is_known(key: str, value: Any) -> bool:
    """Return whether a key that the classes handle specially is handled here too."""
    if key == "torch_dtype":
        return value in DTYPES
    return key in ("rope_scaling", "_name_or_path") or (key == "output_attentions" and value is False)


def _rope(given: dict[str, Any] | None, extras: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of plain rotary embeddings. transformers resolves all other kinds.

    Some families have parameters for images, which change nothing where all positions are those of text.
    """
    given = extras.pop("rope_scaling", None) or given
    theta, share = extras.pop("rope_theta", record["theta"]), extras.pop("partial_rotary_factor", None)
    if not given:
        given = (
            {"rope_theta": theta} | ({} if share is None else {"partial_rotary_factor": share}) | {"rope_type": "default"}
        )
    # transformers adds missing entries to the dict of config.json itself, which is written to results.
    whole = {"rope_type", "rope_theta"} | (set() if share is None else {"partial_rotary_factor"})
    if type(given) is not dict or not whole <= given.keys() <= {*_ROPE_KEYS, *record["rope_of_images"]}:
        raise _Unusual
    numbers = [given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given]
    if given["rope_type"] != "default" or any(type(each) not in (int, float) or not each > 0 for each in numbers):
        raise _Unusual
    return given


def _check_whole(held: SimpleNamespace) -> None:
    """Raise _Unusual for configs that the validators of transformers refuse or warn about."""
    sizes = (held.vocab_size, held.hidden_size, held.num_hidden_layers, held.num_attention_heads)
    if min(sizes) < 1:
        raise _Unusual
    head = getattr(held, "head_dim", None)
    if head is not None and (type(head) is not int or head < 1 or head % 2):
        raise _Unusual
    kinds = getattr(held, "layer_types", None)
    if kinds is not None and not _are_layer_types(kinds, held.num_hidden_layers):
        raise _Unusual
    for key, value in vars(held).items():
        if key.endswith("_token_id") and isinstance(value, int) and not 0 <= value < held.vocab_size:
            raise _Unusual


def _are_layer_types(kinds: Any, layers: int) -> bool:
    return isinstance(kinds, list) and len(kinds) == layers and all(kind in _LAYER_TYPES for kind in kinds)


# Fields that the classes derive from other fields. Each function changes the fields in place, before other keys are added.

_Finish = Callable[[dict[str, Any], dict[str, Any]], None]


def _key_value_heads(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]


def _head_dimension(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // max(1, values["num_attention_heads"])


def _heads_divide(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["hidden_size"] % max(1, values["num_attention_heads"]):
        raise _Unusual


def _latent_heads(values: dict[str, Any], extras: dict[str, Any]) -> None:
    values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    values["head_dim"] = values["qk_rope_head_dim"]


def _no_dense_list(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["mlp_only_layers"] is None:
        values["mlp_only_layers"] = []


def _no_window(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["use_sliding_window"]:
        raise _Unusual
    values["sliding_window"] = None


def _window_of_zero(values: dict[str, Any], extras: dict[str, Any]) -> None:
    _no_window(values, extras)
    values["sliding_window"] = 0


def _full_layers(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["layer_types"] is None:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]


def _layers_in_turns(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["layer_types"] is None:
        kinds = ("full_attention", "linear_attention")
        values["layer_types"] = [kinds[layer % 2] for layer in range(values["num_hidden_layers"])]


def _every_nth_layer_full(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["layer_types"] is None:
        interval = extras.pop("full_attention_interval", 4)
        if type(interval) is not int or interval < 1:
            raise _Unusual
        kinds = ("full_attention", "linear_attention")
        values["layer_types"] = [kinds[bool((layer + 1) % interval)] for layer in range(values["num_hidden_layers"])]


def _quarter_rotates(values: dict[str, Any], extras: dict[str, Any]) -> None:
    extras.setdefault("partial_rotary_factor", 0.25)


def _half_rotates(values: dict[str, Any], extras: dict[str, Any]) -> None:
    extras.setdefault("partial_rotary_factor", 0.5)


def _rotated_dimensions(values: dict[str, Any], extras: dict[str, Any]) -> None:
    dimension = extras.get("rotary_dim")
    if dimension is not None:
        if type(dimension) is not int or not values["head_dim"]:
            raise _Unusual
        extras.setdefault("partial_rotary_factor", dimension / values["head_dim"])


def _last_moe_layer(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if values["moe_layer_end_index"] == -1:
        values["moe_layer_end_index"] = values["num_hidden_layers"] - 1


def _first_dense(values: dict[str, Any], extras: dict[str, Any]) -> None:
    kinds, layers = values["mlp_layer_types"], values["num_hidden_layers"]
    if kinds is None:
        values["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    elif len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise _Unusual


def _several_dense(values: dict[str, Any], extras: dict[str, Any]) -> None:
    first, layers = values["first_k_dense_replace"], values["num_hidden_layers"]
    if first < 0 or "num_experts" in extras:
        raise _Unusual
    if values["mlp_layer_types"] is None:
        values["mlp_layer_types"] = ["dense"] * min(first, layers) + ["sparse"] * (layers - min(first, layers))
    _first_dense(values, extras)


def _indexed_layers(values: dict[str, Any], extras: dict[str, Any]) -> None:
    _latent_heads(values, extras)
    if values["layer_types"] is None:
        values["layer_types"] = ["indexed_attention"] * values["num_hidden_layers"]


def _own_indexers(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"} & extras.keys():
        raise _Unusual
    if values["indexer_types"] is None:
        values["indexer_types"] = ["full"] * values["num_hidden_layers"]


def _whole_heads(values: dict[str, Any], extras: dict[str, Any]) -> None:
    values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]


def _tied_by_default(values: dict[str, Any], extras: dict[str, Any]) -> None:
    tied = extras.pop("tie_embedding", values["tie_word_embeddings"])
    if type(tied) is not bool:
        raise _Unusual
    values["tie_word_embeddings"] = tied


def _no_layer_types(values: dict[str, Any], extras: dict[str, Any]) -> None:
    if "layer_types" in extras:
        raise _Unusual


_FINISHED: dict[str, tuple[_Finish, ...]] = {
    "deepseek_v2": (_heads_divide, _key_value_heads, _latent_heads),
    "deepseek_v3": (_key_value_heads, _latent_heads),
    "deepseek_v32": (_indexed_layers, _several_dense),
    "ernie4_5": (_key_value_heads, _head_dimension),
    "ernie4_5_moe": (_last_moe_layer,),
    "glm4_moe": (_half_rotates,),
    "glm4_moe_lite": (_first_dense, _whole_heads),
    "glm_moe_dsa": (_indexed_layers, _several_dense, _own_indexers),
    "granite": (_key_value_heads,),
    "granitemoe": (_key_value_heads,),
    "granitemoeshared": (_key_value_heads,),
    "lfm2_moe": (_tied_by_default,),
    "llama": (_heads_divide, _head_dimension, _key_value_heads),
    "minimax": (_key_value_heads, _layers_in_turns),
    "minimax_m2": (_rotated_dimensions,),
    "mistral": (_head_dimension, _key_value_heads, _no_layer_types),
    "mixtral": (_key_value_heads,),
    "olmoe": (_key_value_heads,),
    "phimoe": (_key_value_heads,),
    "qwen2": (_no_window, _key_value_heads, _full_layers),
    "qwen2_moe": (_no_dense_list, _window_of_zero, _full_layers),
    "qwen3": (_no_window, _key_value_heads, _full_layers),
    "qwen3_moe": (_no_window, _no_dense_list),
    "qwen3_5_moe_text": (_quarter_rotates, _every_nth_layer_full),
    "qwen3_5_text": (_quarter_rotates, _every_nth_layer_full),
    "qwen3_next": (_quarter_rotates, _no_dense_list, _every_nth_layer_full),
}
"""The families that are read here, by transformers' model_type. transformers resolves all others."""


def recorded() -> dict[str, Any]:
    """Return the content of config_fields.json: the fields of the config classes of the installed transformers."""
    from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
    from transformers.models.auto import tokenization_auto

    classes, wrong = tokenization_auto.TOKENIZER_MAPPING_NAMES, tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    generic = {name for name in _FINISHED if name not in wrong or classes.get(name) == "TokenizersBackend"}
    generation = sorted(GenerationConfig._get_default_generation_params())
    return {
        "dropped": [*generation, "_name_or_path", "output_attentions", "torch_dtype"],
        "reserved": sorted(name for name in dir(PreTrainedConfig) if not name.startswith("_")),
        "families": {
            name: _fields_of(CONFIG_MAPPING[name]) | {"generic_tokenizer": name in generic} for name in sorted(_FINISHED)
        },
    }


def _fields_of(family: Any) -> dict[str, Any]:
    from dataclasses import fields

    return {
        "theta": family.default_theta,
        "rope_of_images": sorted(family.ignore_keys_at_rope_validation),
        "aliases": family.attribute_map,
        "known": sorted(family().to_dict()),
        "fields": {field.name: [field.default, _types_of(field)] for field in fields(family)},
    }


def _types_of(field: Any) -> str:
    """Return a field's types, or an empty text for a field that is read here only if it has its default."""
    if field.name in ("rope_parameters", "dtype"):
        return "rope" if field.name == "rope_parameters" else "dtype"
    name = field.type.__name__ if isinstance(field.type, type) and not hasattr(field.type, "__args__") else str(field.type)
    known = all(each.removeprefix("list[").removesuffix("]") in _TYPES for each in name.split(" | "))
    return name if known and not field.metadata else ""


if __name__ == "__main__":
    text = json.dumps(recorded(), indent=1)
    RECORD.write_text(re.sub(r"\[\s*([^\[\]{}]*?)\s*\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
