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
from typing import Any

import torch
from torch import Tensor

from engine.adapted.adapted_block import OwnRouting
from engine.adapted.adapted_config import adapted_config, text_path
from engine.adapted.config_keys import CountKey, WidthKey, find_count_key, find_width_key
from engine.adapted.expert_layers import FoundLayers, check_states, find_layers, skeleton
from engine.adapted.experts_implementation import StackedExperts
from engine.adapted.known_models import check_known, model_class_of
from engine.adapted.layer_sizes import (
    BLOCKS_KEY,
    OWN_KEYS,
    SizeKeys,
    Sizes,
    check_built,
    plain_config,
    said_sizes,
    with_sizes,
)
from engine.adapted.low_bit_weights import (
    dense_experts,
    low_bit_views,
)
from engine.adapted.stack_of import generic
from engine.adapted.stored_experts import StoredExperts
from engine.adapted.stored_names import StoredNames, conversions_of
from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.checkpoint import Checkpoint, prediction_rule
from engine.checkpoint.family_code import PLACES_KEY, own_class
from engine.checkpoint.model_directory import check_generation
from engine.checkpoint.pack_quantized import CONFIG_KEY, QuantizedView, counted_by_bits, schemes_of
from engine.checkpoint.stored_views import SAME_MODEL
from engine.errors import CheckpointError, UnsupportedError
from engine.families.checks import check_token_ids
from engine.families.config import DecoderConfig
from engine.families.resolve import load_transformers_config, runs_through_transformers
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.files.element_type import ElementType
from engine.files.finite import can_check, is_finite
from engine.files.json_file import load_json
from engine.files.mapped_file import RELEASE_EVERY_BYTES, Releasing
from engine.files.model_files import check_entries
from engine.files.safetensors_file import open_shards
from engine.kernels.stored.scheme import Scheme
from engine.passes import heap
from engine.passes.layerwise import SWEEP_TOKENS
from engine.transformers_models.image_reader import check_vision
from engine.transformers_models.transformers_model import quiet_transformers

SWEEP_BYTES, SWEEP_BYTES_WITHIN_LIMIT = 4 << 30, 256 << 20
"""Bytes of the states before every layer that a pass with gradients keeps in memory, without and with a memory limit."""
_PREDICTION_LAYER = re.compile(r".*?layers\.\d+(?=\.)")
"""The layer in the name of a weight that the model has no place for."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_RAGGED_PREDICTION = (
    "layers for multi-token prediction keep the experts that the last decoder layer keeps, and config.json has no number of "
    "experts for them alone; programs that run these layers cannot load them, and transformers leaves them out"
)
_WITHHELD_KEYS = (*OWN_KEYS, "torch_dtype", "dtype", CONFIG_KEY)


def open_mixture_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint of a decoder: through our own decoder for families with a row, through transformers for others.

    Raises the errors of Checkpoint, and those of AdaptedCheckpoint for families without a row.
    """
    raw = load_json(directory / "config.json", "model config") if directory.is_dir() else {}
    return AdaptedCheckpoint(directory) if runs_through_transformers(raw) else Checkpoint(directory)


def open_image_checkpoint(directory: Path) -> AdaptedCheckpoint:
    """Return the checkpoint of an image-and-text model, which transformers runs as a whole, also for families with a row.

    Raises UnsupportedError for a model that reads text only, and the errors of AdaptedCheckpoint.
    """
    check_vision(directory)
    return AdaptedCheckpoint(directory)


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint that transformers runs. `config` has the numbers of its MoE layers; no decoder of ours is built from it.

    Methods that would need a decoder of ours raise UnsupportedError.
    """

    def __init__(self, directory: Path, header_only: frozenset[str] = frozenset()) -> None:
        """Raises CheckpointError for damaged or inconsistent files, UnsupportedError for a model that does not fit.

        header_only: shards whose headers alone are present.
        """
        check_entries(directory)
        self.directory, self.gguf = directory, None
        self.provenance = read_provenance(directory)
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        self.raw_config = load_json(directory / "config.json", "model config")
        self.wrapper, self.float8, self.nvfp4 = None, None, False
        try:
            check_known(self.raw_config)
            self.schemes = schemes_of(self.raw_config)
            self.model_class = model_class_of(self.raw_config)
            self.model = self.build(plain_config(self.raw_config))
            self.plain_found: FoundLayers = find_layers(self.model, self.model_type)
            """The layers of the family's own model, which have one number of experts of one width."""
            self.found = self.plain_found
            """The layers of this model."""
            if BLOCKS_KEY in self.raw_config:
                keys = SizeKeys(self._count_key(), self._width_key)
                self.model, self.found = self._checked_build(
                    self.raw_config, said_sizes(self.raw_config, self.plain_found, keys)
                )
                self.model_class = type(self.model)
            self.config = adapted_config(self.model.config, self.model_class.__name__, self.found)
            check_token_ids("config.json", self.raw_config, self.config.vocabulary_size)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{directory}: {error}") from error
        check_generation(directory, self.config.vocabulary_size)
        self._stored, files = open_shards(directory)
        self._by_name, self.files = self._stored, [*files]
        for file in files:
            file.header_only = file.path.name in header_only
        try:
            self.low_bit: dict[str, QuantizedView] = low_bit_views(self._stored, self.schemes)
            """Low-bit weights by name."""
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}; {SAME_MODEL}") from error
        self.names = StoredNames(directory, self.model, self.found, self.raw_config, self._stored, self.low_bit)
        self.names.check()

    has_own_decoder = False

    @property
    def model_type(self) -> str:
        """model_type of config.json."""
        return str(self.raw_config["model_type"])

    def build(self, raw: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any:
        """Return the model of a config.json without weights."""
        config = load_transformers_config({key: raw[key] for key in raw if key not in _WITHHELD_KEYS})
        model_class = model_class_of(self.raw_config)
        if BLOCKS_KEY in raw:
            model_class = own_class(model_class.__name__, raw)
            config.block_configs, config.block_places = raw[BLOCKS_KEY], raw[PLACES_KEY]
        return skeleton(model_class, config, dtype)

    def _checked_build(self, raw: Mapping[str, Any], sizes: Sizes) -> tuple[Any, FoundLayers]:
        """Return a model without weights and its layers. Raises UnsupportedError unless they have these sizes."""
        try:
            plain, model = self.build(plain_config(raw)), self.build(raw)
            found = find_layers(model, self.model_type)
            check_built(model, plain, found, self._count_key(), sizes)
        except UnsupportedError as error:
            differ = len({size.count for size in sizes.values()}) > 1
            what, prune = ("numbers of experts", "prune") if differ else ("widths of experts", "prune whole experts")
            raise UnsupportedError(
                f"layers of a model of the family {self.model_type} cannot have different {what} ({error}); "
                f"{prune} with --uniform"
            ) from error
        return model, found

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise UnsupportedError unless the family's layers can have these sizes."""
        raw = self.with_sizes(sizes)
        if BLOCKS_KEY in raw:
            try:
                self._checked_build(raw, sizes)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.directory}: {error}") from error

    def check_states(self) -> None:
        """Raise UnsupportedError unless the hidden states before the output head are known."""
        try:
            check_states(self.model, self.model_type)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.directory}: {error}; choose another method") from error

    def with_sizes(self, sizes: Sizes) -> dict[str, Any]:
        """Return config.json with MoE layers of other sizes. Raises UnsupportedError where no entry has the width."""
        base, keys = model_class_of(self.raw_config).__name__, SizeKeys(self.count_key, lambda: self.width_key)
        return with_sizes(self.raw_config, base, self.plain_found, keys, sizes)

    @cached_property
    def routings(self) -> tuple[OwnRouting, ...]:
        """The choice of each MoE layer's router, which the blocks that run these layers keep up to date."""
        return tuple(OwnRouting(layer.count, layer.router) for layer in self.found.experts)

    @cached_property
    def count_key(self) -> CountKey:
        """The entry of config.json with the number of experts, and the tensors whose shapes depend on it."""
        try:
            return self._count_key()
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.directory}: {error}") from error

    def _count_key(self) -> CountKey:
        plain = plain_config(self.raw_config)
        return find_count_key(plain, self.build, self.plain_found, text_path(self.model.config))

    @cached_property
    def width_key(self) -> WidthKey:
        """The entry of config.json with the width of experts."""
        try:
            return self._width_key()
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.directory}: {error}") from error

    def _width_key(self) -> WidthKey:
        plain = plain_config(self.raw_config)
        return find_width_key(plain, self.build, self.plain_found, text_path(self.model.config))

    @cached_property
    def stored_experts(self) -> StoredExperts:
        """The projections of experts in the files. Raises UnsupportedError where they are not found there."""
        return StoredExperts(self)

    def check_not_low_bit(self, instead: str) -> None:
        """Raise UnsupportedError for low-bit weights, which transformers itself does not read. instead: what to do."""
        if self.low_bit:
            raise UnsupportedError(
                f"{self.directory}: has low-bit weights, and transformers itself does not read those of a model of the "
                f"family {self.model_type}; {instead}"
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

    def load(
        self,
        model: Any,
        layer: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        left_out: Container[str] = (),
    ) -> None:
        """Give a model the weights that `loaded` holds for a while; low-bit ones are dequantized.

        left_out: names of weights that the model has already.
        """
        names = [name for name in self.names.by_layer[layer] if name not in left_out]
        self._load(model, [name for name in names if name not in self.names.own_names], dtype, device)
        own = [name for name in names if name in self.names.own_names]
        if own:
            matrices = {self.names.own_names[name][1:]: self.low_bit[name] for name in own}
            dense_experts(model.get_submodule(self.names.own_names[own[0]][0].experts), matrices, device)
        if layer is None:
            with quiet_transformers():
                model.tie_weights(recompute_mapping=False)
        self._check_loaded(model, layer)

    def load_rest(self, model: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        """Give a model the weights outside of its decoder, which text does not reach, such as those of a vision part.

        Raises CheckpointError for one that is missing or damaged.
        """
        decoder = {name for names in self.names.by_layer.values() for name in names}
        self._load(model, [name for name in self.names.targets if name not in decoder], dtype, device)
        decoder_modules = (f"{self.found.layers}.", *self.names.outer_modules())
        for name, tensor in model.state_dict().items():
            if tensor.is_meta and not name.startswith(decoder_modules):
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")

    def _check_loaded(self, model: Any, layer: int | None) -> None:
        """Raise CheckpointError if a tensor of a layer, or for None one around the layers, has no values."""
        layers = f"{self.found.layers}."
        due = self.names.outer_modules() if layer is None else (f"{layers}{layer}.",)
        for name, tensor in model.state_dict().items():
            is_elsewhere = layer is None and name.startswith(layers)
            if tensor.is_meta and name.startswith(due) and not is_elsewhere:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")

    def _load(self, model: Any, names: Iterable[str], dtype: torch.dtype, device: torch.device | str) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        stored = {name: self.stored_tensor(name) for name in names}
        config = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            device_map={"": device},
            weight_mapping=conversions_of(model),
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
        """Return a tensor of the files under its name there, memory-mapped; a low-bit weight is dequantized."""
        return self.low_bit[name].read() if name in self.low_bit else self._stored[name].tensor(name)

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

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of `stored_tensor` for every weight of the files, under its name there."""
        low_bit, stored = self.low_bit, self._stored
        return {
            name: (
                self.names.element(name).torch,
                low_bit[name].shape if name in low_bit else stored[name].entries[name].shape,
            )
            for name in self.names.weights
        }

    def parts(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor that a weight is stored as, by what follows its name: three if low-bit."""
        names = self.low_bit[name].stored_names if name in self.low_bit else (name,)
        entries = {own.removeprefix(name): self._stored[own].entries[own] for own in names}
        return {suffix: (entry.dtype, entry.shape) for suffix, entry in entries.items()}

    # Sizes and states of the files

    @property
    def parameters(self) -> int:
        """Number of stored parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.stored_shapes.values())

    def _expert_parameters(self, layer: int) -> int:
        """Return the number of parameters of all routed experts of a layer."""
        (name,) = (each.experts for each in self.found.experts if each.index == layer)
        return sum(torch.Size(weight.shape).numel() for weight in StackedExperts(self.model.get_submodule(name)).weights)

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(file.entries[name].nbytes for name, file in self._stored.items())

    @property
    def plain_bytes(self) -> int:
        """Size in bytes of the stored tensors that are not low-bit."""
        return self.bytes - sum(view.bytes for view in self.low_bit.values())

    @property
    def model_element(self) -> ElementType:
        """Element type of most bytes of the decoder layers."""
        sizes: dict[ElementType, int] = {}
        for index in range(self.found.count):
            for name in self.names.by_layer[index]:
                size = self.low_bit[name].bytes if name in self.low_bit else self._stored[name].entries[name].nbytes
                sizes[self.names.element(name)] = sizes.get(self.names.element(name), 0) + size
        if not sizes:
            raise CheckpointError(f"{self.directory}: no file has a tensor of a decoder layer; {SAME_MODEL}")
        return max(sizes, key=lambda element: sizes[element])

    @cached_property
    def schemes_used(self) -> tuple[Scheme, ...]:
        """Storage schemes that at least one weight uses."""
        used = {view.scheme for view in self.low_bit.values()}
        return tuple(scheme for scheme in self.schemes if scheme in used)

    @property
    def parameters_by_bits(self) -> dict[int, int]:
        """Number of parameters that are packed integers, by their bits."""
        return counted_by_bits(self.low_bit.values())

    @property
    def prediction_layers(self) -> int:
        """Number of layers for multi-token prediction in the files; they are not run."""
        found = (_PREDICTION_LAYER.search(target) for target, _ in self.names.unplaced.values())
        return len({each[0] for each in found if each is not None})

    @property
    def parts_not_read(self) -> list[str]:
        """Names of the largest modules of the model that text does not pass through."""
        read = {self.names.targets[name] for names in self.names.by_layer.values() for name in names}
        prefixes = {part for target in read for part in _prefixes(target)}
        beside = set(self.names.targets.values()) - read
        return sorted({next(part for part in _prefixes(target) if part not in prefixes) for target in beside})

    @property
    def loading_note(self) -> None:
        """Nothing: transformers loads the model."""
        return None

    @property
    def prediction_note(self) -> str | None:
        """A sentence where layers for multi-token prediction have more experts than config.json says, else None."""
        counts = {layer.count for layer in self.found.experts}
        beyond = self.stored_shapes.keys() - self.names.targets.keys()
        if len(counts) > 1:
            return _RAGGED_PREDICTION if any(".experts." in name for name in beyond) else None
        (count,) = counts
        found = [_EXPERT.search(name) for name in beyond]
        most = max((int(each[1]) + 1 for each in found if each is not None), default=0)
        shapes = {_end(name): self.stored_shapes[name][1] for name in self.names.targets if ".experts." in name}
        is_narrowed = {layer.width for layer in self.found.experts} != {self.plain_found.sampled.width}
        if (
            most <= count
            and not is_narrowed
            and any(  # config.json has the source's width where layers have their own
                shapes.get(_end(name), own) != own for name in beyond for own in [self.stored_shapes[name][1]]
            )
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

    def prediction_choice(self, source: Checkpoint, *, has_own_experts: bool = False) -> str | None:
        """A sentence where experts of layers for multi-token prediction were removed; self: the result. Else None."""
        there = self.stored_shapes.keys() - self.names.targets.keys()
        if self.prediction_note is not None or self.config.experts_per_layer == source.config.experts_per_layer:
            return None
        if not any(".experts." in name for name in there):
            return None
        return prediction_rule("transformers", self.found.experts[-1].index)

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
            for layer, names in self.names.by_layer.items()
        }
        return sizes.pop(None) + 3 * max(sizes.values())

    def read_ahead(self, layer: int) -> None:
        """Ask the operating system to load a layer's weights into its page cache; ignored for other layer numbers."""
        own = self.names.by_layer.get(layer, ())
        names = {part for name in own for part in (self.low_bit[name].stored_names if name in self.low_bit else (name,))}
        for file in self.files:
            file.read_ahead(sorted(names & file.entries.keys()))

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every floating-point tensor once and raise CheckpointError naming the first with NaN or infinity."""
        pages = Releasing(self.release)
        for name in progress(list(self._stored)):
            file = self._stored[name]
            entry = file.entries[name]
            if can_check(entry.element) and not is_finite(file, name, RELEASE_EVERY_BYTES):
                raise CheckpointError(f"{self.directory}: tensor {name} holds NaN or infinity; the file is damaged")
            pages.read(entry.nbytes)
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
            "generate`, `serve`, `bench`, `compare`, `calibrate`, `evaluate`, `merge`, `quantize` and `prune` work"
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


def _end(name: str) -> str:
    """Return the part of the name of an expert's tensor that all experts have in common."""
    return generic(name).rpartition(".experts.")[2]


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules that a tensor lies in, the outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
