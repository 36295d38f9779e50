"""A model in GGUF files: its config, made from metadata, and views of its tensors under the names of its family.

Quantized tensors are read as numbers, in bfloat16 unless another dtype is asked for; one expert is read without the others.
"""

from __future__ import annotations

import math
import re
import struct
import weakref
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from engine.checkpoint.gguf.tokenizer import special_tokens, write_tokenizer
from engine.checkpoint.stored_views import StoredView
from engine.checkpoint.tokenizer_checks import tokenizing
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.gguf.family import GgufFamily
from engine.families.gguf.forms import Form
from engine.families.gguf.metadata import Facts
from engine.families.gguf.names import Place, places
from engine.families.gguf.parts import EMBEDDINGS
from engine.families.gguf.table import gguf_family
from engine.families.tensor_names import router_tensor
from engine.families.tensor_shapes import expected_tensors, router_tensors
from engine.files.element_type import BFLOAT16, FLOAT32
from engine.files.gguf_file import GgufFile, open_gguf
from engine.files.json_file import shown
from engine.files.model_files import check_inside

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kernels.stored.block_weight import BlockWeight

SAME_FILE = "its metadata and tensors must be of the same model"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class GgufModel:
    """A model in one or several GGUF files. Opening it reads headers only.

    Attributes: `files`; `by_name`, the file of each tensor; `metadata` by key; `family`, the row that describes such files;
    `config`, the content of a config.json.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for damaged files, and UnsupportedError for features that the engine lacks."""
        self.path, self.files = path, open_gguf(path)
        self.by_name: dict[str, GgufFile] = {name: file for file in self.files for name in file.entries}
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        shapes = {name: file.tensors[name].shape for name, file in self.by_name.items()}
        try:
            facts = Facts(self.metadata, shapes, self._numbers_of)
            self.family: GgufFamily = gguf_family(facts)
            self.config: dict[str, Any] = self.family.config(facts)
        except CompressError as error:
            raise type(error)(f"{path}: {error}") from error

    @cached_property
    def block_types(self) -> dict[str, int]:
        """Number of tensors of each type, by the type's name."""
        names = [tensor.type.name for file in self.files for tensor in file.tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @cached_property
    def files_directory(self) -> Path:
        """A temporary directory with the tokenizer and generation_config.json of the metadata; it lives as long as this.

        A tokenizer.json beside the file is copied if the metadata has no tokenizer, or one that is not known or damaged.
        Raises CheckpointError naming the file, also for a link beside it that leads out of its directory.
        """
        directory, beside = Path(mkdtemp(prefix="gguf-tokenizer-")), self.path.parent
        weakref.finalize(self, rmtree, directory, ignore_errors=True)
        try:
            with self._naming_file(), tokenizing(self.path):
                write_tokenizer(self.metadata, self._vocabulary, directory)
        except CheckpointError:
            if not (beside / TOKENIZER_NAMES[0]).is_file():
                raise
        if not (directory / TOKENIZER_NAMES[0]).exists():
            for name in TOKENIZER_NAMES:
                if (beside / name).is_file():
                    check_inside(beside, beside / name)
                    copyfile(beside / name, directory / name)
        return directory

    @property
    def special_tokens(self) -> dict[str, int | None]:
        """Ids of the special tokens, by their name in the metadata. Raises CheckpointError naming the file."""
        with self._naming_file():
            return special_tokens(self.metadata, self._vocabulary)

    @property
    def _vocabulary(self) -> int:
        return self.by_name[EMBEDDINGS].tensors[EMBEDDINGS].shape[0]

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            message = str(error)
            raise CheckpointError(message if message.startswith(str(self.path)) else f"{self.path}: {message}") from error

    def views(self, config: DecoderConfig) -> dict[str, GgufView]:
        """Return a view of every tensor of the model that the files have, by the family's name of the tensor.

        Raises CheckpointError for a router of another shape than the metadata says, before lists of experts are made.
        """
        self._check_routers(config)
        found = places(config, self.family, frozenset(self.by_name))
        shapes = expected_tensors(config)
        there = {name: found[name] for name in shapes if name in found and self._is_there(found[name])}
        return {name: self._view(name, place, shapes[name], config) for name, place in there.items()}

    def _is_there(self, place: Place) -> bool:
        return all(name in self.by_name for name in (*place.names, place.keys or place.name))

    def _view(self, name: str, place: Place, shape: tuple[int, ...], config: DecoderConfig) -> GgufView:
        try:
            if place.form is not None:
                return FormedView(self.by_name, place, shape)
            if place.keys is None:
                return GgufView(self.by_name[place.name], place, shape)
            return AbsorbedView(self.by_name[place.name], self.by_name[place.keys], place, shape, config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {place.name} {error}; {SAME_FILE}") from error

    def _check_routers(self, config: DecoderConfig) -> None:
        row = config.architecture
        for layer, experts in config.experts_by_layer.items():
            name, own = f"blk.{layer}.ffn_gate_inp.weight", router_tensors(config, layer)[router_tensor(row, layer)]
            file = self.by_name.get(name)
            if file is None:
                raise CheckpointError(f"{self.path}: tensor {name} is missing; {SAME_FILE}")
            if _sizes(shape := file.tensors[name].shape) != _sizes(own):
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {list(shape)}, and its metadata says {shown(experts)} experts "
                    f"and hidden size {config.hidden_size}; {SAME_FILE}"
                )

    def name_of(self, tensor: str, config: DecoderConfig) -> str:
        """Return the name that a tensor has in the files, or would have, by the family's name of it."""
        place = places(config, self.family, frozenset(self.by_name)).get(tensor)
        return tensor if place is None else place.name

    def check_output(self, output: Path) -> None:
        """Raise OptionError if a result would be written over a file of the model."""
        if output.resolve() in {file.path.resolve() for file in self.files}:
            raise OptionError(f"{output}: is a file of the model itself, which is read meanwhile; give another name")

    def is_unused(self, name: str, config: DecoderConfig) -> bool:
        """Return whether a tensor belongs to layers for multi-token prediction, which are not read."""
        layer = re.match(r"blk\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= len(config.layers) and self.prediction_layers > 0

    def is_ignorable(self, name: str, config: DecoderConfig) -> bool:
        """Return whether a tensor is unused, or says what the config says and has no numbers of the model's own."""
        return self.is_unused(name, config) or name in self.family.constants(config)

    def _numbers_of(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a tensor that describes the model. Raises UnsupportedError unless it is in float32."""
        file = self.by_name[name]
        if (kind := file.tensors[name].type.name) != "F32":
            raise UnsupportedError(f"tensor {name} is {kind}, and is read in F32 only")
        return struct.unpack(f"<{file.entries[name].nbytes // 4}f", file.raw(name))

    @property
    def prediction_layers(self) -> int:
        """Number of layers for multi-token prediction in the files."""
        found = self.metadata.get(f"{self.family.architecture}.nextn_predict_layers", 0)
        return int(found) if type(found) is int else 0


class GgufView(StoredView):
    """Location of a tensor: a whole stored tensor, or one expert's part of a stack."""

    def __init__(self, file: GgufFile, place: Place, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError, without the tensor's name, if the stored tensor has another shape than `shape`."""
        super().__init__(file, place.name, shape)
        self.file: GgufFile = file
        self.stored, self.place = file.tensors[place.name], place
        self.is_quantized = self.stored.type.element is None
        if self.is_quantized:
            self.element = BFLOAT16
        self.expected = self._expected(shape)
        self.is_divided = place.expert is not None or place.part is not None or place.heads is not None
        is_cut = self.is_quantized and self.is_divided and self.stored.shape[-1] != self.expected[-1]
        if is_cut or _sizes(self.stored.shape) != _sizes(self.expected):
            raise CheckpointError(f"has shape {list(self.stored.shape)} and the metadata says {list(self.expected)}")

    def _expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the stored tensor must have."""
        if self.place.part is not None:
            shape = (2 * shape[0], *shape[1:])
        return shape if self.place.experts is None else (self.place.experts, *shape)

    @property
    def bytes(self) -> int:
        """Stored size in bytes."""
        return math.prod(self.shape) // self.stored.type.numbers * self.stored.type.bytes

    @property
    def floats(self) -> tuple[GgufFile, str] | None:
        """The stored numbers that are finite if the weight is; None for blocks."""
        return None if self.is_quantized else (self.file, self.stored_name)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor; blocks as numbers of `dtype`, by default of `element`."""
        return self._numbers(dtype).reshape(self.shape)

    def own_part(self) -> Tensor:
        """Return this view's part of the stored tensor, in its order of rows: numbers, or rows of blocks as bytes."""
        stored = self.file.tensor(self.stored_name)
        if self.is_divided:
            stored = stored.view(*self.expected[:-1], -1)  # files differ in dimensions of 1; a row of blocks is one of bytes
        own = stored if self.place.expert is None else stored[self.place.expert]
        return own if self.place.part is None else own[self.place.part]

    def _in_order(self) -> Tensor:
        """Return `own_part` in the family's order of rows."""
        return self.own_part() if self.place.heads is None else unpaired(self.own_part(), self.place.heads)

    def _numbers(self, dtype: torch.dtype | None) -> Tensor:
        """Return this view's part of the stored tensor or blocks, as numbers in the family's order of rows."""
        from engine.checkpoint.gguf.blocks import dequantized  # here: headers are read without torch

        own = self._in_order()
        return dequantized(own, self.stored.type, dtype or self.element.torch) if self.is_quantized else own

    def weight(self, kinds: Container[str]) -> BlockWeight | None:
        """Return the matrix in blocks, mapped unless rows are permuted; None if it is not stored so, or not multiplied so.

        kinds: types of blocks that the compiled kernels multiply. They take rows together, so that a matrix whose number of
        rows does not fit is dequantized once, when it is read.
        """
        from engine.kernels.stored.block_weight import BlockWeight, kind_of  # here: headers are read without torch

        kind = kind_of(self.stored.type.name)
        if kind not in kinds or len(self.shape) != 2:
            return None
        # Here: it imports Numba, without which there are no kinds.
        from engine.kernels.stored.low_bit import MULTIPLE_OF_OUTPUTS

        if self.shape[0] % MULTIPLE_OF_OUTPUTS:
            return None
        from engine.checkpoint.gguf.blocks import dequantized

        blocks = self._in_order().view(self.shape[0], -1)
        return BlockWeight(blocks, kind, self.shape[1], partial(dequantized, kind=self.stored.type))


class AbsorbedView(GgufView):
    """The matrix of keys and values of latent attention, stored as keys [heads, rank, D] and values [heads, D, rank]."""

    def __init__(
        self, file: GgufFile, keys_file: GgufFile, place: Place, shape: tuple[int, ...], config: DecoderConfig
    ) -> None:
        assert config.latent is not None and place.keys is not None
        self.latent, self.count = config.latent, config.attention_heads
        super().__init__(file, place, shape)
        self.keys = GgufView(
            keys_file, Place(place.keys), (self.count, self.latent.key_value_rank, self.latent.plain_dimension)
        )

    def _expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.count, self.latent.value_dimension, self.latent.key_value_rank

    def weight(self, kinds: Container[str]) -> None:
        """None: the matrix is made of two."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return self.stored_name, self.keys.stored_name

    @property
    def bytes(self) -> int:
        """Stored size in bytes."""
        values = math.prod(self.stored.shape)
        return values // self.stored.type.numbers * self.stored.type.bytes + self.keys.bytes

    @property
    def floats(self) -> None:
        """None: two tensors are read."""
        return None

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix [heads · (plain + value dimension), rank]."""
        values, keys = self._numbers(dtype), self.keys.read(dtype)
        return joined(keys.to(values.dtype), values.view(self.count, -1, self.latent.key_value_rank))


class FormedView(GgufView):
    """A tensor whose numbers conversion moved or changed, in one or several stored tensors."""

    def __init__(self, by_name: Mapping[str, GgufFile], place: Place, shape: tuple[int, ...]) -> None:
        assert place.form is not None
        self.form, (first, *others) = place.form, place.form.shapes(shape)
        self.stored_shape = first
        super().__init__(by_name[place.name], place, shape)
        self.parts: list[GgufView] = [GgufView(self.file, Place(place.name), first)]
        for name, own in zip(place.others, others, strict=True):
            try:
                self.parts.append(GgufView(by_name[name], Place(name), own))
            except CheckpointError as error:
                raise CheckpointError(f"goes with {name}, which {error}") from error
        elements = {part.element for part in self.parts}
        if self.form.values is not None or len(elements) > 1:
            self.element = FLOAT32

    def _expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.stored_shape

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return self.place.names

    @property
    def bytes(self) -> int:
        """Stored size in bytes."""
        return sum(part.bytes for part in self.parts)

    @property
    def floats(self) -> None:
        """None: numbers may be computed, and there may be several tensors."""
        return None

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor."""
        wanted = dtype or self.element.torch
        stored = (part.read(wanted) for part in self.parts)
        if len(self.parts) > 1:
            stored = (part.to(wanted) for part in stored)
        return self.form.own(*stored).reshape(self.shape)

    def weight(self, kinds: Container[str]) -> BlockWeight | None:
        """Return the matrix in blocks, copied into the family's order; None if its blocks are not moved as a whole."""
        is_one_kind = len({part.stored.type for part in self.parts}) == 1
        return super().weight(kinds) if is_one_kind and self._of_blocks is not None else None

    @property
    def _of_blocks(self) -> Form | None:
        return self.form.of_blocks(self.stored.type.numbers)

    def _in_order(self) -> Tensor:
        form, kind = self._of_blocks, self.stored.type
        assert form is not None
        rows = (part.own_part().reshape(part.shape[0], -1, kind.bytes) for part in self.parts)
        return form.own(*rows).flatten(1)


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """Return the matrix [heads · (plain + value), rank] of keys [heads, rank, plain] and values [heads, value, rank]."""
    import torch

    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def separated(matrix: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of which `joined` makes the matrix."""
    by_head = matrix.view(heads, -1, matrix.shape[-1])
    return by_head[:, :plain].transpose(1, 2), by_head[:, plain:]


def unpaired(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head with the first of all pairs before the second ones. rows: […], by heads."""
    return rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def paired(rows: Tensor, heads: int) -> Tensor:
    """Return the rows from which `unpaired` makes these."""
    return rows.view(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions that are not 1: files differ in whether they store those."""
    return [size for size in shape if size != 1]
