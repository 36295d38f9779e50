"""The models that transformers can build for us: their classes, and why a model has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.adapted.interface_families import classes_of, has_interface
from engine.checkpoint.pack_quantized import CONFIG_KEY, schemes_of
from engine.errors import UnsupportedError
from engine.families.table import ARCHITECTURES
from engine.files.json_file import shown


def check_known(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a model whose code or weights transformers cannot give us."""
    from transformers import CONFIG_MAPPING, __version__

    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        what = (
            f"model family {shown(model_type)} has no row of its own here, and transformers {__version__} does not know it"
        )
        if raw.get("auto_map"):
            raise UnsupportedError(
                f"{what}: its code lies beside the weights (trust_remote_code), and such code is never run; convert the "
                "model to a family of transformers, or wait for a release that has it"
            )
        raise UnsupportedError(f"{what}; a newer release of transformers may")
    if not has_interface(str(model_type)):
        raise UnsupportedError(
            f"model family {shown(model_type)} has no experts with the interface of transformers' stacked experts; "
            f"supported families: {', '.join(sorted(ARCHITECTURES))}, and those of transformers with that interface"
        )
    parts = [part for part in raw.values() if isinstance(part, dict)]
    is_packed = bool(schemes_of(raw)) and not any(part.get(CONFIG_KEY) for part in parts)
    if not is_packed and any(part.get(CONFIG_KEY) for part in (raw, *parts)):
        raise UnsupportedError(
            f"config.json of this {model_type} has a quantization_config, and quantized weights are read for families "
            f"with a row only ({', '.join(sorted(ARCHITECTURES))}); take the model before it was quantized"
        )


def model_class_of(raw: Mapping[str, Any]) -> Any:
    """Return transformers' class of the model: the one that config.json names, else the first that reads text."""
    import transformers

    named = raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for name in (*names, *classes_of(raw["model_type"])):
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.can_generate():
            return found
    raise UnsupportedError(
        f"no class of transformers for a model of the family {raw['model_type']} reads text and returns logits"
    )
