"""`compress layout`: a model written with its experts in another order on disk, and every tensor as it is stored."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from calibrate.chosen import chosen_of, co_use
from calibrate.collect import held_bytes
from compress.cost.misses import READINGS, measured_losses
from compress.options.layout import CO_USE, PLAIN, LayoutOptions
from compress.plans.expert_order import Block, Stored, arranged, blocks_of, chained, neighbors_share, sharded
from compress.plans.plan import plan_to_json, same_plan
from compress.report.figures import LayoutFigures
from compress.run.claims import claims_output
from compress.run.job import Prepared, Run, fingerprints, open_mixture, prepare, statistics_of
from compress.run.result import check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.checkpoint import remote_code
from engine.checkpoint.artifact import FILE_NAME, whole_or_nothing, write_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.errors import OptionError, UnsupportedError
from engine.expert_cache.places import SMALL_BYTES
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.files.mapped_file import RELEASE_EVERY_BYTES, Releasing
from engine.files.model_files import CODE_SUFFIXES
from engine.files.safetensors_file import INDEX_NAME, SafetensorsFile, open_shards
from engine.files.safetensors_writer import DEFAULT_SHARD_BYTES, PAGE_BYTES, ShardWriter
from engine.generation.report import peak_memory_bytes
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress

LayoutRun = Run[LayoutOptions, Prepared]
_TINY_BYTES = 64  # shapes, and scales of whole matrices
METADATA_KEY = "layout"
"""Key, in the metadata of each file of weights, of a JSON object with the order and the size of a page."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_STACKED = "keeps the experts of a layer in stacks, whose order is that of the experts' numbers"


class Experts(NamedTuple):
    """The stored tensors of experts, by their names in a checkpoint of the language model alone."""

    single: dict[str, tuple[int, int]]
    """(layer, expert) of each tensor that belongs to one expert, in the order of an expert's matrices."""
    stacked: dict[str, int]
    """The layer of each tensor that holds all of its experts, one behind the other."""


@claims_output
def layout(options: LayoutOptions, progress: Progress = no_progress) -> LayoutFigures:
    """Run the job; return the figures of the result, with the keys of `compress layout --json`."""
    started = time.monotonic()
    work = WorkDirectory(options.output)
    if (figures := finished_before(options, work)) is not None:
        return cast(LayoutFigures, figures)
    if options.makes_file:
        raise OptionError(f"{options.output}: the result is a directory; give --output another name")
    check_outputs(options)
    prepared = prepare_layout(options)
    checkpoint = prepared.checkpoint
    needed = MemoryDemand(
        prepared.dtype,
        max(1, prepared.tokens_SL.shape[1]),
        other_bytes=max(held_bytes(checkpoint.config), 2 * RELEASE_EVERY_BYTES),
        tokens=max(prepared.tokens_SL.numel(), READINGS * _measured_text(prepared).numel()),
    )
    run = Run(options, prepared, work, progress, started, budget_for(options.memory_limit, checkpoint, needed))
    with work.until_whole(options.output):
        work.begin(options.deciding() | fingerprints(prepared), options.resume)
        return _write(run, _co_use(run), _miss_costs(run))


def prepare_layout(options: LayoutOptions) -> Prepared:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    checkpoint = open_mixture(options.model, open_mixture_checkpoint)
    if checkpoint.gguf is not None:
        raise UnsupportedError(
            f"{checkpoint.directory}: is a GGUF file, which keeps the experts of a layer in stacks; give a checkpoint of "
            "safetensors"
        )
    if options.way == CO_USE and not stored_experts(checkpoint).single:
        raise UnsupportedError(f"{checkpoint.directory}: {_STACKED}; give --order {PLAIN}, which puts them on pages")
    if options.way == CO_USE:
        prepared = prepare(options, checkpoint)
        if prepared.statistics is not None:
            chosen_of(prepared.statistics, str(options.statistics))
        return prepared
    if options.statistics is not None:
        raise OptionError(f"--statistics is for --order {CO_USE}, and the order is {PLAIN}; leave it out")
    calibration = options.calibration.filled(checkpoint)
    nothing = torch.empty(0, calibration.sequence_length or 0, dtype=torch.long)
    return Prepared(checkpoint, calibration, nothing, None, None, options.dtype or checkpoint.model_dtype)


def stored_experts(checkpoint: Checkpoint) -> Experts:
    """Return which stored tensors belong to which experts."""
    owners: dict[str, set[tuple[int, int]]] = {}
    for name, owner in _expert_names(checkpoint):
        owners.setdefault(name, set()).add(owner)
    # a layer that has one expert may keep it in a stack, which is then a tensor of this expert alone
    firsts = {name: min(own) for name, own in owners.items()}
    return Experts(
        {name: firsts[name] for name, own in owners.items() if len(own) == 1},
        {name: firsts[name][0] for name, own in owners.items() if len(own) > 1},
    )


def _expert_names(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (stored name, (layer, expert)) for each stored tensor of each expert, in the order of an expert's matrices."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        for layer in checkpoint.config.moe_layers:
            for name in checkpoint.names.by_layer[layer]:
                if (found := _EXPERT.search(name)) is not None:
                    own = checkpoint.low_bit[name].stored_names if name in checkpoint.low_bit else (name,)
                    yield from ((each, (layer, int(found[1]))) for each in own)
        return
    row = checkpoint.config.architecture
    for layer, count in checkpoint.config.experts_by_layer.items():
        for expert in range(count):
            for part in expert_parts(row):
                for name in checkpoint.stored_names(expert_tensor(row, layer, expert, part)):
                    yield name, (layer, expert)


def read_experts(source: Checkpoint, files: Sequence[SafetensorsFile]) -> Experts:
    """Return the stored tensors of experts that are read whenever an expert is read.

    Small tensors are left out, because they stay in memory (engine/expert_cache/places.py) and would lie between the others.
    Where all tensors of experts are small, only those of a few numbers are left out.
    """
    experts, counts = stored_experts(source), source.config.experts_by_layer
    sizes = {own_name(source, name): entry.nbytes for file in files for name, entry in file.entries.items()}
    shares = {name: sizes[name] for name in experts.single}
    shares |= {name: sizes[name] // counts[layer] for name, layer in experts.stacked.items()}
    limit = SMALL_BYTES if max(shares.values(), default=0) > SMALL_BYTES else _TINY_BYTES
    return Experts(
        {name: expert for name, expert in experts.single.items() if shares[name] > limit},
        {name: layer for name, layer in experts.stacked.items() if shares[name] > limit},
    )


def _co_use(run: LayoutRun) -> dict[int, Tensor] | None:
    """Return how many tokens use each pair of experts of a layer, [N, N], by layer; None for the plain order."""
    if run.options.way == PLAIN:
        return None
    counts = run.prepared.checkpoint.config.experts_by_layer
    chosen = chosen_of(statistics_of(run), str(run.options.statistics))
    return {layer: co_use(chosen_CK, counts[layer]) for layer, chosen_CK in chosen.items()}


def _measured_text(prepared: Prepared) -> Tensor:
    """Return the tokens on which miss thresholds are measured; none where transformers runs the model."""
    if prepared.held_out is None or isinstance(prepared.checkpoint, AdaptedCheckpoint):
        return prepared.tokens_SL[:0]
    return prepared.held_out.tokens_SL


def _miss_costs(run: LayoutRun) -> list[dict[str, Any]]:
    """Return what miss thresholds save and cost, as JSON; nothing without a text to measure on."""
    prepared, tokens_SL = run.prepared, _measured_text(run.prepared)
    if not len(tokens_SL):
        return []

    def measured() -> list[dict[str, Any]]:
        costs, _ = measured_losses(
            prepared.checkpoint,
            tokens_SL,
            dtype=prepared.dtype,
            device=run.options.device,
            budget=run.memory_budget,
            progress=run.bar("miss thresholds (layers)"),
        )
        return list(map(asdict, costs))

    found: list[dict[str, Any]] = run.work.once("miss-costs", measured)
    return found


def _write(run: LayoutRun, counts: Mapping[int, Tensor] | None, costs: list[dict[str, Any]]) -> LayoutFigures:
    """Write the result into a temporary sibling directory, describe it, and rename it."""
    options, source = run.options, run.prepared.checkpoint
    numbers = {layer: list(range(count)) for layer, count in source.config.experts_by_layer.items()}
    orders = numbers if counts is None else {layer: chained(counts[layer]) for layer in numbers}
    with whole_or_nothing(options.output, options.overwrite) as directory:
        _, files = open_shards(source.directory)
        experts = read_experts(source, files)
        _copy_weights(run, directory, files, _blocks(source, files, experts, orders))
        _copy_files(source, directory)
        places = [expert_places(source, experts, each) for each in (files, open_shards(directory)[1])]
        neighbors = [_neighbors(each, counts) for each in (numbers, orders)]
        figures = _figures(run, experts, places, neighbors, costs)
        write_provenance(directory, _provenance(run, figures, orders, (directory / SKIP_TABLES).exists()))
    return figures


def own_name(source: Checkpoint, name: str) -> str:
    """Return a stored name as it is in a checkpoint of the language model alone."""
    return name if source.wrapper is None else source.wrapper.own_name(name)


def expert_places(
    source: Checkpoint, experts: Experts, files: Sequence[SafetensorsFile]
) -> dict[tuple[int, int], list[tuple[Path, int, int]]]:
    """Return the ranges of files (file, first byte, last byte + 1) that each expert lies in, by (layer, expert)."""
    pieces: dict[tuple[int, int], list[tuple[Path, int, int]]] = {}
    counts = source.config.experts_by_layer
    for file in files:
        for name, entry in file.entries.items():
            own = own_name(source, name)
            if own in experts.single:
                pieces.setdefault(experts.single[own], []).append((file.path, entry.begin, entry.end))
            elif own in experts.stacked:
                layer = experts.stacked[own]
                size = entry.nbytes // counts[layer]
                for expert in range(counts[layer]):
                    begin = entry.begin + expert * size
                    pieces.setdefault((layer, expert), []).append((file.path, begin, begin + size))
    return {expert: _joined(own) for expert, own in pieces.items()}


def _joined(pieces: list[tuple[Path, int, int]]) -> list[tuple[Path, int, int]]:
    """Return ranges of files in order, with those that touch each other as one."""
    joined: list[tuple[Path, int, int]] = []
    for path, begin, end in sorted(pieces):
        if joined and joined[-1][0] == path and joined[-1][2] == begin:
            begin = joined.pop()[1]
        joined.append((path, begin, end))
    return joined


def _blocks(
    source: Checkpoint, files: Sequence[SafetensorsFile], experts: Experts, orders: Mapping[int, Sequence[int]]
) -> list[Block]:
    """Return all stored tensors in blocks."""
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    stored = [Stored(name, entry.nbytes, entry.element.itemsize) for name, entry in entries.items()]
    by_own_name = {own_name(source, name): name for name in entries}
    return blocks_of(stored, {by_own_name[name]: expert for name, expert in experts.single.items()}, orders)


def _copy_weights(run: LayoutRun, directory: Path, files: Sequence[SafetensorsFile], blocks: Sequence[Block]) -> None:
    by_name = {name: file for file in files for name in file.entries}
    shards = [arranged(shard) for shard in sharded(blocks, DEFAULT_SHARD_BYTES)]
    names = [[tensor.name for block in shard for tensor in block.tensors] for shard in shards]
    metadata = {key: value for file in files for key, value in file.metadata.items()} | {
        METADATA_KEY: json.dumps({"experts": run.options.way, "page_bytes": PAGE_BYTES}),
    }
    shapes = {name: (entry.dtype, entry.shape) for file in files for name, entry in file.entries.items()}

    def release() -> None:
        for file in files:
            file.release()

    pages = Releasing(release)
    with ShardWriter(directory, shapes, metadata=metadata, shards=names) as writer:
        for name in run.progress([name for shard in names for name in shard], "writing"):
            writer.add_rows(name, _pieces(by_name[name].tensor(name), pages))


def _pieces(tensor: Tensor, pages: Releasing) -> Iterator[Tensor]:
    """Yield the elements of a tensor in parts, and give the pages of those that were written back."""
    for piece in tensor.reshape(-1).split(max(1, RELEASE_EVERY_BYTES // tensor.element_size())):
        yield piece
        pages.read(piece.numel() * piece.element_size())


def _copy_files(source: Checkpoint, directory: Path) -> None:
    """Copy the files beside the weights: those that an artifact lists, or those of another checkpoint, without code."""
    listed = None if source.provenance is None else source.provenance["files"].keys()
    for path in sorted(source.directory.iterdir()):
        is_weights = path.name.endswith(_WEIGHTS) and path.name != SKIP_TABLES
        is_own_code = path.name == remote_code.FILE_NAME and remote_code.is_ours(source.directory)
        is_code = listed is None and path.suffix.lower() in CODE_SUFFIXES and not is_own_code
        if path.name in (FILE_NAME, INDEX_NAME) or path.name.startswith(".") or is_weights or is_code or not path.is_file():
            continue
        if listed is None or path.name in listed:
            shutil.copyfile(path, directory / path.name)


def _neighbors(orders: Mapping[int, Sequence[int]], counts: Mapping[int, Tensor] | None) -> float | None:
    """Return the mean over layers of the share of neighbors among pairs of experts used together."""
    shares = [neighbors_share(orders[layer], own) for layer, own in (counts or {}).items()]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _figures(
    run: LayoutRun,
    experts: Experts,
    places: Sequence[Mapping[tuple[int, int], list[tuple[Path, int, int]]]],
    neighbors: Sequence[float | None],
    costs: list[dict[str, Any]],
) -> LayoutFigures:
    source = run.prepared.checkpoint
    reads = [max(map(len, each.values()), default=None) for each in places]
    shares = [_page_share(each) for each in places]
    sizes = [sum(end - begin for _, begin, end in own) for own in places[0].values()]
    note = None
    if experts.stacked:
        note = f"the model {_STACKED}; an expert takes {reads[1]} reads"
    elif not experts.single:
        note = f"where the files of the family {source.config.architecture.model_type} keep single experts is not known"
    elif shares[1] != 1.0:
        note = f"not all experts fill whole pages of {PAGE_BYTES} bytes; a direct read brings up to two pages more"
    return {
        "artifact": str(run.options.output),
        "method": run.options.method,
        "order": run.options.way,
        "experts_per_layer": list(source.config.experts_per_layer),
        "bytes": source.bytes,
        "page_bytes": PAGE_BYTES,
        "expert_bytes": max(sizes, default=None),
        "reads_per_expert_before": reads[0],
        "reads_per_expert_after": reads[1],
        "page_aligned_share_before": shares[0],
        "page_aligned_share_after": shares[1],
        "neighbors_share_before": neighbors[0],
        "neighbors_share_after": neighbors[1],
        "miss_costs": costs,
        "note": note,
        "seconds": time.monotonic() - run.started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _page_share(places: Mapping[tuple[int, int], list[tuple[Path, int, int]]]) -> float | None:
    """Return the share of experts all of whose ranges begin and end on a page; None without experts."""
    if not places:
        return None
    whole = [all((begin | end) % PAGE_BYTES == 0 for _, begin, end in own) for own in places.values()]
    return sum(whole) / len(whole)


def _provenance(
    run: LayoutRun, figures: LayoutFigures, orders: Mapping[int, Sequence[int]], skipping: bool
) -> dict[str, Any]:
    options, source = run.options, run.prepared.checkpoint
    made_from = {key: value for key, value in (source.provenance or {}).items() if key != "files"}
    return {
        "source": {"model": options.model} | run.prepared.models,
        "method": options.method,
        "options": options.recorded(),
        "seed": options.calibration.seed,
        "plan": plan_to_json(same_plan(source.config.experts_by_layer)),
        "experts_per_layer": figures["experts_per_layer"],
        "expert_order": {str(layer): list(own) for layer, own in orders.items()},
        "skip_tables": SKIP_TABLES if skipping else None,
        "figures": figures,
        "made_from": made_from or None,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")},
    }
