"""What a run of `compress prune` will cost before it starts, from config.json alone.

A run is phases, one after the other; each is counted as Work (work.py), divided by what a Device gives (devices.py), and has
its memory: weights that are resident, hidden states, statistics, gradients. Scores and their optimiser (DiEP's α and β with
Adam's moments) are a few numbers for each expert and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.collect import held_bytes
from calibrate.options import CalibrationOptions
from compress.cost.counts import Passes, Work
from compress.cost.devices import DEVICES, Device, measured
from compress.methods.diep import DiepOptions
from compress.methods.naee import SUBSET_LIMIT, compared_subsets
from compress.prune import DEFAULT_METHOD
from compress.run.result import SKIP_TABLE_SEQUENCES
from engine.checkpoint.block_float8 import block_of
from engine.checkpoint.checkpoint import DEMO, DEMO_DIRECTORY
from engine.checkpoint.hub import is_hub_id, split
from engine.checkpoint.mxfp4 import is_packed
from engine.checkpoint.pack_quantized import schemes_of
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.rotary_embedding import Rotary
from engine.families.wrappers import language_model
from engine.files.json_file import load_json
from engine.passes.memory_budget import TOKENS_PER_BATCH

PICTURE_SECONDS = 1.0, 0.1
"""Of the pictures of a result, and more for each layer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What decides on a run's cost; names and defaults as of `compress prune`."""

    model: str
    device: str = "cpu"
    method: str = DEFAULT_METHOD
    sparsity: float = 0.5
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    diep: DiepOptions = field(default_factory=DiepOptions)
    naee_limit: int = SUBSET_LIMIT
    dtype: torch.dtype | None = None

    def check(self) -> None:
        """Raise OptionError for what no run can have."""
        if self.device != "cpu" and self.device not in DEVICES:
            raise OptionError(f"device {self.device!r} is not known; choose cpu, {', '.join(DEVICES)}")
        if not 0.0 < self.sparsity < 1.0:
            raise OptionError(f"sparsity is {self.sparsity}; it must lie strictly between 0 and 1")


@dataclass(frozen=True)
class Planned:
    """A model as its config.json has it."""

    config: DecoderConfig
    dtype: torch.dtype
    """That its weights are computed in unless another is asked for."""
    bytes_per_weight: float
    """In the files, of the layers' matrices."""
    stay_packed: bool
    """Weights of few bits are computed with as they are stored; those in 8- or 4-bit floating point are widened."""


@dataclass(frozen=True)
class Phase:
    """One part of a run."""

    name: str
    work: Work
    memory_bytes: float
    """Beside what the process has before."""
    fixed_seconds: float = 0.0


def config_path(model: str) -> Path:
    """config.json of MODEL: `demo`, a local directory, or a hub id, of which nothing else is downloaded."""
    if model == DEMO:
        return DEMO_DIRECTORY / "config.json"
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or not is_hub_id(model):
        raise CheckpointError(f"{model}: no such directory; give a directory with a config.json, a hub id or 'demo'")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, revision = split(model)
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{model}: no such directory, and the hub does not give its config.json ({type(error).__name__}); "
            "check the name and the network"
        ) from error


def planned_model(path: Path) -> Planned:
    """What config.json says of sizes and storage. Raises a CompressError where it cannot be honoured."""
    try:
        raw, _ = language_model(load_json(path, "model config"))
        config, schemes, packed = decoder_config(raw), schemes_of(raw), is_packed(raw)
        Rotary(config)
        float8 = None if schemes or packed else block_of(raw)
    except (CheckpointError, UnsupportedError) as error:
        where = "" if str(error).startswith(str(path)) else f"{path.parent}: "
        raise type(error)(f"{where}{error}") from error
    if not config.moe_layers:
        raise OptionError(f"{path.parent}: has no experts to spare")
    dtype = DTYPES.get(str(raw.get("dtype", raw.get("torch_dtype", "bfloat16"))), torch.bfloat16)
    if schemes:
        bytes_per_weight = max(scheme.bits / 8 for scheme in schemes) * 17 / 16  # and a scale for each 32
    elif packed:
        bytes_per_weight = 17 / 32  # blocks of 32 numbers of 4 bits, and a power
    else:
        bytes_per_weight = float(dtype.itemsize) if float8 is None else 1.0
    return Planned(config, dtype, bytes_per_weight, bool(schemes))


def plan_run(options: RunOptions) -> dict[str, Any]:
    """The figures of `compress plan-run --json`; nothing but config.json is read."""
    options.check()
    model = planned_model(config_path(options.model))
    calibration = options.calibration.sized(options.model == DEMO, model.config.max_positions)
    dtype = options.dtype or model.dtype
    device = _device(options, model.config, dtype)
    phases = list(planned_phases(options, model, calibration, dtype, device))
    start = Phase("start", Work(), 0.0, device.start_seconds)
    rows = [_row(phase, device, dtype) for phase in (start, *phases)]
    peak = device.base_bytes + max(phase.memory_bytes for phase in phases)
    before = Passes(model.config, dtype.itemsize, model.bytes_per_weight)
    assert calibration.sequence_length is not None
    return {
        "model": options.model,
        "architecture": model.config.architecture.model_type,
        "method": options.method,
        "device": device.name,
        "device_source": device.source,
        "calibration": device.calibration,
        "product_efficiency": device.product_efficiency,
        "bandwidth_efficiency": device.bandwidth_efficiency,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": before.weights,
        "weights_bytes": int(before.file_bytes),
        "tokens": calibration.samples * calibration.sequence_length,
        "flops": sum(row["flops"] for row in rows),
        "bytes_moved": sum(row["bytes_moved"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "peak_memory_bytes": int(peak),
        "device_memory_bytes": device.memory_bytes,
        "fits": peak <= device.memory_bytes,
        "phases": rows,
    }


def _row(phase: Phase, device: Device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "flops": phase.work.all_flops,
        "bytes_moved": phase.work.all_bytes,
        "seconds": phase.work.seconds(device, dtype) + phase.fixed_seconds,
        "memory_bytes": int(phase.memory_bytes),
    }


def _device(options: RunOptions, config: DecoderConfig, dtype: torch.dtype) -> Device:
    if options.device != "cpu":
        return DEVICES[options.device]
    moe = next(layer.moe for layer in config.layers if layer.moe is not None)
    rows = max(16, TOKENS_PER_BATCH * moe.experts_per_token // moe.experts)
    return measured(dtype, rows, config.hidden_size, moe.expert_width, config.vocabulary_size)


def planned_phases(
    options: RunOptions, model: Planned, calibration: CalibrationOptions, dtype: torch.dtype, device: Device
) -> Iterator[Phase]:
    """Of `compress prune`, in their order."""
    assert calibration.sequence_length is not None
    length, weights = calibration.sequence_length, _Resident(model, dtype, device)
    before = Passes(model.config, dtype.itemsize, model.bytes_per_weight)
    after = Passes(smaller(model.config, options.sparsity), dtype.itemsize, model.bytes_per_weight)
    held_out, tokens = calibration.evaluation_samples * length, calibration.samples * length
    yield Phase("checking weights", Work(read_bytes=before.file_bytes), 64 << 20)
    if held_out:
        yield _perplexity("perplexity before", before, held_out, length, weights)
    yield from method_phases(options, before, tokens, length, weights)
    kept = after.file_bytes
    yield Phase("writing", Work(read_bytes=kept, written_bytes=kept), 128 << 20)
    own = min(calibration.samples, SKIP_TABLE_SEQUENCES) * length
    yield _statistics("skip tables", after, own, length, weights)
    if held_out:
        yield _perplexity("perplexity after", after, held_out, length, weights)
    fixed, each = PICTURE_SECONDS
    yield Phase("pictures", Work(), 64 << 20, fixed + each * len(model.config.moe_layers))


def method_phases(options: RunOptions, passes: Passes, tokens: int, length: int, weights: _Resident) -> Iterator[Phase]:
    """What makes the plan."""
    if options.method == "naee":
        compared = {
            index: compared_subsets(count, _kept(count, options.sparsity), options.naee_limit)
            for index, count in passes.config.experts_by_layer.items()
        }
        memory = weights.layer(passes) + _streaming(passes, tokens, length) + passes.subset_bytes(tokens)
        yield Phase("comparing subsets", passes.subsets(tokens, length, compared), memory)
    elif options.method in ("fisher", "taylor"):
        yield _gate_gradients(options.method == "fisher", passes, tokens, length, weights)
    elif options.method == "diep":
        yield from _search(options.diep.filled(), passes, tokens, length, weights)
    else:
        yield _statistics("calibrating", passes, tokens, length, weights)


def smaller(config: DecoderConfig, sparsity: float) -> DecoderConfig:
    """The result, every layer cut by the same share."""
    layers = []
    for layer in config.layers:
        if layer.moe is not None:
            kept = max(layer.moe.experts_per_token, _kept(layer.moe.experts, sparsity))
            layer = replace(layer, moe=replace(layer.moe, experts=kept, groups=layer.moe.groups[:kept]))
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def _kept(count: int, sparsity: float) -> int:
    return max(1, count - round(sparsity * count))


@dataclass(frozen=True)
class _Resident:
    """Bytes of weights in memory while a layer, or the whole model, is computed with."""

    model: Planned
    dtype: torch.dtype
    device: Device

    @property
    def _each(self) -> float:
        """Of a weight: as stored where that is computed with, converted otherwise, on a processor beside the map."""
        stored, converted = self.model.bytes_per_weight, float(self.dtype.itemsize)
        if self.model.stay_packed or (stored == converted and self.dtype == self.model.dtype):
            return stored
        return converted + (stored if self.device.maps_weights else 0.0)

    def layer(self, passes: Passes) -> float:
        """The largest of them, or the embedding, which is read before."""
        outer = passes.config.vocabulary_size * passes.config.hidden_size
        return self._each * max(outer, *(passes.layer_weights(index) for index in range(len(passes.config.layers))))

    def whole(self, passes: Passes) -> float:
        """All layers, embedding and head."""
        return self._each * passes.weights


def _streaming(passes: Passes, tokens: int, length: int) -> float:
    return passes.batch_bytes(tokens, length) + passes.kept_bytes(tokens)


def _statistics(name: str, passes: Passes, tokens: int, length: int, weights: _Resident) -> Phase:
    # Similarities wait until the batches are through, and their memory is the larger or the smaller of the two.
    most = max(passes.batch_bytes(tokens, length), held_bytes(passes.config, tokens))
    return Phase(name, passes.statistics(tokens, length), weights.layer(passes) + passes.kept_bytes(tokens) + most)


def _perplexity(name: str, passes: Passes, tokens: int, length: int, weights: _Resident) -> Phase:
    memory = weights.layer(passes) + _streaming(passes, tokens, length)
    return Phase(name, passes.streamed(tokens, length) + passes.head(tokens), memory)


def _gate_gradients(sampled: bool, passes: Passes, tokens: int, length: int, weights: _Resident) -> Phase:
    work = passes.gradient(tokens, length) + passes.head(tokens, products=2) + Work(read_bytes=passes.file_bytes)
    if sampled:
        work += passes.sampling(tokens)
    return Phase("gate gradients", work, weights.whole(passes) + passes.gradient_bytes(tokens, length))


def _search(diep: DiepOptions, passes: Passes, tokens: int, length: int, weights: _Resident) -> Iterator[Phase]:
    """compress.methods.diep: F(x) once, then epochs of passes with gradients through the relaxed layer."""
    whole = weights.whole(passes)
    if diep.start == "fisher":
        yield _gate_gradients(True, passes, tokens, length, weights)
    read = Work() if diep.start == "fisher" else Work(read_bytes=passes.file_bytes)
    memory = whole + _streaming(passes, tokens, length)
    yield Phase("full hidden states", passes.forward(tokens, length) + read, memory)
    # The relaxation of the paper mixes all experts of a layer, the others the K that the router chooses.
    every = passes.config.experts_by_layer if diep.relaxation == "paper" else None
    epoch = passes.gradient(tokens, length, every) + passes.head(tokens, products=2)
    memory = whole + passes.gradient_bytes(tokens, length, every) + passes.kept_bytes(tokens)
    yield Phase(f"searching ({diep.epochs} epochs)", epoch * diep.epochs, memory)


def shown(figures: Mapping[str, Any]) -> list[list[str]]:
    """A table for people: phases, then all of them together."""
    from compress.report.columns import size

    def cells(name: str, row: Mapping[str, Any], memory: int) -> list[str]:
        return [name, f"{row['flops'] / 1e12:,.2f}", size(row["bytes_moved"]), f"{row['seconds']:,.1f}", size(memory)]

    head = ["", "TFLOP", "bytes moved", "seconds", "memory"]
    rows = [cells(row["phase"], row, row["memory_bytes"]) for row in figures["phases"]]
    return [head, *rows, cells("whole run, peak", figures, figures["peak_memory_bytes"])]
