"""`compress densify` of an encoder-decoder mixture: a dense checkpoint of the sibling family (Cruz Salinas et al.)."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from calibrate.pairs import DEFAULT_LENGTH, Pairs, text_pairs, tokenised
from calibrate.statistics import effective_experts, usage_shares
from compress.dense.dense_plan import check_ffns, choose
from compress.dense.encoder_decoder import (
    Usage,
    check_nothing_is_lost,
    dense_row,
    dense_student,
    layer_errors,
    learned_scales,
    planned,
    saved_tensors,
    usage,
)
from compress.dense.encoder_decoder_training import TOKEN_ACCURACY, Measured, measure, train
from compress.options.densify import SELECTIONS, DensifyOptions
from compress.plans.apply import carried_files
from compress.plans.plan import Plan, plan_from_json, plan_to_json
from compress.report import canvas
from compress.report.card import model_card, training_lines
from compress.report.figures import DensifyPairsFigures
from compress.report.pictures import Picture, draw_token_accuracy, draw_training, draw_usage
from compress.run.claims import claims_output
from compress.run.job import Run
from compress.run.losses import before_and_after
from compress.run.result import check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from compress.training.training import Trained
from engine.checkpoint.artifact import whole_or_nothing, write_provenance
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.errors import CheckpointError, OptionError
from engine.families.results import as_dense_encoder_decoder
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter
from engine.generation.report import peak_memory_bytes
from engine.passes import processes
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

ERROR_PAIRS = 64
"""Number of calibration pairs on which the error of each layer is measured."""


@dataclass
class PreparedPairs:
    """Inputs that have passed all checks."""

    checkpoint: EncoderDecoderCheckpoint
    teacher: nn.Module
    pairs: dict[str, Pairs]
    """Pairs by split: "training" and "validation" only where something is trained, "held-out" only where something is
    measured.
    """
    ffns: int
    length: int

    def fingerprints(self) -> dict[str, str]:
        """Return the identity of model and pairs, as JSON."""
        texts = {f"{name}_{side}": ids for name, own in self.pairs.items() for side, ids in _sides(own).items()}
        digests = {name: hashlib.sha256(ids.numpy().tobytes()).hexdigest() for name, ids in texts.items()}
        return self.checkpoint.identity() | digests


PairsRun = Run[DensifyOptions, PreparedPairs]


def _sides(pairs: Pairs) -> dict[str, Tensor]:
    return {"source": pairs.source_PS, "target": pairs.target_PM}


@claims_output
def densify_encoder_decoder(options: DensifyOptions, progress: Progress = no_progress) -> DensifyPairsFigures:
    """Run the job; return the figures of the result, with the keys of `compress densify --json`.

    Several processes share the training. Each does all other work itself, and the first writes.
    """
    started = time.monotonic()
    work = WorkDirectory(options.output)
    if processes.count() > 1 and not options.training.steps:
        raise OptionError(
            "several processes share only the training, and there is none; give --distill-steps, or run without torchrun"
        )
    checkpoint = EncoderDecoderCheckpoint(resolve(options.model))
    if (figures := finished_before(options, work, checkpoint.identity)) is not None:
        return cast(DensifyPairsFigures, figures)
    check_outputs(options)
    prepared = prepare(options, checkpoint)
    checkpoint.check_finite(lambda names: progress(processes.share(list(names)), "checking weights"))
    with work.until_whole(options.output):
        work.begin(options.deciding() | prepared.fingerprints(), options.resume)
        before = work.once("held_out_before", lambda: _measured(prepared.teacher, prepared))
        run = Run(options, prepared, work, progress, started)
        made = _student(run)
        written = _write(run, made, before) if processes.is_first() else None
        return cast(DensifyPairsFigures, processes.told(written))


def prepare(options: DensifyOptions, checkpoint: EncoderDecoderCheckpoint) -> PreparedPairs:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    options.training.check()
    ffns = 1 if options.ffns is None else options.ffns
    _check_options(options, checkpoint, ffns)
    as_dense_encoder_decoder(checkpoint.raw_config, ffns)
    end = checkpoint.config.eos_token_id
    calibration, counts = options.calibration, _pair_counts(options)
    tokenizer = load_tokenizer_of(checkpoint.directory, checkpoint.config.vocab_size)
    assert calibration.data is not None
    texts = text_pairs(calibration.data, calibration.seed)
    length = calibration.sequence_length or DEFAULT_LENGTH
    end = end[0] if isinstance(end, list) else end
    common = {"tokenizer": tokenizer, "length": length, "end": end, "name": calibration.data}
    pairs = {split: tokenised(texts, split, count, **common) for split, count in counts.items()}
    teacher = checkpoint.load(options.dtype or checkpoint.model_dtype, options.device)
    check_nothing_is_lost(teacher, checkpoint)
    return PreparedPairs(checkpoint, teacher, pairs, ffns, length)


def _check_options(options: DensifyOptions, checkpoint: EncoderDecoderCheckpoint, ffns: int) -> None:
    if checkpoint.row.dense_sibling is None or not checkpoint.experts:
        raise OptionError(f"{options.model}: is not a mixture of experts ({checkpoint.row.model_type}); it is dense already")
    if options.select not in SELECTIONS:
        raise OptionError(f"select is {options.select!r}; it must be one of {', '.join(SELECTIONS)}")
    check_ffns(ffns, checkpoint.experts)
    if options.statistics is not None:
        raise OptionError("--statistics are of decoders' experts; leave it out for an encoder-decoder")
    if options.training.shard:
        raise OptionError("--shard spreads a decoder; leave it out for an encoder-decoder")
    if options.training.offload_teacher:
        raise OptionError("--offload-teacher reads a decoder's layers one by one; leave it out for an encoder-decoder")
    if options.calibration.data is None:
        raise OptionError(
            "an encoder-decoder needs pairs of source and target; give --data FILE.jsonl, or stdlib for a synthetic task"
        )
    if options.calibration.samples < 1 or options.calibration.evaluation_samples < 0:
        raise OptionError("samples must be at least 1, and evaluation samples not negative")


def _pair_counts(options: DensifyOptions) -> dict[str, int]:
    """Return the number of pairs that the run needs of each split that it uses."""
    training = options.training
    counts = {"calibration": options.calibration.samples, "held-out": options.calibration.evaluation_samples}
    if training.steps:
        counts |= {
            "training": training.steps * training.batch_size * processes.count(),
            "validation": training.validation_samples,
        }
    return {split: count for split, count in counts.items() if count}


HeldOutPairs = dict[str, list[float]] | None
"""Sums over the target of each held-out pair, by their names in Measured, as JSON; None where there are no pairs."""


def _measured(model: nn.Module, prepared: PreparedPairs) -> HeldOutPairs:
    """Return what was measured on the held-out pairs. Raises CheckpointError for NaN."""
    if "held-out" not in prepared.pairs:
        return None
    found = measure(model, prepared.pairs["held-out"], prepared.checkpoint.config)
    if not math.isfinite(found.perplexity):
        raise CheckpointError(f"{prepared.checkpoint.directory}: its predictions are not finite; try --dtype float32")
    return {each.name: getattr(found, each.name).tolist() for each in fields(found)}


def _quality(before: HeldOutPairs, after: HeldOutPairs) -> dict[str, float | None]:
    """Return perplexity and token accuracy before and after, with errors over pairs, and the ratio of the perplexities."""
    if before is None or after is None:
        names = [f"{name}_{time}" for name in ("perplexity", "token_accuracy") for time in ("before", "after")]
        names += [f"{name}_stderr" for name in names] + [f"perplexity_ratio{end}" for end in ("", "_low", "_high")]
        return dict.fromkeys(names)
    first, then = (
        Measured(**{name: torch.tensor(own, dtype=torch.float64) for name, own in each.items()}) for each in (before, after)
    )
    accuracies = {"token_accuracy_before": first, "token_accuracy_after": then}
    return (
        before_and_after("perplexity", first.losses, then.losses, first.pairs_P)
        | {name: own.token_accuracy for name, own in accuracies.items()}
        | {f"{name}_stderr": own.token_accuracy_error for name, own in accuracies.items()}
    )


@dataclass(frozen=True)
class Student:
    """The dense model before its fold."""

    plan: Plan
    parameters: Mapping[str, Tensor]
    """Parameters by name, tied ones once; FFNs of sparse layers are not yet folded."""
    figures: dict[str, Any]
    trained: Trained
    seen: Usage


def _student(run: PairsRun) -> Student:
    """Select experts, measure their error against the mixture, and train."""
    options, prepared = run.options, run.prepared
    checkpoint, teacher, calibration = prepared.checkpoint, prepared.teacher, prepared.pairs["calibration"]
    seen = usage(teacher, checkpoint, calibration, run.bar("calibrating (batches)"))
    plan = plan_from_json(run.work.once("plan", lambda: plan_to_json(_plan(options, prepared, seen))))
    student = dense_student(plan, teacher, checkpoint, options.dtype or checkpoint.model_dtype, options.device)
    errors = layer_errors(student, teacher, checkpoint, seen, calibration.take(slice(ERROR_PAIRS)))
    parameters: Mapping[str, Tensor] = dict(student.named_parameters())
    trained = Trained()
    if options.training.steps:
        trained = _trained(run, student)
        parameters = trained.tensors
    own = {
        "selected_experts": _selected(plan, checkpoint),
        "block_error_per_layer": [error.whole for error in errors],
        "router_weight_error_per_layer": [error.weight for error in errors],
        "training": trained.parts,
        "scales_per_layer": learned_scales(parameters, checkpoint),
        "mixture_validation_token_accuracy": _mixture_accuracy(run),
    }
    return Student(plan, parameters, own | _usage_figures(seen), trained, seen)


def _mixture_accuracy(run: PairsRun) -> float | None:
    """Return the mixture's token accuracy on the pairs that the best state is chosen by; None where there are none."""
    prepared = run.prepared
    if "validation" not in prepared.pairs:
        return None
    return measure(prepared.teacher, prepared.pairs["validation"], prepared.checkpoint.config).token_accuracy


def _trained(run: PairsRun, student: nn.Module) -> Trained:
    options, prepared, pairs = run.options, run.prepared, run.prepared.pairs
    return train(
        student,
        prepared.teacher,
        prepared.checkpoint,
        pairs["training"],
        pairs.get("validation", pairs["calibration"].take(slice(0))),
        options.training,
        directory=run.work.path,
        resume=options.resume,
        progress=run.progress,
    )


def _write(run: PairsRun, made: Student, before: HeldOutPairs) -> DensifyPairsFigures:
    """Fold and write the model, measure and describe it, and rename its directory."""
    options, prepared, checkpoint = run.options, run.prepared, run.prepared.checkpoint
    with whole_or_nothing(options.output, options.overwrite) as directory:
        write_dense(directory, saved_tensors(made.parameters, checkpoint), checkpoint, prepared.ffns)
        result = EncoderDecoderCheckpoint(directory)
        after = _measured(result.load(options.dtype or checkpoint.model_dtype, options.device), prepared)
        own = _figures(options, prepared, result, before, after) | made.figures
        own |= {"seconds": time.monotonic() - run.started, "peak_memory_bytes": peak_memory_bytes()}
        figures = cast(DensifyPairsFigures, own)
        title = f"{options.model}, dense: {prepared.ffns} experts of each layer as one FFN"
        pictures = _draw(run, made, directory) if canvas.available() else []
        card = model_card(figures, options.model, (), False, pictures, title, _card(figures), loader="AutoModelForSeq2SeqLM")
        (directory / "README.md").write_text(card, encoding="utf-8")
        write_provenance(directory, _provenance(options, checkpoint, made.plan, figures))
    if options.plan_output is not None:
        write_json(options.plan_output, plan_to_json(made.plan))
    return figures


def _draw(run: PairsRun, made: Student, directory: Path) -> list[Picture]:
    """Draw usage of experts, the training, and its token accuracy beside that of the mixture."""
    checkpoint, label = run.prepared.checkpoint, run.options.output.name
    layers = {index: _layer_name(name) for index, name in enumerate(checkpoint.experts)}
    chosen = dict(enumerate(_selected(made.plan, checkpoint).values()))
    pictures = [draw_usage(directory, Path(run.options.model).name, made.seen.statistics, chosen, layers)]
    pictures += draw_training(directory, label, made.trained.histories)
    curves = {part: further[TOKEN_ACCURACY] for part, further in made.trained.further.items() if further}
    mixture = made.figures["mixture_validation_token_accuracy"]
    return [*pictures, draw_token_accuracy(directory, label, curves, mixture)] if curves else pictures


def _layer_name(name: str) -> str:
    """Return "encoder layer 1" for "encoder.1"."""
    stack, layer = name.split(".")
    return f"{stack} layer {layer}"


def _plan(options: DensifyOptions, prepared: PreparedPairs, seen: Usage) -> Plan:
    chosen = choose(options.select, seen.statistics, prepared.ffns, options.calibration.seed)
    return planned(chosen, seen.statistics, prepared.teacher, prepared.checkpoint)


def write_dense(directory: Path, tensors: Mapping[str, Tensor], checkpoint: EncoderDecoderCheckpoint, ffns: int) -> None:
    """Write weights, config, and the mixture's other files that apply to the sibling unchanged."""
    width = ffns * int(getattr(checkpoint.config, checkpoint.row.width_key))
    with ShardWriter(directory, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    write_json(directory / "config.json", as_dense_encoder_decoder(checkpoint.raw_config, width))
    for path in carried_files(checkpoint.directory):
        shutil.copyfile(path, directory / path.name)


def _selected(plan: Plan, checkpoint: EncoderDecoderCheckpoint) -> dict[str, list[Any]]:
    """Return, by layer, every expert whose weights are part of the result, ascending."""
    return {
        name: sorted(source.expert for part in plan.layers[index][0].parts for source in part.sources)
        for index, name in enumerate(checkpoint.experts)
    }


def _figures(
    options: DensifyOptions,
    prepared: PreparedPairs,
    result: EncoderDecoderCheckpoint,
    before: HeldOutPairs,
    after: HeldOutPairs,
) -> dict[str, Any]:
    source, held_out = prepared.checkpoint, prepared.pairs.get("held-out")
    family = dense_row(source.row).model_type
    dense_layers = sum(source.layers.values()) - len(source.experts)
    note = f"an ordinary {family}"
    if prepared.ffns > 1 and dense_layers:
        note += (
            f"; it has one width for all FFNs, so those of the {dense_layers} layers that were dense before have zero units "
            f"up to {prepared.ffns} times their width, which change nothing"
        )
    return {
        "artifact": str(options.output),
        "method": "densify",
        "sparsity": 1.0,
        "experts_before": sum(source.experts.values()),
        "experts_after": 0,
        "experts_per_layer": [],
        "parameters_before": source.parameters,
        "parameters_after": result.parameters,
        "bytes_before": source.bytes,
        "bytes_after": result.bytes,
        **_quality(before, after),
        "evaluation": f"the targets of {len(held_out) if held_out else 0} held-out pairs of {options.calibration.data}",
        "sequences_cut": sum(pairs.cut for pairs in prepared.pairs.values()),
        "sequence_length": prepared.length,
        "ffns": prepared.ffns,
        "select": options.select,
        "family": family,
        "family_note": note,
        "layers": list(source.experts),
    }


def _usage_figures(seen: Usage) -> dict[str, Any]:
    layers = seen.statistics.layers.values()
    return {
        "router_weight_per_layer": [float(own.weight_sum.sum() / own.tokens.clamp_min(1)) for own in layers],
        "dropped_share_per_layer": seen.dropped_shares,
        "top_expert_share_per_layer": [float(usage_shares(own).max()) for own in layers],
        "effective_experts_per_layer": [effective_experts(own) for own in layers],
    }


def _provenance(
    options: DensifyOptions, checkpoint: EncoderDecoderCheckpoint, plan: Plan, figures: DensifyPairsFigures
) -> dict[str, Any]:
    return {
        "source": {"model": options.model} | checkpoint.identity(),
        "method": figures["method"],
        "options": options.recorded(),
        "seed": options.calibration.seed,
        "plan": plan_to_json(plan),
        "plan_layers": list(checkpoint.experts),
        "experts_per_layer": figures["experts_per_layer"],
        "skip_tables": None,
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")},
    }


def _card(figures: DensifyPairsFigures) -> Sequence[str]:
    columns = (
        figures["block_error_per_layer"],
        figures["router_weight_error_per_layer"],
        figures["dropped_share_per_layer"],
    )
    rows = [
        f"| {layer} | {' '.join(map(str, figures['selected_experts'][layer]))} "
        f"| {error:.0%} | {weight:.0%} | {dropped:.1%} |"
        for layer, error, weight, dropped in zip(figures["layers"], *columns, strict=True)
    ]
    return [
        f"It is {figures['family_note']}.",
        f"Experts were chosen by `{figures['select']}`; which, and how far the layer's output then was from the MoE block's",
        "(mean over tokens of the length of the difference, relative to the output's), before any training. The router's",
        "probability depends on the input; here it is its mean, which alone makes the error of the next column. The last is",
        "the share of tokens that an expert's capacity left out; they are in none of these means.",
        "",
        "| layer | experts | error | of a mean probability alone | dropped |",
        "| ---: | --- | ---: | ---: | ---: |",
        *rows,
        "",
        *training_lines(figures["training"]),
    ]
