"""Checkpoints on disk: validated completely when opened, then read tensor by tensor through a memory mapping.

Experts are always requested one by one, under the family's per-expert names. A checkpoint that stores stacked experts
serves these names as views into the stack.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.block_float8 import ACTIVATION_SCALES, SUFFIXES, Float8
from engine.checkpoint.gguf.model import SAME_FILE, GgufModel, GgufView
from engine.checkpoint.kinds import ONNX_NAME
from engine.checkpoint.model_directory import ModelDirectory
from engine.checkpoint.nvfp4 import Nvfp4View
from engine.checkpoint.pack_quantized import PACKED, QuantizedView, counted_by_bits
from engine.checkpoint.stored_views import SAME_MODEL, Scales, StoredView, views_of
from engine.errors import CheckpointError, UnsupportedError
from engine.families.architecture import Architecture
from engine.families.config import DecoderConfig
from engine.families.tensor_names import (
    is_decay,
    is_prediction_tensor,
    is_router_bias,
    name_on_disk,
    router_in_memory,
    router_tensor,
)
from engine.families.tensor_shapes import (
    attention_weights,
    derived_tensors,
    feed_forward_weights,
    layer_tensors,
    names_on_disk,
    router_tensors,
)
from engine.families.wrappers import Wrapper
from engine.files.element_type import ElementType
from engine.files.finite import can_check, is_finite
from engine.files.json_file import shown
from engine.files.mapped_file import RELEASE_EVERY_BYTES, MappedFile, Releasing, state_of
from engine.files.safetensors_file import SafetensorsFile, open_shards
from engine.kernels.stored.scheme import Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kernels.stored.quantized_weight import Weight

_ONNX_USE = "generate, serve, bench, evaluate, compare and inspect run it; other commands need the checkpoint behind it"
EMBEDDINGS = "model.embed_tokens.weight"
_OF_OLDER_TOOLS = (".rotary_emb.inv_freq", ".masked_bias")


class Checkpoint(ModelDirectory):
    """A model on disk. Opening checks config, headers, names, shapes and dtypes, and reads no weights."""

    def __init__(self, directory: Path, header_only: frozenset[str] = frozenset()) -> None:
        """Raises the errors of ModelDirectory, also for weights. `header_only`: shards whose headers alone are present."""
        super().__init__(directory)
        if (directory / ONNX_NAME).is_file():
            raise UnsupportedError(f"{directory}: is an ONNX export, and this needs a checkpoint; {_ONNX_USE}")
        if self.gguf is not None:
            self._open_gguf(self.gguf)
        else:
            self._open_safetensors(header_only)

    def _open_gguf(self, model: GgufModel) -> None:
        self.files: list[MappedFile] = [*model.files]
        self._by_name: Mapping[str, MappedFile] = model.by_name
        self._views: dict[str, StoredView | QuantizedView] = dict(model.views(self.config))
        self._check_names_and_shapes(model.by_name)

    def _open_safetensors(self, header_only: frozenset[str]) -> None:
        directory = self.directory
        by_name, files = open_shards(directory)
        self.files = [*files]
        for file in files:
            file.header_only = file.path.name in header_only
        if self.wrapper is not None:
            by_name = _language_model(self.wrapper, files)
        self._by_name = by_name
        self._check_routers(by_name)
        self._views = dict(views_of(self.config, by_name))
        try:
            self._views |= self._quantised_views(by_name)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}; {SAME_MODEL}") from error
        if self.float8 is not None:
            self._read_float8(by_name, self.float8)
        self._check_names_and_shapes(by_name)

    def _check_routers(self, by_name: Mapping[str, MappedFile]) -> None:
        """Compare the expert counts first, so that an absurd count in config.json never leads to lists of that length."""
        for layer, experts in self.config.experts_by_layer.items():
            own = router_tensor(self.config.architecture, layer)
            inputs = router_tensors(self.config, layer)[own][1]
            on_disk = name_on_disk(self.config.architecture, own)
            names = [on_disk, router_in_memory(self.config.architecture, layer)]
            name = next((name for name in names if name in by_name), None)
            if on_disk + PACKED in by_name:
                raise UnsupportedError(f"{self.directory}: {on_disk} is packed, and the engine reads plain routers only")
            if name is None:
                raise CheckpointError(f"{self.directory}: tensor {names[0]} is missing; {SAME_MODEL}")
            shape = by_name[name].entries[name].shape
            if shape != (experts, inputs):
                raise CheckpointError(
                    f"{self.directory}: tensor {name} has shape {list(shape)}; config.json has {shown(experts)} experts and "
                    f"hidden size {self.config.hidden_size}, which asks for [{shown(experts)}, {inputs}]; {SAME_MODEL}"
                )

    def _read_float8(self, by_name: Mapping[str, MappedFile], float8: Float8) -> None:
        """Make FP8 weights that have scales read as dequantized weights, in the dtype of the embeddings."""
        for name, view in self._views.items():
            scales = next((own for suffix in SUFFIXES if (own := view.stored_names[0] + suffix) in by_name), None)
            if isinstance(view, StoredView) and scales is not None:
                view.scales = Scales(by_name[scales], scales, float8)
                view.scales.check(view, f"{self.directory}: tensor {name}")
                view.element = self._views[EMBEDDINGS].element

    def _quantised_views(self, by_name: Mapping[str, MappedFile]) -> Mapping[str, StoredView | QuantizedView]:
        renamed = names_on_disk(self.config)
        on_disk = {name: renamed.get(name, name) for name in self.shapes}
        packed = {name: own for name, own in on_disk.items() if own + PACKED in by_name and own not in by_name}
        if self.nvfp4 and EMBEDDINGS in self._views:
            element = self._views[EMBEDDINGS].element
            return {name: Nvfp4View(own, self.shapes[name], by_name, element) for name, own in packed.items()}
        if packed and not self.schemes:
            first = next(iter(packed.values()))
            raise CheckpointError(f"tensor {first}{PACKED} is packed, and config.json has no quantization_config for it")
        return {name: QuantizedView(own, self.shapes[name], by_name, self.schemes) for name, own in packed.items()}

    def _check_names_and_shapes(self, by_name: Mapping[str, MappedFile]) -> None:
        missing = [name for name in self.shapes if name not in self._views]
        problems = [(name, "is missing") for name in missing[:1]]
        for name, shape in self.shapes.items():
            view = self._views.get(name)
            if view is not None and view.shape != shape:
                problems.append((name, f"has shape {list(view.shape)} and config.json says {list(shape)}"))
            if view is not None and (not view.element.is_floating_point or view.element.itemsize == 1):
                problems.append((name, f"is {view.element}; weights quantized in this way are not read"))
        used = {stored for name in self.shapes if name in self._views for stored in self._views[name].stored_names}
        used |= {name for name in derived_tensors(self.config) if name in by_name}
        is_ignorable = _is_ignorable if self.gguf is None else self.gguf.is_ignorable
        not_read = ACTIVATION_SCALES if self.float8 is not None or self.nvfp4 else ()
        extra = [
            name
            for name in by_name
            if name not in used and not is_ignorable(name, self.config) and not name.endswith(not_read)
        ]
        first = [(self._stored_name(name), what) for name, what in problems[:1]]
        first += [(name, f"is not part of this {self.config.architecture.model_type}") for name in extra[:1]]
        if first:
            (stored, what), *_ = first
            more = f" ({len(missing)} missing, {len(extra)} extra)" if len(missing) + len(extra) > 1 else ""
            same = SAME_MODEL if self.gguf is None else SAME_FILE
            raise CheckpointError(f"{self.directory}: tensor {stored} {what}{more}; {same}")

    def _stored_name(self, name: str) -> str:
        """Return the name that a tensor has on disk, or would have if it were there."""
        return name_on_disk(self.config.architecture, name) if self.gguf is None else self.gguf.name_of(name, self.config)

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Weight:
        """Return a tensor as stored: memory-mapped and read-only. Its pages stay resident until `release`.

        A tensor in 8- or 4-bit floating point, or in blocks of a GGUF file, is converted to a new tensor at each call; the
        latter to `dtype`, by default `dtype(name)`.
        """
        view = self._views[name]
        return view.weight() if isinstance(view, QuantizedView) else view.read(dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor as a plain one; a low-bit tensor is dequantized to `dtype`, by default the dtype of its scales."""
        stored = self.stored(name, dtype)
        from engine.kernels.stored.quantized_weight import QuantizedWeight, as_tensor  # here: headers are read without torch

        if not isinstance(stored, QuantizedWeight):
            return as_tensor(stored)
        return stored.dequantised(dtype or stored.scales_OC.dtype)

    @cached_property
    def _multiplied(self) -> frozenset[str]:
        """Names of the matrices that may stay low-bit in a decoder."""
        layers = range(len(self.config.layers))
        names = [(*attention_weights(self.config, layer), *feed_forward_weights(self.config, layer)) for layer in layers]
        return frozenset(["lm_head.weight", *(name for own in names for name in own)])

    def scheme(self, name: str) -> Scheme | None:
        """Return the storage scheme of a low-bit weight; None for any other tensor."""
        view = self._views[name]
        return view.scheme if isinstance(view, QuantizedView) else None

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that a tensor is read from."""
        return self._views[name].stored_names

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor is stored as packed integers, in MXFP4 blocks or in NVFP4."""
        view = self._views[name]
        return isinstance(view, QuantizedView) or view.is_packed

    @cached_property
    def schemes_used(self) -> tuple[Scheme, ...]:
        """Storage schemes that at least one tensor uses."""
        used = {scheme for name in self.shapes if (scheme := self.scheme(name)) is not None}
        return tuple(scheme for scheme in self.schemes if scheme in used)

    @property
    def parameters_by_bits(self) -> dict[int, int]:
        """Number of parameters that are packed integers, by their bits."""
        packed = [view for view in map(self._views.get, self.shapes) if isinstance(view, QuantizedView)]
        return counted_by_bits(packed)

    def element(self, name: str) -> ElementType:
        """Return the element type of `tensor(name)` without reading the tensor and without torch."""
        return self._views[name].element

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of `tensor(name)` without reading the tensor."""
        return self.element(name).torch

    def float_parts(self, name: str, own: str) -> dict[str, Tensor]:
        """Return the stored tensors of a matrix in FP8 or NVFP4, as those of a weight `own` are called; empty for others."""
        view = self._views[name]
        return view.stored_parts(own) if isinstance(view, StoredView) else {}

    def packed(self, name: str) -> Tensor | None:
        """Return a stored stack of packed weights (its blocks or its scales), or None if there is no such tensor."""
        return self._by_name[name].tensor(name) if name in self._by_name else None

    @cached_property
    def derived(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the `derived_tensors` on disk.

        The engine recomputes them; results keep them for transformers.
        """
        there = {name: self._by_name[name].entries[name] for name in derived_tensors(self.config) if name in self._by_name}
        return {name: (entry.dtype, entry.shape) for name, entry in there.items()}

    def derived_tensor(self, name: str) -> Tensor:
        """Return one derived tensor, memory-mapped."""
        return self._by_name[name].tensor(name)

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """Dtype of the embeddings, which is the compute dtype for `--dtype auto`."""
        return self.model_element.torch

    @property
    def model_element(self) -> ElementType:
        """Element type of the embeddings."""
        return self.element(EMBEDDINGS)

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(self._views[name].bytes for name in self.shapes)

    @property
    def plain_bytes(self) -> int:
        """Size in bytes of the stored tensors that are not low-bit."""
        views = (self._views[name] for name in self.shapes)
        return sum(view.bytes for view in views if not isinstance(view, QuantizedView) and not view.is_quantized)

    @property
    def prediction_layers(self) -> int:
        """Number of layers for multi-token prediction in the files; they are not part of the decoder."""
        if self.gguf is not None:
            return self.gguf.prediction_layers
        names = [name for file in self.files for name in file.entries]
        own = [name for name in names if is_prediction_tensor(self.config.architecture, name)]
        if own:  # some configs do not say how many there are
            numbered = (re.search(r"\.layers\.(\d+)\.", name) for name in own)
            return self.config.prediction_layers or len({found[1] for found in numbered if found is not None})
        layers = (re.match(r"model\.layers\.(\d+)\.", name) for name in names)
        return len({int(found[1]) for found in layers if found is not None and int(found[1]) >= len(self.config.layers)})

    @cached_property
    def prediction_files(self) -> dict[str, MappedFile]:
        """The file of each tensor of layers for multi-token prediction, by name; none of a GGUF file."""
        files = {} if self.gguf is not None else self._by_name
        own = {name for name in files if _predicts(name, self.config)}
        return {name: file for name, file in files.items() if name in own or _weight_of(name) in own}

    @cached_property
    def prediction_tensors(self) -> dict[str, StoredView]:
        """The tensors of layers for multi-token prediction, by name. Scales of FP8 weights are part of their weights."""
        there = self.prediction_files
        scales = {name + suffix for name in there for suffix in SUFFIXES}
        views = {name: self._views[name] for name in there if name not in scales}
        return {name: view for name, view in views.items() if isinstance(view, StoredView)}

    @property
    def parts_not_read(self) -> list[str]:
        """Names of the parts of a model around the language model."""
        return [part.strip(".") for part in self.wrapper.others] if self.wrapper else []

    def piece_bytes(self, dtype: torch.dtype) -> int | None:
        """Return the bytes of weights that are resident together; None for weights that are read tensor by tensor."""
        return None

    def kept_bytes(self, tokens: int, dtype: torch.dtype, *, gradients: bool) -> int:
        """Return the bytes of hidden states that a pass keeps in memory besides its batch: none, they go to files."""
        return 0

    has_own_decoder = True
    """Whether our own decoder is built from it, and not transformers' model."""

    @property
    def prediction_note(self) -> str | None:
        """A sentence about layers for multi-token prediction that do not fit config.json; None where there are none."""
        return None

    def prediction_choice(self, source: Checkpoint, *, has_own_experts: bool = False) -> str | None:
        """A sentence about what became of layers for multi-token prediction; self: the result. None if nothing did.

        has_own_experts: whether the first one's experts were chosen by statistics of its own.
        """
        if not source.prediction_layers:
            return None
        if not self.prediction_layers:
            return "layers for multi-token prediction are left out, so that no program drafts with them"
        if self.config.experts_per_layer == source.config.experts_per_layer:
            return None
        if has_own_experts:
            return (
                "the first layer for multi-token prediction keeps its best experts by REAP's score on their own statistics; "
                "its drafts may be accepted less often"
            )
        return prediction_rule("this run", self.config.moe_layers[-1])

    def release(self) -> None:
        """Give resident pages of weights back to the operating system; tensors stay valid."""
        for file in (*self.files, *self.companions):
            file.release()

    @cached_property
    def companions(self) -> list[MappedFile]:
        """Files of tensors that a run uses in place of stored ones, whose pages `release` gives back too."""
        return []

    def read_ahead(self, layer: int) -> None:
        """Ask the operating system to load a layer's weights into its page cache; ignored for other layer numbers."""
        if not 0 <= layer < len(self.config.layers):
            return
        stored = {own for name in layer_tensors(self.config, layer) for own in self._views[name].stored_names}
        for file in self.files:
            file.read_ahead(sorted(stored & file.entries.keys()))

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every tensor once and raise CheckpointError naming the first one that holds NaN or infinity.

        For low-bit weights only the scales are read, because the integers cannot encode either. torch is imported only
        for weights that must be computed first.
        """
        finite: dict[str, bool] = {}
        pages = Releasing(self.release)
        for name in progress(list(self.shapes)):
            floats = self._views[name].floats
            if floats is not None and can_check(floats[0].entries[floats[1]].element):
                file, stored_name = floats
                if stored_name not in finite:  # a stack of experts is read once
                    finite[stored_name] = is_finite(file, stored_name, RELEASE_EVERY_BYTES)
                    pages.read(file.entries[stored_name].nbytes)
                if finite[stored_name]:
                    continue
            self._check_finite(name)
        self.release()

    def _check_finite(self, name: str) -> None:
        """Raise CheckpointError if one weight, as it is read, holds NaN or infinity."""
        import torch

        from engine.kernels.stored.quantized_weight import QuantizedWeight, as_tensor

        stored = self.stored(name)
        tensor = stored.scales_OC if isinstance(stored, QuantizedWeight) else as_tensor(stored)
        for part in in_parts(tensor, RELEASE_EVERY_BYTES):
            low, high = torch.aminmax(part)  # one fast read; NaN propagates
            if not bool(low.isfinite() & high.isfinite()):
                stored_name = name if self.gguf is None else self.stored_names(name)[0]
                raise CheckpointError(f"{self.directory}: tensor {stored_name} holds NaN or infinity; the file is damaged")
            self.release()

    def fingerprint(self) -> str:
        """Return a SHA-256 over config, headers and samples of every tensor; few of the weights are read."""
        digest = hashlib.sha256()
        for file in self.files:
            for name, entry in sorted(file.entries.items()):
                digest.update(f"{name} {entry.element} {entry.shape} {entry.begin}\n".encode())
            digest.update(str(file.size).encode())
            for _, sample in file.samples():
                digest.update(sample)
        digest.update(repr(sorted(self.raw_config.items(), key=lambda item: item[0])).encode())
        return digest.hexdigest()

    def identity(self) -> dict[str, str]:
        """Return the fingerprint and the state of the files. A copy has an equal fingerprint and another state."""
        return {"fingerprint": self.fingerprint(), "state": state_of(self.files)}

    def source(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Callable[[str], Tensor]:
        """Return a function from name to plain tensor: mapped if dtype and device already match, converted otherwise."""
        row = self.config.architecture
        return lambda name: self.tensor(name, dtype).to(device=device, dtype=computed_dtype(row, name, dtype))

    def weights(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", block_types: Container[str] = ()
    ) -> Callable[[str], Weight]:
        """Return a function from name to weight for a decoder: as `source`, but low-bit matrices stay low-bit and mapped.

        block_types: types of a GGUF file's blocks and of packed floats whose matrices stay as they are stored. Others are
        dequantized when they are read.
        """
        from engine.kernels.stored.quantized_weight import moved  # here: it imports torch, headers are read without

        source = self.source(dtype, device)

        def weight(name: str) -> Weight:
            view, is_multiplied = self._views[name], name in self._multiplied
            if isinstance(view, StoredView) and (is_multiplied or (isinstance(view, GgufView) and name == EMBEDDINGS)):
                as_stored = view.weight(block_types)
                return source(name) if as_stored is None else as_stored
            is_low_bit = (is_multiplied or name == EMBEDDINGS) and self.scheme(name) is not None
            return moved(self.stored(name), dtype, device) if is_low_bit else source(name)

        return weight


def prediction_rule(who: str, layer: int) -> str:
    """Return a sentence about which experts layers for multi-token prediction keep, where `who` does not run them."""
    return (
        f"{who} does not run the layers for multi-token prediction, so their experts have no statistics; they "
        f"keep those that layer {layer} keeps, and their drafts may be accepted less often"
    )


def in_parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield consecutive rows of a tensor, in parts of about `size` bytes."""
    row = max(1, tensor[:1].numel() * tensor.element_size()) if tensor.dim() else 1
    yield from tensor.split(max(1, size // row)) if tensor.dim() else (tensor,)


def computed_dtype(row: Architecture, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype of a tensor in a model of this dtype: at least float32 for a router's selection bias and
    for rates of decay."""
    import torch  # here: headers are read without it

    return torch.promote_types(dtype, torch.float32) if is_router_bias(row, name) or is_decay(name) else dtype


def _language_model(wrapper: Wrapper, files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor of the language model; rename its entries to names without the wrapper."""
    for file in files:
        own = {name: entry for name, entry in file.entries.items() if not name.startswith(wrapper.others)}
        file.entries = {wrapper.own_name(name): entry for name, entry in own.items()}
    return {name: file for file in files for name in file.entries}


def _weight_of(scales: str) -> str:
    """Return the name of the weight that a tensor of scales belongs to; another name is returned as it is."""
    return next((scales.removesuffix(suffix) for suffix in SUFFIXES if scales.endswith(suffix)), scales)


def _is_ignorable(name: str, config: DecoderConfig) -> bool:
    """Return whether a tensor is unused: written by older tools, or part of multi-token prediction."""
    tied_copy = config.tied_embeddings and name == "lm_head.weight"
    return tied_copy or _predicts(name, config) or name.endswith(_OF_OLDER_TOOLS)


def _predicts(name: str, config: DecoderConfig) -> bool:
    """Return whether a tensor belongs to a layer for multi-token prediction."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_further = layer is not None and 0 <= int(layer[1]) - len(config.layers) < config.prediction_layers
    return is_further or is_prediction_tensor(config.architecture, name)
