"""A model's description in a GGUF file, read back before anything is written: what such a file cannot say is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from engine.errors import UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.gguf.family import GgufFamily
from engine.families.gguf.metadata import Facts
from engine.families.gguf.names import StoredTensor, stored_tensors
from engine.families.gguf.table import family_to_write, gguf_family
from engine.families.resolve import decoder_config

_FLOAT32 = 1e-6
"""Relative difference of a number that was rounded to float32."""
_UNIFORM = "prune the model with --uniform, or write it as safetensors"


@dataclass(frozen=True)
class Description:
    """The content of a GGUF file of a model, without the tokenizer and the numbers."""

    family: GgufFamily
    metadata: Mapping[str, Any]
    tensors: list[StoredTensor]


def described(config: DecoderConfig) -> Description:
    """Return the description of a model. Raises UnsupportedError for what a GGUF file of its family cannot say."""
    family = family_to_write(config)
    check_uniform(config)
    tensors = stored_tensors(config, family)
    constants = family.constants(config)
    facts = Facts(family.metadata(config), {tensor.name: tensor.shape for tensor in tensors}, constants.__getitem__)
    _check_read_back(config, family, facts)
    return Description(family, facts.metadata, tensors)


def check_uniform(config: DecoderConfig) -> None:
    """Raise UnsupportedError if layers or experts differ in what a GGUF file says once for all of them."""
    moes = [layer.moe for layer in config.layers if layer.moe is not None]
    _check_one("numbers of experts", (moe.experts for moe in moes))
    _check_one("widths of experts", (width for moe in moes for width in moe.widths))
    _check_one("widths of shared experts", (moe.shared_width for moe in moes))
    _check_one("widths of dense FFNs", (layer.dense_width for layer in config.layers if layer.moe is None and layer.feeds))


def _check_one(what: str, numbers: Iterable[int]) -> None:
    found = sorted(set(numbers))
    if len(found) > 1:
        shown = ", ".join(map(str, found[:4])) + (", …" if len(found) > 4 else "")
        raise UnsupportedError(f"the model has several {what} ({shown}), and a GGUF file has one; {_UNIFORM}")


def _check_read_back(config: DecoderConfig, family: GgufFamily, facts: Facts) -> None:
    """Raise UnsupportedError unless the description is read as this config."""
    from engine.families.rotary_embedding import Rotary  # here: it imports torch

    found = gguf_family(facts)
    read = decoder_config(found.config(facts))
    read = replace(read, prediction_layers=config.prediction_layers)  # such layers are never written
    if family.read_as is not None:
        read = replace(read, architecture=config.architecture)
    name = first_difference(config, read)
    if name is None:
        import torch

        position, turns = torch.tensor([[1]]), list[list[torch.Tensor]]()
        for rotary in map(Rotary, (config, read)):
            kinds = rotary.of_kinds(position, torch.float32).values()
            turns.append([own for pair in (rotary(position, torch.float32), *kinds) for own in pair])
        if all(torch.allclose(ours, theirs, rtol=_FLOAT32, atol=_FLOAT32) for ours, theirs in zip(*turns, strict=True)):
            return
        name = "rope_parameters"
    raise UnsupportedError(f"a GGUF file of a {family.architecture} cannot say its {name}; write the model as safetensors")


def first_difference(ours: Any, theirs: Any, name: str = "") -> str | None:
    """Return the name of the first field in which two configs differ by more than rounding to float32, or None."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        compared = (field.name for field in fields(ours) if field.compare)
        each = (first_difference(getattr(ours, own), getattr(theirs, own), f"{name}.{own}".strip(".")) for own in compared)
        return next(filter(None, each), None)
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next(filter(None, (first_difference(*pair, f"{name}[{index}]") for index, pair in pairs)), None)
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return None if math.isclose(ours, theirs, rel_tol=_FLOAT32) else name
    return None if ours == theirs else name
