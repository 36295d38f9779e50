"""Cost of a run of `compress prune` before it starts, from config.json alone.

A run is a sequence of phases (cost/phases.py). The operations of each phase are counted (cost/counts.py) and divided by the
speeds of a Device (cost/devices.py). The memory of a phase is that of resident weights, hidden states, statistics and
gradients. Scores and their optimizer state (DiEP's α and β with Adam's moments) are a few numbers for each expert and are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from calibrate.chosen import chosen_of
from calibrate.options import CalibrationOptions
from calibrate.statistics import load_statistics
from compress.cost.counts import OperationCounts, Passes
from compress.cost.decoding import Machine, decoding_bytes, predicted_decoding, slots_within
from compress.cost.devices import DEVICES, Device, measured, reading_speed
from compress.cost.disk import DiskSpeed, measured_disk
from compress.cost.phases import PassCosts, Phase, Planned, Resident, kept_of, perplexity_phase, statistics_phase
from compress.methods import METHODS
from compress.methods.criterion import criterion_of
from compress.options.plan_run import RunOptions
from compress.report.figures import DecodingFigures, PhaseFigures, PlanRunFigures
from compress.run.result import SKIP_TABLE_SEQUENCES
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.compressed_floats import formats_of
from engine.checkpoint.hub import is_hub_id, split
from engine.checkpoint.model_directory import DEMO, DEMO_DIRECTORY
from engine.checkpoint.mxfp4 import is_packed
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.expert_cache.policies import BEST
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.rotary_embedding import Rotary
from engine.families.wrappers import language_model
from engine.files.gguf_file import is_gguf
from engine.files.json_file import load_json
from engine.kernels.stored.scheme import WHOLE_ROW, Scheme
from engine.passes.memory_budget import UNLIMITED

PICTURE_SECONDS = 1.0, 0.1
"""Seconds to draw the pictures of a result, and further seconds for each layer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def config_path(model: str) -> Path:
    """Return the config.json of MODEL: `demo`, a local directory, or a hub id, of which only that file is downloaded.

    A GGUF file describes itself, and its own path is returned.
    """
    if model == DEMO:
        return DEMO_DIRECTORY / "config.json"
    path = Path(model)
    if is_gguf(path) and path.exists():
        return path
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
    """Return sizes and storage from config.json, or from the header of a GGUF file. Raises a CompressError for a config
    that is not supported.
    """
    if is_gguf(path):
        model = Checkpoint(path)
        if not model.config.moe_layers:
            raise OptionError(f"{path}: has no experts to spare")
        return Planned(model.config, model.model_dtype, model.bytes / model.parameters, False)
    try:
        raw, _ = language_model(load_json(path, "model config"))
        config, formats, packed = decoder_config(raw), formats_of(raw), is_packed(raw)
        Rotary(config)
    except (CheckpointError, UnsupportedError) as error:
        where = "" if str(error).startswith(str(path)) else f"{path.parent}: "
        raise type(error)(f"{where}{error}") from error
    if not config.moe_layers:
        raise OptionError(f"{path.parent}: has no experts to spare")
    dtype = DTYPES.get(str(raw.get("dtype", raw.get("torch_dtype", "bfloat16"))), torch.bfloat16)
    if formats.schemes:
        bytes_per_weight = max(map(_bytes_per_weight, formats.schemes))
    elif packed:
        bytes_per_weight = 17 / 32  # blocks of 32 4-bit numbers with one exponent
    elif formats.nvfp4:
        bytes_per_weight = 9 / 16  # 4-bit numbers, and a byte for each 16
    else:
        bytes_per_weight = float(dtype.itemsize) if formats.float8 is None else 1.0
    return Planned(config, dtype, bytes_per_weight, bool(formats.schemes))


def _bytes_per_weight(scheme: Scheme) -> float:
    """Return the bytes of a weight, with its share of a scale of two bytes; such a share of a whole row is left out."""
    return scheme.bits / 8 + (0.0 if scheme.group_size == WHOLE_ROW else 2 / scheme.group_size)


def plan_run(options: RunOptions) -> PlanRunFigures:
    """Return the figures of `compress plan-run --json`. No weights are read, except to measure the disk."""
    options.check()
    path = config_path(options.model)
    model = planned_model(path)
    calibration = options.calibration.sized(options.model == DEMO, model.config.max_positions)
    dtype = options.dtype or model.dtype
    chosen = _chosen(options, model.config)
    device = _device(options, model.config, dtype)
    phases = list(planned_phases(options, model, calibration, dtype, device))
    start = Phase("start", OperationCounts(), 0.0, device.start_seconds)
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
        "decoding": _decoding(options, path, before, dtype, device, calibration.sequence_length, chosen),
    }


def _chosen(options: RunOptions, config: DecoderConfig) -> dict[int, Tensor] | None:
    """Return the experts of the tokens of the statistics file, by decoder layer; None without one."""
    if options.statistics is None:
        return None
    return chosen_of(load_statistics(options.statistics, config), str(options.statistics))


def _decoding(
    options: RunOptions,
    path: Path,
    passes: Passes,
    dtype: torch.dtype,
    device: Device,
    length: int,
    chosen: dict[int, Tensor] | None,
) -> DecodingFigures | None:
    """Return the figures of decoding within --memory-limit; None without it. The disk is measured unless it is given."""
    if options.memory_limit is None:
        return None
    sizes = decoding_bytes(passes, length, dtype)
    slots_within(options.memory_limit, device.base_bytes, sizes, passes.config)  # before anything is measured
    if options.disk_speed is not None:
        disk = DiskSpeed(options.disk_speed, "given")
    else:
        files = [path] if is_gguf(path) else sorted(path.parent.glob("*.safetensors"))
        disk = measured_disk([file for file in files if file.is_file()], sizes.slot)
    seed = options.calibration.seed
    machine = Machine(device.base_bytes, reading_speed(), disk)
    return predicted_decoding(passes, dtype, machine, options.memory_limit, length, chosen, seed)


def _row(phase: Phase, device: Device, dtype: torch.dtype) -> PhaseFigures:
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
    rows = max(16, UNLIMITED.tokens_per_batch * moe.experts_per_token // moe.experts)
    return measured(dtype, rows, config.hidden_size, moe.expert_width, config.vocabulary_size)


def planned_phases(
    options: RunOptions, model: Planned, calibration: CalibrationOptions, dtype: torch.dtype, device: Device
) -> Iterator[Phase]:
    """Yield the phases of `compress prune`, in order."""
    assert calibration.sequence_length is not None
    length, weights = calibration.sequence_length, Resident(model, dtype, device)
    before = Passes(model.config, dtype.itemsize, model.bytes_per_weight)
    result = smaller(model.config, options.sparsity, METHODS[options.method].granularity)
    after = Passes(result, dtype.itemsize, model.bytes_per_weight)
    held_out, tokens = calibration.evaluation_samples * length, calibration.samples * length
    yield Phase("checking weights", OperationCounts(read_bytes=before.file_bytes), 64 << 20)
    if held_out:
        yield perplexity_phase("perplexity before", PassCosts(before, held_out, length, weights))
    yield from criterion_of(options.method).phases(PassCosts(before, tokens, length, weights), options)
    kept = after.file_bytes
    yield Phase("writing", OperationCounts(read_bytes=kept, written_bytes=kept), 128 << 20)
    own = min(calibration.samples, SKIP_TABLE_SEQUENCES) * length
    yield statistics_phase("skip tables", PassCosts(after, own, length, weights))
    if held_out:
        yield perplexity_phase("perplexity after", PassCosts(after, held_out, length, weights))
    fixed, each = PICTURE_SECONDS
    yield Phase("pictures", OperationCounts(), 64 << 20, fixed + each * len(model.config.moe_layers))


def smaller(config: DecoderConfig, sparsity: float, granularity: str) -> DecoderConfig:
    """Return the result's config, with every layer cut by the same share of its experts, or of their hidden units."""
    layers = []
    for layer in config.layers:
        if layer.moe is not None and granularity == "unit":
            width = kept_of(layer.moe.expert_width, sparsity)
            layer = replace(layer, moe=replace(layer.moe, expert_width=width, expert_widths=()))
        elif layer.moe is not None:
            kept = max(layer.moe.experts_per_token, kept_of(layer.moe.experts, sparsity))
            layer = replace(layer, moe=replace(layer.moe, experts=kept, groups=layer.moe.groups[:kept]))
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def shown(figures: PlanRunFigures) -> list[list[str]]:
    """Return a table for people: each phase, then the total."""
    from compress.report.columns import size

    def cells(name: str, row: PhaseFigures | PlanRunFigures, memory: int) -> list[str]:
        return [name, f"{row['flops'] / 1e12:,.2f}", size(row["bytes_moved"]), f"{row['seconds']:,.1f}", size(memory)]

    head = ["", "TFLOP", "bytes moved", "seconds", "memory"]
    rows = [cells(row["phase"], row, row["memory_bytes"]) for row in figures["phases"]]
    return [head, *rows, cells("whole run, peak", figures, figures["peak_memory_bytes"])]


def shown_decoding(figures: DecodingFigures) -> list[list[str]]:
    """Return a table for people: each policy of the expert cache, the default first."""
    head = ["experts kept by", "in memory", "read per token", "tokens/s", "reading ahead"]
    from compress.report.columns import size

    rows = [
        [
            f"{name}, in hindsight" if name == BEST else name,
            f"{row['hit_rate']:.1%}",
            size(int(row["read_bytes_per_token"])),
            f"{row['tokens_per_second']:,.2f}",
            f"{row['tokens_per_second_reading_ahead']:,.2f}",
        ]
        for name, row in figures["policies"].items()
    ]
    return [head, *rows]
