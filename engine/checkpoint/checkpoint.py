"""A checkpoint on disk: validated whole when opened, then read tensor by tensor from the map.

Experts are always asked for one by one under the family's own per-expert names; a checkpoint that stores them stacked
serves the same names as views into the stack.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.architectures import (
    ARCHITECTURES,
    Architecture,
    DecoderConfig,
    Wrapper,
    attention_weights,
    check_token_ids,
    decoder_config,
    derived_tensors,
    expected_tensors,
    expert_shapes,
    feed_forward_weights,
    is_router_bias,
    language_model,
    layer_tensors,
    router_in_memory,
    router_tensor,
    router_tensors,
)
from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.block_float8 import SCALES, block_of
from engine.checkpoint.hub import fetch, is_hub_id
from engine.checkpoint.mxfp4 import is_packed
from engine.checkpoint.pack_quantized import PACKED, QuantizedView, Scheme, schemes_of
from engine.checkpoint.stacks import dense_names
from engine.checkpoint.stored_views import SAME_MODEL, Scales, StoredView, views_of
from engine.errors import CheckpointError, UnsupportedError
from engine.families.rotary_embedding import Rotary
from engine.files.json_file import load_json, shown
from engine.files.model_files import check_entries
from engine.files.safetensors_file import SafetensorsFile, open_shards, state_of
from engine.kernels.quantized_weight import QuantizedWeight, Weight, moved

DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "demo_model"
GENERATION_NAME = "generation_config.json"
ONNX_NAME = "model.onnx"
"""The graph of an exported model; its directory has no safetensors."""
_ONNX_USE = "generate, serve, bench, evaluate, compare and inspect run it; all else takes the model it was made from"
_RELEASE_EVERY_BYTES = 64 << 20


def resolve(model: str) -> Path:
    """The directory of MODEL: `demo`, a local directory, or a hub id (fetched, or found in the cache)."""
    if model == DEMO:
        return DEMO_DIRECTORY
    if os.path.isdir(model):
        check_entries(Path(model))
        return Path(model)
    if os.path.exists(model) or not is_hub_id(model):
        found = "not a directory" if os.path.exists(model) else "no such directory"
        raise CheckpointError(f"{model}: {found}; give a checkpoint directory, a hub id or 'demo'")
    return fetch(model)


def check_generation(directory: Path, vocabulary: int) -> None:
    """Raise CheckpointError where generation_config.json is damaged or names tokens that there are not."""
    path = directory / GENERATION_NAME
    if os.path.lexists(path):
        check_token_ids(str(path), load_json(path, "generation config"), vocabulary)


class ModelDirectory:
    """A model on disk whose weights may be in any format: what config.json and compression.json say of it."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for what is damaged or disagrees, UnsupportedError for what the engine lacks."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory; give the directory of a checkpoint")
        check_entries(directory)
        self.directory = directory
        self.provenance = read_provenance(directory)
        """What compression.json says, None for a checkpoint that is not an artifact of ours."""
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        raw = load_json(directory / "config.json", "model config")
        _refuse_foreign_code(directory, raw)
        try:
            self.raw_config, self.wrapper = language_model(raw)
            """Of the language model alone, and what holds it beside other parts, which are not read."""
            self.schemes = schemes_of(self.raw_config)
            """How weights of few bits are stored; none where there are none."""
            self.float8_block = None if self.schemes or is_packed(self.raw_config) else block_of(self.raw_config)
            """Of weights that are stored in 8-bit floating point; None where they are not."""
            self.config: DecoderConfig = decoder_config(self.raw_config)
            check_token_ids("config.json", self.raw_config, self.config.vocabulary_size)
            Rotary(self.config)  # made and dropped: parameters that it cannot use are refused here
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{directory}: {error}") from error
        check_generation(directory, self.config.vocabulary_size)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint of this model, with its shape."""
        return expected_tensors(self.config)

    @property
    def fewest_bits(self) -> Scheme | None:
        """How the weights of fewest bits are stored; None where there are none of few bits."""
        return min(self.schemes, default=None)

    @property
    def parameters(self) -> int:
        """Parameters; tied ones count once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the routed experts, the top-k only."""
        total = self.parameters
        for index, layer in enumerate(self.config.layers):
            if layer.moe is not None:
                idle = layer.moe.experts - layer.moe.experts_per_token
                total -= idle * sum(math.prod(shape) for shape in expert_shapes(self.config, index))
        return total


class Checkpoint(ModelDirectory):
    """One model on disk. Opening checks config, headers, names, shapes and dtypes, and reads no weights."""

    def __init__(self, directory: Path, header_only: frozenset[str] = frozenset()) -> None:
        """Errors as of ModelDirectory, for weights too. `header_only`: shards that are there in outline, and not read."""
        super().__init__(directory)
        if (directory / ONNX_NAME).is_file():
            raise UnsupportedError(f"{directory}: is an ONNX export, which this needs as a checkpoint; {_ONNX_USE}")
        by_name, self.files = open_shards(directory)
        for file in self.files:
            file.header_only = file.path.name in header_only
        if self.wrapper is not None:
            by_name = _language_model(self.wrapper, self.files)
        self._by_name = by_name
        self._check_routers(by_name)
        self._views: dict[str, StoredView | QuantizedView] = dict(views_of(self.config, by_name))
        try:
            self._views |= self._quantised_views(by_name)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}; {SAME_MODEL}") from error
        if self.float8_block is not None:
            self._read_float8(by_name, self.float8_block)
        self._check_names_and_shapes(by_name)

    def _check_routers(self, by_name: Mapping[str, SafetensorsFile]) -> None:
        """Compare the expert counts first: lists as long as an absurd config.json says are never made."""
        for layer, experts in self.config.experts_by_layer.items():
            own = router_tensor(self.config.architecture, layer)
            inputs = router_tensors(self.config, layer)[own][1]
            names = [own, router_in_memory(self.config.architecture, layer)]
            name = next((name for name in names if name in by_name), None)
            if own + PACKED in by_name:
                raise UnsupportedError(f"{self.directory}: {own} is packed, and the engine reads plain routers only")
            if name is None:
                raise CheckpointError(f"{self.directory}: tensor {names[0]} is missing; {SAME_MODEL}")
            shape = by_name[name].entries[name].shape
            if shape != (experts, inputs):
                raise CheckpointError(
                    f"{self.directory}: tensor {name} has shape {list(shape)}; config.json has {shown(experts)} experts and "
                    f"hidden size {self.config.hidden_size}, which asks for [{shown(experts)}, {inputs}]; {SAME_MODEL}"
                )

    def _read_float8(self, by_name: Mapping[str, SafetensorsFile], block: tuple[int, int]) -> None:
        """Let weights that have scales be read as what they stand for, in the dtype of those that have none."""
        for name, view in self._views.items():
            if isinstance(view, StoredView) and (file := by_name.get(f"{name}{SCALES}")) is not None:
                view.scales = Scales(file, f"{name}{SCALES}", block)
                view.scales.check(view, f"{self.directory}: tensor {name}")
                view.dtype = by_name["model.embed_tokens.weight"].entries["model.embed_tokens.weight"].dtype

    def _quantised_views(self, by_name: Mapping[str, SafetensorsFile]) -> dict[str, QuantizedView]:
        renamed = dense_names(self.config)
        on_disk = {name: renamed.get(name, name) for name in self.shapes}
        packed = {name: own for name, own in on_disk.items() if own + PACKED in by_name and own not in by_name}
        if packed and not self.schemes:
            first = next(iter(packed.values()))
            raise CheckpointError(f"tensor {first}{PACKED} is packed and config.json has no quantization_config of that")
        return {name: QuantizedView(own, self.shapes[name], by_name, self.schemes) for name, own in packed.items()}

    def _check_names_and_shapes(self, by_name: Mapping[str, SafetensorsFile]) -> None:
        problems: list[str] = []
        missing = [name for name in self.shapes if name not in self._views]
        problems += [f"tensor {name} is missing" for name in missing[:1]]
        for name, shape in self.shapes.items():
            view = self._views.get(name)
            if view is not None and view.shape != shape:
                problems.append(f"tensor {name} has shape {list(view.shape)} and config.json says {list(shape)}")
            if view is not None and (not view.dtype.is_floating_point or view.dtype.itemsize == 1):
                problems.append(f"tensor {name} is {view.dtype}; weights that are quantised so are not read")
        used = {stored for name in self.shapes if name in self._views for stored in self._views[name].stored_names}
        used |= set(self.derived)
        extra = [name for name in by_name if name not in used and not _is_ignorable(name, self.config)]
        problems += [f"tensor {name} is not part of this {self.config.architecture.model_type}" for name in extra[:1]]
        if problems:
            more = f" ({len(missing)} missing, {len(extra)} extra)" if len(missing) + len(extra) > 1 else ""
            raise CheckpointError(f"{self.directory}: {problems[0]}{more}; {SAME_MODEL}")

    def stored(self, name: str) -> Weight:
        """A tensor as stored, mapped, not to be written to. Reading it makes its pages resident until `release`.

        One in 8- or 4-bit floating point is made anew at each call.
        """
        view = self._views[name]
        return view.weight() if isinstance(view, QuantizedView) else view.read()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The same as a plain tensor: one of few bits is dequantised, to `dtype` or else to that of its scales."""
        stored = self.stored(name)
        return stored.dequantised(dtype or stored.scales_OC.dtype) if isinstance(stored, QuantizedWeight) else stored

    @cached_property
    def _multiplied(self) -> frozenset[str]:
        """Matrices that may stay of few bits in a decoder."""
        layers = range(len(self.config.layers))
        names = [(*attention_weights(self.config, layer), *feed_forward_weights(self.config, layer)) for layer in layers]
        return frozenset(["lm_head.weight", *(name for own in names for name in own)])

    def scheme(self, name: str) -> Scheme | None:
        """How a weight of few bits is stored; None for all other tensors."""
        view = self._views[name]
        return view.scheme if isinstance(view, QuantizedView) else None

    @cached_property
    def schemes_used(self) -> tuple[Scheme, ...]:
        """Those that some tensor is stored by."""
        used = {scheme for name in self.shapes if (scheme := self.scheme(name)) is not None}
        return tuple(scheme for scheme in self.schemes if scheme in used)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `tensor` gives, without reading it."""
        return self._views[name].dtype

    def packed(self, name: str) -> Tensor | None:
        """A stack of packed weights as stored: its blocks or its scales; None where there is no such tensor."""
        return self._by_name[name].tensor(name) if name in self._by_name else None

    @cached_property
    def derived(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What is here of `derived_tensors`. The engine computes it anew; results have it too, for transformers."""
        there = {name: self._by_name[name].entries[name] for name in derived_tensors(self.config) if name in self._by_name}
        return {name: (entry.dtype, entry.shape) for name, entry in there.items()}

    def derived_tensor(self, name: str) -> Tensor:
        """One of them, mapped."""
        return self._by_name[name].tensor(name)

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the embeddings, which `--dtype auto` computes in."""
        return self.dtype("model.embed_tokens.weight")

    @property
    def bytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(self._views[name].bytes for name in self.shapes)

    @property
    def plain_bytes(self) -> int:
        """The same without weights of few bits."""
        return sum(self._views[name].bytes for name in self.shapes if self.scheme(name) is None)

    @property
    def prediction_layers(self) -> int:
        """Layers for multi-token prediction in the files, which are not read."""
        prefix, names = self.config.architecture.prediction_prefix, [name for file in self.files for name in file.entries]
        if prefix is not None and any(name.startswith(prefix) for name in names):
            return self.config.prediction_layers
        layers = (re.match(r"model\.layers\.(\d+)\.", name) for name in names)
        return len({int(found[1]) for found in layers if found is not None and int(found[1]) >= len(self.config.layers)})

    def release(self) -> None:
        """Give resident weight pages back to the system; tensors stay valid."""
        for file in self.files:
            file.release()

    def read_ahead(self, layer: int) -> None:
        """Ask the system to have a layer's weights in its cache soon; nothing for a layer that there is not."""
        if not 0 <= layer < len(self.config.layers):
            return
        stored = {own for name in layer_tensors(self.config, layer) for own in self._views[name].stored_names}
        for file in self.files:
            file.read_ahead(sorted(stored & file.entries.keys()))

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every tensor once and raise CheckpointError naming the first that holds NaN or infinity.

        Of weights of few bits that is the scales: the rest has no bits for either.
        """
        read = 0
        for name in progress(list(self.shapes)):
            stored = self.stored(name)
            tensor = stored.scales_OC if isinstance(stored, QuantizedWeight) else stored
            for part in in_parts(tensor, _RELEASE_EVERY_BYTES):
                low, high = torch.aminmax(part)  # one fast read; NaN propagates
                if not bool(low.isfinite() & high.isfinite()):
                    raise CheckpointError(f"{self.directory}: tensor {name} holds NaN or infinity; the file is damaged")
                read += part.numel() * part.element_size()
                if read > _RELEASE_EVERY_BYTES:
                    self.release()
                    read = 0
        self.release()

    def fingerprint(self) -> str:
        """SHA-256 over config, headers and samples of every tensor: which model this is, reading little of the weights."""
        digest = hashlib.sha256()
        for file in self.files:
            for name, entry in sorted(file.entries.items()):
                digest.update(f"{name} {entry.dtype} {entry.shape} {entry.begin}\n".encode())
            digest.update(str(file.size).encode())
            for _, sample in file.samples():
                digest.update(sample)
        digest.update(repr(sorted(self.raw_config.items(), key=lambda item: item[0])).encode())
        return digest.hexdigest()

    def identity(self) -> dict[str, str]:
        """The fingerprint, and the state of the files: a copy has the same fingerprint, and only they the same state."""
        return {"fingerprint": self.fingerprint(), "state": state_of(self.files)}

    def source(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Callable[[str], Tensor]:
        """Plain tensors by name: mapped where dtype and device already fit, converted otherwise."""
        row = self.config.architecture
        return lambda name: self.tensor(name, dtype).to(device=device, dtype=computed_dtype(row, name, dtype))

    def weights(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Callable[[str], Weight]:
        """What a decoder is made of: the same, but its matrices of few bits stay so, and mapped."""
        source = self.source(dtype, device)

        def weight(name: str) -> Weight:
            is_kept = name in self._multiplied and self.scheme(name) is not None
            return moved(self.stored(name), dtype, device) if is_kept else source(name)

        return weight


def in_parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Its rows, as many together as take about so many bytes."""
    row = max(1, tensor[:1].numel() * tensor.element_size()) if tensor.dim() else 1
    yield from tensor.split(max(1, size // row)) if tensor.dim() else (tensor,)


def computed_dtype(row: Architecture, name: str, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is computed with in a model of this dtype: a bias that chooses experts keeps float32."""
    return torch.promote_types(dtype, torch.float32) if is_router_bias(row, name) else dtype


def _language_model(wrapper: Wrapper, files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """The file of each tensor of the language model, which the files then call by the names that it has alone."""
    for file in files:
        own = {name: entry for name, entry in file.entries.items() if not name.startswith(wrapper.others)}
        file.entries = {name.removeprefix(wrapper.prefix): entry for name, entry in own.items()}
    return {name: file for file in files for name in file.entries}


def _is_ignorable(name: str, config: DecoderConfig) -> bool:
    """Tensors that older tools wrote and nobody reads, and those of multi-token prediction."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and 0 <= int(layer[1]) - len(config.layers) < config.prediction_layers:
        return True
    if (prefix := config.architecture.prediction_prefix) is not None and name.startswith(prefix):
        return True
    tied_copy = config.tied_embeddings and name == "lm_head.weight"
    return tied_copy or name.endswith((".rotary_emb.inv_freq", ".masked_bias"))


def _refuse_foreign_code(directory: Path, config: Mapping[str, Any]) -> None:
    if config.get("auto_map") and str(config.get("model_type")) not in ARCHITECTURES:
        raise UnsupportedError(
            f"{directory}: model_type {config.get('model_type')!r} needs code of its own (trust_remote_code), which this "
            "engine never runs; convert it to a supported family first"
        )
