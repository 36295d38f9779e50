"""A checkpoint of a family without a row in engine/families: its decoder layers are built, loaded and run by transformers.

Opening builds the model without weights, finds its MoE layers (expert_layers.py), and assigns every tensor of the files to a
decoder layer by transformers' own conversion of names. Weights are loaded layer by layer, through that conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import check_generation
from engine.checkpoint.stored_views import SAME_MODEL
from engine.errors import CheckpointError, UnsupportedError
from engine.families.checks import check_token_ids
from engine.families.classifiers import classified
from engine.families.config import DecoderConfig
from engine.families.encoder_decoders import ENCODER_DECODERS
from engine.families.resolve import has_own_decoder, load_transformers_config
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.families.wrappers import WRAPPERS
from engine.files.element_type import ElementType
from engine.files.finite import can_check, is_finite
from engine.files.json_file import load_json, shown
from engine.files.model_files import check_entries
from engine.files.safetensors_file import open_shards
from engine.passes import heap
from engine.passes.layerwise import SWEEP_TOKENS
from engine.transformers_models.adapted_block import OwnRouting
from engine.transformers_models.adapted_config import adapted_config, text_path
from engine.transformers_models.config_keys import CountKey, WidthKey, find_count_key, find_width_key
from engine.transformers_models.expert_layers import FoundLayers, find_layers, skeleton
from engine.transformers_models.experts_implementation import StackedExperts
from engine.transformers_models.interface_families import classes_of, has_interface
from engine.transformers_models.stack_of import generic
from engine.transformers_models.stored_experts import StoredExperts
from engine.transformers_models.transformers_model import quiet_transformers

Key = TypeVar("Key", CountKey, WidthKey)

_RELEASE_EVERY_BYTES = 64 << 20
SWEEP_BYTES, SWEEP_BYTES_WITHIN_LIMIT = 4 << 30, 256 << 20
"""Bytes of the states before every layer that a pass with gradients keeps in memory, without and with a memory limit."""
_PREDICTION = re.compile("nextn|mtp.*(layers|modules)")
"""Config keys of the number of layers for multi-token prediction."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_WITHHELD_KEYS = ("auto_map", "torch_dtype", "dtype")


def open_mixture_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint of a decoder: through our own decoder for families with a row, through transformers for others.

    Raises the errors of Checkpoint, and those of AdaptedCheckpoint for families without a row.
    """
    raw = load_json(directory / "config.json", "model config") if directory.is_dir() else {}
    model_type = raw.get("model_type")
    has_own_path = not isinstance(model_type, str) or model_type in {*WRAPPERS, *ENCODER_DECODERS}
    has_own_path = has_own_path or has_own_decoder(raw)
    return Checkpoint(directory) if has_own_path or classified(raw) is not None else AdaptedCheckpoint(directory)


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint that transformers runs. `config` has the numbers of its MoE layers; no decoder of ours is built from it.

    Methods that would need a decoder of ours raise UnsupportedError.
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for damaged or inconsistent files, UnsupportedError for a model that does not fit."""
        check_entries(directory)
        self.directory, self.gguf = directory, None
        self.provenance = read_provenance(directory)
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        self.raw_config = load_json(directory / "config.json", "model config")
        self.wrapper, self.schemes, self.float8_block = None, (), None
        try:
            _check_known(self.raw_config)
            self.model_class = _model_class(self.raw_config)
            self.model = self.build(self.raw_config)
            self.found: FoundLayers = find_layers(self.model, self.model_type)
            self.config = adapted_config(self.model.config, self.model_class.__name__, self.found)
            check_token_ids("config.json", self.raw_config, self.config.vocabulary_size)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{directory}: {error}") from error
        check_generation(directory, self.config.vocabulary_size)
        self._stored, files = open_shards(directory)
        self._by_name, self.files = self._stored, [*files]
        self._check_names()

    has_own_decoder = False

    @property
    def model_type(self) -> str:
        """model_type of config.json."""
        return str(self.raw_config["model_type"])

    def build(self, raw: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any:
        """Return the model of a config.json without weights."""
        from transformers import PreTrainedConfig

        decoded = PreTrainedConfig._decode_special_floats({key: raw[key] for key in raw if key not in _WITHHELD_KEYS})
        config = load_transformers_config(decoded)
        return skeleton(self.model_class, config, dtype)

    @cached_property
    def routings(self) -> tuple[OwnRouting, ...]:
        """The choice of each MoE layer's router, which the blocks that run these layers keep up to date."""
        return tuple(OwnRouting(layer.count, layer.router) for layer in self.found.experts)

    @cached_property
    def count_key(self) -> CountKey:
        """The entry of config.json with the number of experts, and the tensors whose shapes depend on it."""
        return self._found_key(find_count_key)

    @cached_property
    def width_key(self) -> WidthKey:
        """The entry of config.json with the width of experts."""
        return self._found_key(find_width_key)

    def _found_key(self, find: Callable[..., Key]) -> Key:
        """Return an entry of config.json. Raises UnsupportedError, which names the directory, where it is not found."""
        try:
            return find(self.raw_config, self.build, self.found, text_path(self.model.config))
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.directory}: {error}") from error

    @cached_property
    def stored_experts(self) -> StoredExperts:
        """The projections of experts in the files. Raises UnsupportedError where they are not found there."""
        return StoredExperts(self)

    # Names

    @cached_property
    def targets(self) -> dict[str, str]:
        """The model's name of every tensor in the files, after transformers' renaming.

        Tensors that become one tensor of the model, such as those of single experts, have its name in common. Tensors
        that the model has no place for, such as layers for multi-token prediction, are left out.
        """
        known = self.model.state_dict().keys()
        return {name: target for name, target in self._renamed.items() if target in known}

    @cached_property
    def _renamed(self) -> dict[str, str]:
        """The name of every tensor in the files after transformers' renaming, whether the model has it or not."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        known = self.model.state_dict()
        conversions = _conversions(self.model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix, found = self.model.base_model_prefix, {}
        for name in self._stored:
            target, _ = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, _ = rename_source_key(name, [], [], prefix, known)
            found[name] = target
        return found

    @cached_property
    def names_by_layer(self) -> dict[int | None, list[str]]:
        """The names in the files of each decoder layer's tensors; under None those of all other tensors of the decoder."""
        layers, outer = f"{self.found.layers}.", self._outer_modules()
        names: dict[int | None, list[str]] = {index: [] for index in range(self.found.count)} | {None: []}
        for name, target in self.targets.items():
            if target.startswith(layers):
                names[int(target.removeprefix(layers).split(".")[0])].append(name)
            elif target.startswith(outer):
                names[None].append(name)
        return names

    def _outer_modules(self) -> tuple[str, ...]:
        """Return the prefixes of the decoder's tensors outside of its layers: the modules around the layers and the head."""
        own = {id(module): name for name, module in self.model.named_modules()}
        around = self.found.layers.rpartition(".")[0]
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return tuple(f"{name}." for name in (around, *(own[id(end)] for end in ends if end is not None)))

    def _check_names(self) -> None:
        """Raise CheckpointError for a tensor of the decoder that is missing, UnsupportedError for one that is not read.

        A conversion with several results hides the names of all but one of them; `loaded` finds what is missing there.
        """
        self._check_elements()
        self._check_unplaced()
        if any(len(conversion.target_patterns) > 1 for conversion in _conversions(self.model)):
            return
        there, tied = set(self.targets.values()), self.model.all_tied_weights_keys
        needed = (f"{self.found.layers}.", *self._outer_modules())
        for name in self.model.state_dict():
            if name.startswith(needed) and name not in there and name not in tied:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")

    def _check_elements(self) -> None:
        """Raise UnsupportedError for stored elements of one byte, or integers, where the model has real numbers."""
        known = self.model.state_dict()
        for name, target in self.targets.items():
            element = self._stored[name].entries[name].element
            if known[target].is_floating_point() and (element.itemsize == 1 or not element.is_floating_point):
                raise UnsupportedError(
                    f"{self.directory}: {name} is stored as {element}, and quantized weights are read for families with a "
                    "row only; take the model before it was quantized"
                )

    def _check_unplaced(self) -> None:
        """Raise CheckpointError for decoder layers after the last one, unless they are for multi-token prediction."""
        if any(_predicts(part) for part in (self.raw_config, self.model.config.get_text_config(decoder=True).to_dict())):
            return
        for name, target in self._renamed.items():
            number = target.removeprefix(f"{self.found.layers}.").split(".")[0]
            if target.startswith(f"{self.found.layers}.") and number.isdecimal() and int(number) >= self.found.count:
                raise CheckpointError(
                    f"{self.directory}: {name} belongs to layer {number}, and config.json has {self.found.count} layers and "
                    f"none for multi-token prediction; {SAME_MODEL}"
                )

    # Weights

    @contextmanager
    def loaded(self, model: Any, layer: int | None, dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
        """Hold the weights of one decoder layer, or for None of everything around the layers, during the body.

        model: from `build`, in this dtype. Tensors that need no conversion stay memory-mapped.
        """
        module = model if layer is None else model.get_submodule(f"{self.found.layers}.{layer}")
        empty = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
        try:
            self.load(model, layer, dtype, device)
            yield
        finally:
            for part, parameters, buffers in empty:
                part._parameters.update(parameters)
                part._buffers.update(buffers)
            self.release()
            heap.give_back()

    def load(self, model: Any, layer: int | None, dtype: torch.dtype, device: torch.device | str) -> None:
        """Give a model the weights that `loaded` holds for a while."""
        self._load(model, self.names_by_layer[layer], dtype, device)
        if layer is None:
            with quiet_transformers():
                model.tie_weights(recompute_mapping=False)
        self._check_loaded(model, layer)

    def _check_loaded(self, model: Any, layer: int | None) -> None:
        """Raise CheckpointError if a tensor of a layer, or for None one around the layers, has no values."""
        layers = f"{self.found.layers}."
        due = self._outer_modules() if layer is None else (f"{layers}{layer}.",)
        for name, tensor in model.state_dict().items():
            is_elsewhere = layer is None and name.startswith(layers)
            if tensor.is_meta and name.startswith(due) and not is_elsewhere:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")

    def _load(self, model: Any, names: Iterable[str], dtype: torch.dtype, device: torch.device | str) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        stored = {name: self._stored[name].tensor(name) for name in names}
        config = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            device_map={"": device},
            weight_mapping=_conversions(model),
        )
        with quiet_transformers():
            info, _ = convert_and_load_state_dict_in_model(model, stored, config)
        problems = [
            f"tensor {name} has shape {list(own)} and config.json says {list(said)}"
            for name, own, said in sorted(info.mismatched_keys)
        ]
        errors = {name: " ".join(str(why).split())[-200:] for name, why in info.conversion_errors.items()}
        problems += [f"tensor {name} cannot be converted ({why})" for name, why in errors.items()]
        if problems:
            raise CheckpointError(f"{self.directory}: {problems[0]}; {SAME_MODEL}")

    def stored_tensor(self, name: str) -> Tensor:
        """Return a tensor of the files under its name there, memory-mapped."""
        return self._stored[name].tensor(name)

    @cached_property
    def _projections(self) -> dict[str, tuple[int, int, int]]:
        """Layer, expert and projection by the name that an expert's projection has in the families with a row."""
        row = self.config.architecture
        return {
            expert_tensor(row, layer, expert, part): (layer, expert, part)
            for layer, count in self.config.experts_by_layer.items()
            for expert in range(count)
            for part in expert_parts(row)
        }

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a projection of an expert by the name that it has in the families with a row.

        Raises UnsupportedError for any other name.
        """
        if name not in self._projections:
            raise self.refusal()
        return self.stored_experts.projection(*self._projections[name])

    @property
    def stored_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor of the files, under its name there."""
        entries = {name: file.entries[name] for name, file in self._stored.items()}
        return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

    # Sizes and states of the files

    @property
    def parameters(self) -> int:
        """Number of stored parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.stored_shapes.values())

    def _expert_parameters(self, layer: int) -> int:
        """Return the number of parameters of all routed experts of a layer."""
        (name,) = (each.experts for each in self.found.experts if each.index == layer)
        return sum(weight.numel() for weight in StackedExperts(self.model.get_submodule(name)).weights)

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(file.entries[name].nbytes for name, file in self._stored.items())

    @property
    def plain_bytes(self) -> int:
        """Size of the stored tensors in bytes; none of them is low-bit."""
        return self.bytes

    @property
    def model_element(self) -> ElementType:
        """Element type of most bytes of the decoder layers."""
        sizes: dict[ElementType, int] = {}
        for index in range(self.found.count):
            for name in self.names_by_layer[index]:
                entry = self._stored[name].entries[name]
                sizes[entry.element] = sizes.get(entry.element, 0) + entry.nbytes
        if not sizes:
            raise CheckpointError(f"{self.directory}: no file has a tensor of a decoder layer; {SAME_MODEL}")
        return max(sizes, key=lambda element: sizes[element])

    @cached_property
    def schemes_used(self) -> tuple[Any, ...]:
        """Storage schemes of low-bit weights: none."""
        return ()

    @property
    def loading_note(self) -> None:
        """Nothing: transformers loads the model."""
        return None

    @property
    def prediction_note(self) -> str | None:
        """A sentence where layers for multi-token prediction have more experts than config.json says, else None."""
        (count,) = {layer.count for layer in self.found.experts}
        beyond = self.stored_shapes.keys() - self.targets.keys()
        found = [_EXPERT.search(name) for name in beyond]
        most = max((int(each[1]) + 1 for each in found if each is not None), default=0)
        shapes = {_end(name): self.stored_shapes[name][1] for name in self.targets if ".experts." in name}
        if most <= count and any(
            shapes.get(_end(name), own) != own for name in beyond for own in [self.stored_shapes[name][1]]
        ):
            return (
                "layers for multi-token prediction keep experts of the source's shape, which is not that of config.json; "
                "programs that run these layers cannot load them, and transformers leaves them out"
            )
        if most <= count:
            return None
        return (
            f"layers for multi-token prediction are not pruned and have {most} experts, while config.json says {count}; "
            "programs that run these layers cannot load them, and transformers leaves them out"
        )

    def prediction_choice(self, source: Checkpoint) -> str | None:
        """A sentence where experts of layers for multi-token prediction were removed; self: the result. Else None."""
        there = self.stored_shapes.keys() - self.targets.keys()
        if self.prediction_note is not None or self.config.experts_per_layer == source.config.experts_per_layer:
            return None
        if not any(".experts." in name for name in there):
            return None
        return (
            "transformers does not run the layers for multi-token prediction, so their experts have no statistics; they "
            f"keep those that layer {self.found.experts[-1].index} keeps, and their drafts may be accepted less often"
        )

    def kept_bytes(self, tokens: int, dtype: torch.dtype, *, gradients: bool) -> int:
        """Return the bytes of the hidden states that a pass keeps in memory.

        These are those of all text before and after a layer and, for gradients, those of some text before every layer and
        their gradients.
        """
        kept = 2 * tokens * _state_bytes(self.config, dtype)
        if not gradients:
            return kept
        together = min(tokens, sweep_tokens(self.config, dtype, is_limited=True))
        return max(kept, together * (len(self.config.layers) + 2) * _state_bytes(self.config, dtype))

    def piece_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of weights that are resident together: what is around the layers, and the largest layer.

        While experts are stacked, they are there three times: in the file's pages, stacked, and joined.
        """
        shapes = self.stored_shapes
        sizes = {
            layer: dtype.itemsize * sum(torch.Size(shapes[name][1]).numel() for name in names)
            for layer, names in self.names_by_layer.items()
        }
        return sizes.pop(None) + 3 * max(sizes.values())

    def read_ahead(self, layer: int) -> None:
        """Ask the operating system to load a layer's weights into its page cache; ignored for other layer numbers."""
        names = set(self.names_by_layer.get(layer, ()))
        for file in self.files:
            file.read_ahead(sorted(names & file.entries.keys()))

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every floating-point tensor once and raise CheckpointError naming the first with NaN or infinity."""
        for name in progress(list(self._stored)):
            file = self._stored[name]
            element = file.entries[name].element
            if can_check(element) and not is_finite(file, name, _RELEASE_EVERY_BYTES):
                raise CheckpointError(f"{self.directory}: tensor {name} holds NaN or infinity; the file is damaged")
        self.release()

    # Operations that need a decoder of ours

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Raises UnsupportedError, as everything that only our own decoder can do."""
        raise self.refusal()

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """Raise UnsupportedError."""
        raise self.refusal()

    def source(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
        """Raise UnsupportedError."""
        raise self.refusal()

    def weights(self, dtype: torch.dtype, device: torch.device | str = "cpu", block_types: Container[str] = ()) -> Any:
        """Raise UnsupportedError."""
        raise self.refusal()

    def refusal(self) -> UnsupportedError:
        """Return the error of a command that needs our own decoder."""
        return UnsupportedError(
            f"{self.directory}: a model of the family {self.model_type} runs through transformers here, where `compress "
            "generate`, `serve`, `bench`, `compare`, `calibrate`, `evaluate`, `merge` and uniform pruning "
            "(`compress prune --uniform`) work"
        )


def sweep_tokens(config: DecoderConfig, dtype: torch.dtype, *, is_limited: bool) -> int:
    """Return the number of tokens whose states before every layer are in memory together in a pass with gradients.

    is_limited: whether the run has a memory limit. A sweep has at least one sequence.
    """
    most = SWEEP_BYTES_WITHIN_LIMIT if is_limited else SWEEP_BYTES
    return max(1, min(SWEEP_TOKENS, most // (len(config.layers) * _state_bytes(config, dtype))))


def _state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the hidden state of one token."""
    return int(config.transformers_config.hidden_size) * dtype.itemsize


def _check_known(raw: Mapping[str, Any]) -> None:
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
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    if any(part.get("quantization_config") for part in parts):
        raise UnsupportedError(
            f"config.json of this {model_type} has a quantization_config, and quantized weights are read for families "
            f"with a row only ({', '.join(sorted(ARCHITECTURES))}); take the model before it was quantized"
        )


def _model_class(raw: Mapping[str, Any]) -> Any:
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


def _end(name: str) -> str:
    """Return the part of the name of an expert's tensor that all experts have in common."""
    return generic(name).rpartition(".experts.")[2]


def _predicts(config: Mapping[str, Any]) -> bool:
    """Return whether a config, or one within it, counts layers for multi-token prediction."""
    counts = [value for key, value in config.items() if _PREDICTION.search(str(key)) and type(value) is int]
    return any(counts) or any(_predicts(part) for part in config.values() if isinstance(part, dict))


def _conversions(model: Any) -> list[Any]:
    """Return transformers' conversions of this model's tensors; a load changes them, so that each load has its own."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))
