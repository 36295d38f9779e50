"""The names of a checkpoint's weights: in its files, and in the model that transformers builds.

Transformers renames and converts what it loads. `StoredNames` follows its renaming without loading anything, and says which
decoder layer each weight belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from engine.adapted.expert_layers import ExpertLayer, FoundLayers
from engine.adapted.low_bit_weights import expert_matrices, expert_matrix, first_name
from engine.checkpoint.pack_quantized import PACKED, QuantizedView
from engine.checkpoint.stored_views import SAME_MODEL
from engine.errors import CheckpointError, UnsupportedError
from engine.families.experts import DOWN, GATE, UP
from engine.files.element_type import ElementType
from engine.files.safetensors_file import SafetensorsFile

_PREDICTION = re.compile("nextn|mtp.*(layers|modules)")
"""Config keys of the number of layers for multi-token prediction."""


class StoredNames:
    """The names of one checkpoint's weights."""

    def __init__(
        self,
        directory: Path,
        model: Any,
        found: FoundLayers,
        raw_config: Mapping[str, Any],
        stored: Mapping[str, SafetensorsFile],
        low_bit: Mapping[str, QuantizedView],
    ) -> None:
        """model: without weights. stored: the file of each tensor. low_bit: views of low-bit weights by name."""
        self.directory, self.model, self.found, self.raw_config = directory, model, found, raw_config
        self._stored, self.low_bit = stored, low_bit

    def element(self, name: str) -> ElementType:
        """Return the element type of a weight, dequantized if it is low-bit."""
        return self.low_bit[name].element if name in self.low_bit else self._stored[name].entries[name].element

    @cached_property
    def targets(self) -> dict[str, str]:
        """The model's name of every tensor in the files, after transformers' renaming.

        Tensors that become one tensor of the model, such as those of single experts, have its name in common. Tensors
        that the model has no place for, such as layers for multi-token prediction, are left out.
        """
        known = self.model.state_dict().keys()
        return {name: target for name, (target, _) in self._renamed.items() if target in known} | self._targets_of_own_names

    @cached_property
    def own_names(self) -> dict[str, tuple[ExpertLayer, int, int]]:
        """Layer, expert and projection of low-bit weights that have names of ours, which transformers does not know."""
        known, own = self.model.state_dict().keys(), expert_matrices(self.found.experts, self.low_bit)
        return {name: place for name, place in own.items() if self._renamed[name][0] not in known}

    @property
    def _targets_of_own_names(self) -> dict[str, str]:
        first = {layer.experts: first_name(self.model.get_submodule(layer.experts)) for layer in self.found.experts}
        return {
            name: f"{layer.experts}.{'down_proj' if part == DOWN else first[layer.experts]}"
            for name, (layer, _, part) in self.own_names.items()
        }

    @property
    def converted(self) -> frozenset[str]:
        """Names of the tensors that transformers changes, and does not only rename."""
        return frozenset(name for name, (_, converter) in self._renamed.items() if converter is not None)

    @cached_property
    def weights(self) -> list[str]:
        """The names of all weights in the files; the three tensors of a low-bit weight have one in common."""
        parts = {part: name for name, view in self.low_bit.items() for part in view.stored_names}
        return list(dict.fromkeys(parts.get(name, name) for name in self._stored))

    @cached_property
    def _renamed(self) -> dict[str, tuple[str, str | None]]:
        """The name of every weight after transformers' renaming, whether the model has it or not, and what converts it."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        known = self.model.state_dict()
        conversions = conversions_of(self.model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix, found = self.model.base_model_prefix, {}
        for name in self.weights:
            found[name] = rename_source_key(name, renamings, converters, prefix, known)
            if found[name][0] not in known and name in known:
                found[name] = rename_source_key(name, [], [], prefix, known)
        return found

    @cached_property
    def by_layer(self) -> dict[int | None, list[str]]:
        """The names in the files of each decoder layer's tensors; under None those of all other tensors of the decoder."""
        layers, outer = f"{self.found.layers}.", self.outer_modules()
        names: dict[int | None, list[str]] = {index: [] for index in range(self.found.count)} | {None: []}
        for name, target in self.targets.items():
            if target.startswith(layers):
                names[int(target.removeprefix(layers).split(".")[0])].append(name)
            elif target.startswith(outer):
                names[None].append(name)
        return names

    def outer_modules(self) -> tuple[str, ...]:
        """Return the prefixes of the decoder's tensors outside of its layers: the modules around the layers and the head."""
        own = {id(module): name for name, module in self.model.named_modules()}
        around = self.found.layers.rpartition(".")[0]
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return tuple(f"{name}." for name in (around, *(own[id(end)] for end in ends if end is not None)))

    def check(self) -> None:
        """Raise CheckpointError for a tensor of the decoder that is missing, UnsupportedError for one that is not read.

        A conversion with several results hides the names of all but one of them; `loaded` finds what is missing there.
        """
        self._check_elements()
        self._check_unplaced()
        self._check_own_names()
        if any(len(conversion.target_patterns) > 1 for conversion in conversions_of(self.model)):
            return
        there, tied = set(self.targets.values()), self.model.all_tied_weights_keys
        needed = (f"{self.found.layers}.", *self.outer_modules())
        for name in self.model.state_dict():
            if name.startswith(needed) and name not in there and name not in tied:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")

    def _check_elements(self) -> None:
        """Raise UnsupportedError for stored elements of one byte, or integers, where the model has real numbers."""
        known = self.model.state_dict()
        for name, target in self.targets.items():
            element = self.element(name)
            if known[target].is_floating_point() and (element.itemsize == 1 or not element.is_floating_point):
                raise UnsupportedError(
                    f"{self.directory}: {name} is stored as {element}, and quantized weights are read for families with a "
                    "row only; take the model before it was quantized"
                )

    def _check_own_names(self) -> None:
        """Raise CheckpointError for a low-bit weight of an expert that is missing or does not have config.json's shape."""
        for layer in self.found.experts:
            has_gate = self.model.get_submodule(layer.experts).has_gate
            places = product(range(layer.count), (GATE, UP, DOWN) if has_gate else (UP, DOWN))
            names = [expert_matrix(layer.experts, *place) for place in places]
            missing = [name for name in names if name not in self.own_names]
            if missing and len(missing) < len(names):
                raise CheckpointError(f"{self.directory}: tensor {missing[0]}{PACKED} is missing; {SAME_MODEL}")
        for name, (layer, _, part) in self.own_names.items():
            said = (layer.hidden_size, layer.width) if part == DOWN else (layer.width, layer.hidden_size)
            if self.low_bit[name].shape != said:
                raise CheckpointError(
                    f"{self.directory}: tensor {name} has shape {list(self.low_bit[name].shape)} and config.json says "
                    f"{list(said)}; {SAME_MODEL}"
                )

    @property
    def unplaced(self) -> dict[str, tuple[str, str | None]]:
        """Those weights of `_renamed` that the model has no place for."""
        return {name: own for name, own in self._renamed.items() if name not in self.targets}

    def _check_unplaced(self) -> None:
        """Raise CheckpointError for decoder layers after the last one, unless they are for multi-token prediction."""
        if any(_predicts(part) for part in (self.raw_config, self.model.config.get_text_config(decoder=True).to_dict())):
            return
        for name, (target, _) in self._renamed.items():
            number = target.removeprefix(f"{self.found.layers}.").split(".")[0]
            if target.startswith(f"{self.found.layers}.") and number.isdecimal() and int(number) >= self.found.count:
                raise CheckpointError(
                    f"{self.directory}: {name} belongs to layer {number}, and config.json has {self.found.count} layers and "
                    f"none for multi-token prediction; {SAME_MODEL}"
                )


def _predicts(config: Mapping[str, Any]) -> bool:
    """Return whether a config, or one within it, counts layers for multi-token prediction."""
    counts = [value for key, value in config.items() if _PREDICTION.search(str(key)) and type(value) is int]
    return any(counts) or any(_predicts(part) for part in config.values() if isinstance(part, dict))


def conversions_of(model: Any) -> list[Any]:
    """Return transformers' conversions of this model's tensors; a load changes them, so that each load has its own."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))
