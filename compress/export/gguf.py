"""`compress export --format gguf`: a GGUF file, read back and compared with the engine before it gets its name."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calibrate.batches import calibration_texts
from calibrate.product_inputs import InputSums, collect_inputs
from compress.export.parity import LENGTHS, TEXTS, Allowed, Reference, check_steps, compared, sequences
from compress.options.export import GGUF_TYPES, STORED, GgufExportOptions
from compress.run.claims import claiming
from engine.checkpoint.artifact import check_file_output
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.imatrix_file import write_imatrix
from engine.checkpoint.gguf.vocabulary import tokenizer_metadata, without_tokenizer
from engine.checkpoint.gguf.writer import GgufRoundedCheckpoint, write_gguf
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.stored_views import MXFP4
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import own_routings
from engine.errors import CheckpointError, CompressError, ExportError, UnsupportedError
from engine.families.gguf.description import Description, described
from engine.families.gguf.mixes import ALIASES, WRITTEN_TYPES, WrittenType, tensor_types, types_by_form
from engine.files.gguf_file import SUFFIX, check_name
from engine.files.gguf_types import BlockType
from engine.files.json_file import replacing
from engine.generation.report import peak_memory_bytes
from engine.progress import Progress, no_progress

assert set(GGUF_TYPES) == {*WRITTEN_TYPES, *ALIASES, STORED}
_ALLOWED = Allowed(1e-4, 1e-4)
"""Both sides compute in float32 with the numbers that the file keeps."""
_TEXTS = (*TEXTS, "don't  stop\n\n  12345 67 héllo 🚀 你好", "he\u0301llo \u1112\u1161\u11ab", "a", "")
"""Texts whose tokens are compared."""


def export_gguf(options: GgufExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Write the file and return the figures. Nothing is left where the file differs from the model."""
    with claiming(None, options.output, options.imatrix_output):
        return _export(options, progress)


def _export(options: GgufExportOptions, progress: Progress) -> dict[str, Any]:
    started = time.monotonic()
    outputs = [output for output in (options.output, options.imatrix_output) if output is not None]
    for output in outputs:
        check_file_output(output, options.overwrite)
    check_name(options.output)
    checkpoint, problem = Checkpoint(resolve(options.model)), None
    if checkpoint.gguf is not None:
        for output in outputs:
            checkpoint.gguf.check_output(output)
    try:
        description = described(checkpoint.config)
        types, written = _types(options, checkpoint, description)
    except UnsupportedError as error:
        raise UnsupportedError(f"{options.model}: {error}") from error
    try:
        tokenizer = tokenizer_metadata(checkpoint)
    except UnsupportedError as error:
        tokenizer, problem = without_tokenizer(checkpoint), str(error)
    inputs = _inputs(options, checkpoint, progress) if options.reads_text else _Inputs()
    about = {"general.name": Path(options.model).name.removesuffix(SUFFIX), "general.file_type": written.number} | tokenizer
    weights = inputs.sums.squares
    with ExitStack() as named:
        partial = named.enter_context(replacing(options.output, "GGUF file", SUFFIX))
        try:
            write_gguf(partial, checkpoint, description, types, about, lambda each: progress(each, "writing"), weights)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{options.model}: {error}") from error
        try:
            _compare_tokens(checkpoint, partial, tokenizer)
            rounded = GgufRoundedCheckpoint(checkpoint.directory, description, types, weights)
            difference = _compare(rounded, Checkpoint(partial), progress)
        except CompressError as error:
            said = str(error).replace(str(partial), str(options.output))
            raise ExportError(f"{options.output}: the file differs from the engine: {said}; it was removed") from error
        if options.imatrix_output is not None:
            other = named.enter_context(replacing(options.imatrix_output, "importance matrix", SUFFIX))
            write_imatrix(other, description, weights, inputs.sums.tokens, *inputs.text)
    return {
        "artifact": str(options.output.absolute()),
        "format": options.format,
        "type": options.type,
        "tensors_by_type": dict(Counter(kind.name for kind in types.values())),
        "experts_per_layer": list(checkpoint.config.experts_per_layer),
        "parameters": checkpoint.parameters,
        "imatrix": None if options.imatrix_output is None else str(options.imatrix_output.absolute()),
        "calibration_tokens": inputs.sequences * inputs.length,
        "max_abs_logit_difference": difference,
        "tokenizer_problem": problem,
        "bytes": options.output.stat().st_size,
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _types(
    options: GgufExportOptions, checkpoint: Checkpoint, description: Description
) -> tuple[dict[str, BlockType], WrittenType]:
    """Return the type of every tensor of the file, and that of the file."""
    if options.type != STORED:
        written = WRITTEN_TYPES[ALIASES.get(options.type, options.type)]
        return tensor_types(description, written), written

    def form_of(source: str) -> int | str | None:
        scheme = checkpoint.scheme(source)
        if scheme is None:
            return MXFP4 if checkpoint.is_packed(source) and not checkpoint.nvfp4 else None
        return scheme.bits

    if all(form_of(source) is None for tensor in description.tensors for source in tensor.sources):
        raise UnsupportedError("has no low-bit weights, whose types --type stored would take; give another --type")
    return types_by_form(description, form_of)


class _Inputs(NamedTuple):
    """The inputs of products, and the text on which they were collected."""

    sums: InputSums = InputSums()
    data: str = ""
    sequences: int = 0
    length: int = 0

    @property
    def text(self) -> tuple[str, int, int]:
        """Return the text's source and shape."""
        return self[1:]


def _inputs(options: GgufExportOptions, checkpoint: Checkpoint, progress: Progress) -> _Inputs:
    calibration = options.calibration.filled(checkpoint)
    tokens_SL, _ = calibration_texts(calibration, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
    assert calibration.data is not None
    sums = collect_inputs(
        checkpoint,
        tokens_SL,
        dtype=options.dtype or checkpoint.model_dtype,
        device=options.device,
        progress=lambda layers: progress(layers, "inputs of products (layers)"),
    )
    return _Inputs(sums, calibration.data, *tokens_SL.shape)


@torch.inference_mode()
def _compare(expected: Checkpoint, found: Checkpoint, progress: Progress) -> float:
    """Return the largest |difference of a logit| for short texts. Raises ExportError for one beyond the limits."""
    length = min(max(LENGTHS), expected.config.max_positions)
    tokens_SL, names = sequences(expected.config.vocabulary_size, length, lambda: load_tokenizer(expected))
    both = [
        Reference(each, tokens_SL, own_routings(each.config, each.source(torch.float32)), lambda x: progress(x, "comparing"))
        for each in (found, expected)
    ]
    with both[0].states, both[1].states:
        rows = range(len(names))
        logits = [[each.logits(row, 0, length) for row in rows] for each in both]
    pairs = zip(names, *logits, strict=True)
    steps = [compared("logits", f"a {name} text of {length} tokens", *pair) for name, *pair in pairs]
    check_steps(steps, _ALLOWED)
    return max(step.largest for step in steps)


def _compare_tokens(checkpoint: Checkpoint, path: Path, tokenizer: dict[str, Any]) -> None:
    """Raise ExportError if the tokenizer in the file gives a text other tokens than the model's own."""
    if "tokenizer.ggml.tokens" not in tokenizer:
        return
    own, read = load_tokenizer(checkpoint), load_tokenizer(Checkpoint(path))
    for text in _TEXTS:
        if own(text)["input_ids"] != read(text)["input_ids"]:
            raise ExportError(f"its tokenizer gives the text {text[:40]!r} other tokens")
