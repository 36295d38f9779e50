"""Execute a Plan on a GGUF file: blocks of what stays are copied as they are stored, one expert after the other.

Removing rows leaves the others unchanged. Columns of a quantized down projection share the scales of their block: whole
blocks that stay are copied, and any other selection, like a refitted projection, is rounded to the type that the tensor has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from compress.plans.apply import check_fits, planned_config
from compress.plans.plan import Plan, PlannedExpert
from compress.plans.releasing import ReleasingSource
from engine.checkpoint.checkpoint import Checkpoint, in_parts
from engine.checkpoint.gguf.blocks import dequantized
from engine.checkpoint.gguf.model import GgufModel, GgufView
from engine.checkpoint.gguf.writer import encoded, is_written
from engine.errors import ExportError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, DOWN_BIAS
from engine.families.gguf.description import described, first_difference
from engine.families.gguf.names import places
from engine.families.resolve import decoder_config
from engine.families.tensor_names import common_tensor, expert_parts, expert_tensor
from engine.families.tensor_shapes import expert_rows
from engine.files.gguf_file import SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS, GgufFile
from engine.files.gguf_file_writer import GgufFileWriter, changed_entry, check_written, metadata_entry
from engine.files.gguf_types import BlockType
from engine.files.mapped_file import RELEASE_EVERY_BYTES

_SPLIT = (SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the result."""

    kind: BlockType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    """Returns its parts in order: numbers, or rows of blocks as bytes."""


@dataclass(frozen=True)
class PlannedFile:
    """The content of the GGUF file of a plan's result."""

    config: DecoderConfig
    entries: list[bytes]
    """The metadata."""
    tensors: Mapping[str, PlannedTensor]


def planned_file(plan: Plan, checkpoint: Checkpoint, made: Mapping[str, Tensor] | None = None) -> PlannedFile:
    """Return the result of a plan on a GGUF file; no tensor is read before its pieces are taken.

    made: tensors of the result that were fitted, by the family's name; each is rounded to the type that it has in the file.
    Raises UnsupportedError for a plan whose result a GGUF file cannot hold, and what `check_fits` raises.
    """
    model = checkpoint.gguf
    assert model is not None
    check_fits(plan, checkpoint)
    config = decoder_config(planned_config(plan, checkpoint))
    try:
        entries = _entries(model, checkpoint.config, config)
        changed = _changed(plan, checkpoint, model, made or {})
    except UnsupportedError as error:
        raise UnsupportedError(f"{checkpoint.directory}: {error}") from error
    tensors: dict[str, PlannedTensor] = {}
    for name, file in model.by_name.items():
        if not model.is_unused(name, checkpoint.config):
            tensors |= changed[name] if name in changed else {name: _copied(file, name)}
    return PlannedFile(config, entries, tensors)


def write_planned(
    planned: PlannedFile,
    checkpoint: Checkpoint,
    path: Path,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Checkpoint:
    """Write the file, read it back, compare its bytes and its config with the planned ones, and return it opened."""
    assert checkpoint.gguf is not None
    releasing = ReleasingSource(checkpoint)
    layout = {name: (tensor.kind, tensor.shape) for name, tensor in planned.tensors.items()}
    with GgufFileWriter(path, planned.entries, layout, checkpoint.gguf.files[0].alignment) as file:
        for name in progress(list(planned.tensors)):
            own = releasing.after(planned.tensors[name].pieces())
            file.write(name, (piece.contiguous().view(torch.uint8).numpy() for piece in own))
    checkpoint.release()
    result = Checkpoint(path)
    assert result.gguf is not None
    check_written(result.gguf.files[0], file.digests)
    read = replace(result.config, prediction_layers=planned.config.prediction_layers)  # such layers are never written
    if (other := first_difference(planned.config, read)) is not None:
        raise ExportError(f"{path}: reads back with another {other}; report this as an error of this program")
    return result


def _entries(model: GgufModel, source: DecoderConfig, result: DecoderConfig) -> list[bytes]:
    """Return the metadata of the result: the file's own entries, with other numbers where the results differ."""
    before, after = described(source).metadata, described(result).metadata
    dropped = {*(before.keys() - after.keys()), *_SPLIT}
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if model.prediction_layers:  # such layers are not read, so they are not written
        count, layers = (f"{model.family.architecture}.{key}" for key in ("nextn_predict_layers", "block_count"))
        lists = {key: after[key] for key, own in model.metadata.items() if isinstance(own, list) and key in after}
        dropped, changed = dropped | {count}, changed | lists | {layers: after[layers]}
    file, entries = model.files[0], list[bytes]()
    for key in file.metadata:
        if key not in dropped:
            entry = file.metadata_entry(key)
            entries.append(changed_entry(entry, key, changed.pop(key)) if key in changed else entry)
    return [*entries, *(metadata_entry(key, value) for key, value in changed.items())]


def _copied(file: GgufFile, name: str) -> PlannedTensor:
    stored = file.tensors[name]
    return PlannedTensor(stored.type, stored.shape, lambda: in_parts(file.tensor(name), RELEASE_EVERY_BYTES))


def _changed(
    plan: Plan, checkpoint: Checkpoint, model: GgufModel, made: Mapping[str, Tensor]
) -> dict[str, dict[str, PlannedTensor]]:
    """Return what becomes of each stored tensor that is not copied whole, by its name: tensors of the result, or none."""
    config, views = checkpoint.config, model.views(checkpoint.config)
    found: dict[str, dict[str, PlannedTensor]] = {}
    stacks = places(config, model.family, frozenset())
    for layer, experts in plan.layers.items():
        found |= _experts(config, layer, experts, views, made, lambda name: stacks[name].name)
        kept = [_origin(expert) for expert in experts]
        for name in expert_rows(config, layer):
            if (view := views.get(name)) is not None:
                found[view.stored_name] = {view.stored_name: _rows(view, config.experts_by_layer[layer], kept)}
    for layer, units in plan.common.items():
        for part in range(DOWN + 1):
            name = common_tensor(config, layer, part)
            taken = _Taken(views[name], part, units, made.get(name))
            found[taken.view.stored_name] = {taken.view.stored_name: _stacked([taken], taken.shape)}
    return found


def _experts(
    config: DecoderConfig,
    layer: int,
    experts: Sequence[PlannedExpert],
    views: Mapping[str, GgufView],
    made: Mapping[str, Tensor],
    stack_of: Callable[[str], str],
) -> dict[str, dict[str, PlannedTensor]]:
    """Return the stacks of a layer's experts. Experts that are stored one by one are stacked, as newer files have them."""
    row, moe = config.architecture, config.layers[layer].moe
    assert moe is not None

    def named(part: int, expert: int = 0) -> str:
        return expert_tensor(row, layer, expert, part)

    def stored(part: int, expert: int = 0) -> str:
        return views[named(part, expert)].stored_name

    found: dict[str, dict[str, PlannedTensor]] = {}
    for name, group in groupby(sorted(expert_parts(row), key=lambda part: (stored(part), part)), stored):
        parts = list(group)
        taken = [
            _Taken(views[named(part, _origin(expert))], part, expert.parts[0].units, made.get(named(part, index)))
            for index, expert in enumerate(experts)
            for part in parts
        ]
        rows, *inputs = taken[0].shape
        stack = _stacked(taken, (len(experts), rows * len(parts), *inputs))
        if taken[0].view.place.expert is not None:
            found[name] = {name: stack}
        else:
            found |= {stored(parts[0], expert): {} for expert in range(moe.experts)} | {
                name: {stack_of(named(parts[0])): stack}
            }
    return found


def _stacked(taken: Sequence[_Taken], shape: tuple[int, ...]) -> PlannedTensor:
    """Return the tensor of these projections. Raises UnsupportedError for one that cannot be written in its type."""
    kind = taken[0].view.stored.type
    for each in taken:
        if each.view.stored.type != kind:
            raise UnsupportedError(
                f"tensor {each.view.stored_name} is of type {each.view.stored.type.name}, and others of its layer of "
                f"{kind.name}; give a directory as --output"
            )
        each.check()
    return PlannedTensor(kind, shape, partial(_each, taken))


def _origin(expert: PlannedExpert) -> int:
    """Return the source expert whose blocks an expert has. Raises UnsupportedError for any other sum of experts."""
    origin = expert.origin
    if not isinstance(origin, int):
        raise UnsupportedError(
            "experts that are sums of others are not written as the file has them; give a directory, and then `compress "
            "export --format gguf`"
        )
    return origin


def _rows(view: GgufView, experts: int, kept: Sequence[int]) -> PlannedTensor:
    """Return the rows that a router, or another tensor with a row for each expert, keeps."""
    first, *others = view.stored.shape
    shape = (len(kept), *others) if first == experts else (first, *others[:-1], len(kept))  # [N, …] or [1, N]

    def pieces() -> Iterator[Tensor]:
        yield view.file.tensor(view.stored_name).view(experts, -1)[list(kept)]

    return PlannedTensor(view.stored.type, shape, pieces)


@dataclass(frozen=True)
class _Taken:
    """A projection or bias of one FFN of the result."""

    view: GgufView
    part: int
    units: Sequence[int] | None
    """The hidden units that stay; None for all."""
    made: Tensor | None
    """The projection in place of the stored one."""

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.view.shape
        if self.units is None or self.part == DOWN_BIAS:
            return own
        return (own[0], len(self.units)) if self.part == DOWN else (len(self.units), *own[1:])

    @property
    def blocks(self) -> list[int] | None:
        """The blocks of a row that the units are, or None if they are no whole blocks."""
        size, units = self.view.stored.type.numbers, list(self.units or ())
        starts = units[::size]
        whole = [unit for start in starts for unit in range(start, start + size)]
        return [start // size for start in starts] if whole == units and not any(s % size for s in starts) else None

    def check(self) -> None:
        """Raise UnsupportedError for a projection that cannot be written in its type."""
        kind, width = self.view.stored.type, self.shape[-1]
        if width % kind.numbers:
            raise UnsupportedError(
                f"tensor {self.view.stored_name} would have rows of {width} numbers, and the blocks of {kind.name} hold "
                f"{kind.numbers}; give --unit-multiple {kind.numbers}, or --granularity expert"
            )
        is_copied = self.made is None and (self.units is None or self.part != DOWN or self.blocks is not None)
        if not is_copied and not is_written(kind):
            raise UnsupportedError(
                f"tensor {self.view.stored_name} would be rounded anew, and {kind.name} is not written; give --granularity "
                "expert, or a directory as --output"
            )

    def tensor(self) -> Tensor:
        """Return the numbers, or the rows of blocks as bytes."""
        kind, own = self.view.stored.type, self.view.own_part()
        if self.made is not None:
            return self._encoded(self.made)
        if self.units is None or self.part == DOWN_BIAS:
            return own
        if self.part != DOWN or kind.element is not None:
            return own.index_select(1 if self.part == DOWN else 0, torch.tensor(self.units))
        if (blocks := self.blocks) is not None:
            return own.view(len(own), -1, kind.bytes).index_select(1, torch.tensor(blocks))
        return self._encoded(dequantized(own, kind).index_select(1, torch.tensor(self.units)))

    def _encoded(self, numbers: Tensor) -> Tensor:
        return torch.from_numpy(encoded(numbers, self.view.stored.type, self.view.stored_name))


def _each(taken: Iterable[_Taken]) -> Iterator[Tensor]:
    for each in taken:
        yield each.tensor()
