"""Text from a checkpoint: prefill the prompts, then step and postprocess until every sequence has ended.

A batch moves in step: prompts of different lengths are padded on the left, and each sequence ends for itself at an end
token, a stop string or its limit.

Shape suffixes: B batch, L new positions, P all positions so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.artifact import compare_checksums
from engine.checkpoint import Checkpoint, ModelDirectory, end_tokens, load_tokenizer, resolve
from engine.errors import OptionError
from engine.kv_cache import KeyValueCache
from engine.linear import decoding, prepare_decoding
from engine.model import Decoder
from engine.onnx_runtime import OnnxDecoder, backend_of, open_exported
from engine.report import ExportedSkipCounter, Report, SkipCounter, peak_memory_bytes, rate
from engine.sampling import SamplingOptions, sample
from engine.skip_tables import load_skip_tables, skipping_routings
from engine.text_stream import TextStream, plain_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GREEDY = SamplingOptions()
PREFILL_CHUNK = 512
"""Positions of a prompt that are read at a time."""


@dataclass(frozen=True)
class Generation:
    """What one prompt was continued with."""

    text: str
    """Without the prompt, special tokens and whatever a stop string cut off."""
    token_ids: tuple[int, ...]
    """Every generated token, the end token included."""
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    """"stop" at an end token or stop string, "length" at the limit."""


class Engine:
    """A loaded checkpoint that generates and reports what that cost."""

    def __init__(self, checkpoint: ModelDirectory, decoder: Decoder | OnnxDecoder, skipping: bool = False) -> None:
        """`skipping`: the decoder's routings leave slots empty and are to be counted."""
        self.checkpoint = checkpoint
        self.decoder = decoder
        self.device = decoder.device
        self.dtype = decoder.dtype
        self.skip_counter: SkipCounter | None = None
        if isinstance(decoder, OnnxDecoder):
            self.skip_counter = ExportedSkipCounter(decoder) if decoder.skips else None
        elif skipping:
            self.skip_counter = SkipCounter(decoder.moe_blocks, self.device)
        if self.skip_counter is not None:
            self.skip_counter.attach()
        self._last: _Batch | None = None

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        skip_threshold: float = 0.0,
        skip_min_experts: int = 1,
        backend: str = "auto",
        checksums: bool = False,
    ) -> Engine:
        """Open a directory, a hub id or `demo`; weights are mapped, not read, where device and dtype allow it.

        Raises CheckpointError, UnsupportedError, and OptionError for what this machine or model cannot honour.
        `threads` holds for the whole process. `backend`: "torch" for checkpoints, "onnx" for what was exported, or "auto".
        `checksums`: first compare every file with what was written.
        """
        set_threads(threads)
        directory = resolve(str(model))
        if checksums:
            compare_checksums(directory)
        if backend_of(directory, backend) == "onnx":
            if skip_threshold > 0:
                raise OptionError("an exported model skips what it was exported to; give the skip threshold to the export")
            exported = ModelDirectory(directory)
            return cls(exported, open_exported(exported, device, dtype))
        place = resolve_device(device)
        checkpoint = Checkpoint(directory)
        config = checkpoint.config
        tables = load_skip_tables(checkpoint.directory, config) if skip_threshold > 0 else None
        routings = skipping_routings(config, tables, skip_threshold, skip_min_experts, place)
        decoder = Decoder(config, checkpoint.source(resolve_dtype(dtype, checkpoint), place)).eval()
        for block, routing in zip(decoder.moe_blocks, routings, strict=True):
            block.routing = routing
        return cls(checkpoint, decoder, skipping=skip_threshold > 0)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded when first needed."""
        return load_tokenizer(self.checkpoint)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return end_tokens(self.checkpoint)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are computed with; tied ones count once."""
        return self.decoder.weights_bytes

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Raises OptionError for an empty one where the model has no token to begin with."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise OptionError("the prompt is not valid UTF-8; give it in that encoding") from error
        ids: list[int] = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise OptionError("the prompt is empty and this model has no token to begin with; give a prompt")
        return ids

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> list[Generation]:
        """Continue each prompt, all in one batch. OptionError for prompts or limits that do not fit the model."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not prompts:
            return []
        batch = self._start(prompts, max_new_tokens, sampling, stop)
        for _ in self._run(batch):
            pass
        return [_generation(sequence) for sequence in batch.sequences]

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """The text of `generate` in pieces as it comes, in whole characters; the same errors, raised at once."""
        batch = self._start([prompt], max_new_tokens, sampling, stop)
        return (piece for _ in self._run(batch) if (piece := batch.sequences[0].take()))

    def report(self) -> Report:
        """What the last run cost. Raises OptionError before any run."""
        if self._last is None:
            raise OptionError("nothing was generated yet, so there is nothing to report")
        return self._last.report()

    def prefill(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: KeyValueCache) -> Tensor:
        """Read the new tokens into the cache; logits [B, V] of the last position.

        Beside the cache, the memory that this takes does not grow with the prompt: PREFILL_CHUNK positions are read at a
        time, with the rotary angles of the whole. An exported graph reads all at once.
        """
        decoder, first, last = self.decoder, cache.length, cache.length + tokens_BL.shape[1]
        cache.read_as = last if real_BP is None else int(real_BP[:, :last].sum(-1).max())
        with torch.inference_mode():
            while isinstance(decoder, Decoder) and cache.length + PREFILL_CHUNK < last:
                start, end = cache.length, cache.length + PREFILL_CHUNK
                decoder.hidden_states(tokens_BL[:, start - first : end - first], self._seen(real_BP, start, end), cache)
            start = cache.length
            return decoder.last_logits(tokens_BL[:, start - first :], self._seen(real_BP, start, last), cache)

    def _seen(self, real_BP: Tensor | None, start: int, end: int) -> Tensor | None:
        """Which positions before `end` are real; only such from `start` on are counted in the next forward."""
        seen_BP = None if real_BP is None else real_BP[:, :end]
        if self.skip_counter is not None:
            self.skip_counter.counted_T = None if seen_BP is None else seen_BP[:, start:].flatten()
        return seen_BP

    def step(self, tokens_B: Tensor, real_BP: Tensor | None, cache: KeyValueCache) -> Tensor:
        """One more token of each sequence; logits [B, V] that follow it."""
        with torch.inference_mode(), decode_kernels(tokens_B.shape[0], self.dtype, self.device):
            return self.decoder.last_logits(tokens_B[:, None], real_BP, cache)

    def _start(
        self, prompts: Sequence[str], max_new_tokens: int, sampling: SamplingOptions, stop: str | Sequence[str]
    ) -> _Batch:
        _ = self.tokenizer, self.end_tokens  # loaded by the first run, and no part of what it took
        prepare_decoding(self.dtype, self.device)
        started = time.perf_counter()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not text for text in stops):
            raise OptionError("a stop string is empty; leave it out to generate up to the limit")
        ids = [self.encode(prompt) for prompt in prompts]
        _check_room(max(map(len, ids)), max_new_tokens, self.checkpoint.config.max_positions)
        decode = partial(plain_text, self.tokenizer)
        sequences = [TextStream(prompt, max_new_tokens, self.end_tokens, stops, decode) for prompt in ids]
        if self.skip_counter is not None:
            self.skip_counter.reset()
        self._last = _Batch(self, sequences, max_new_tokens, sampling, started)
        return self._last

    def _run(self, batch: _Batch) -> Iterator[None]:
        """The loop. Yields after each token, with no torch mode left switched over to the consumer."""
        cache = batch.new_cache()
        logits_BV = self.prefill(batch.tokens_BL, batch.real(cache), cache)
        while True:
            tokens_B = batch.postprocess(logits_BV)
            yield
            if batch.done:
                return
            batch.resume()
            logits_BV = self.step(tokens_B, batch.real(cache), cache)


class _Batch:
    """Sequences that move in step: their tokens, their padding and their clock. It outlives the run, for the report."""

    def __init__(
        self,
        engine: Engine,
        sequences: list[TextStream],
        max_new_tokens: int,
        sampling: SamplingOptions,
        started: float,
    ) -> None:
        self.sequences = sequences
        self._sampling = sampling
        self._generator = sampling.generator(engine.device)
        self._counter = engine.skip_counter
        self._engine = engine
        self._kv_cache_bytes = 0
        prompts, later = [sequence.prompt for sequence in sequences], max_new_tokens - 1  # the last token is not read again
        self.tokens_BL, real_BP = left_padded(prompts, later)
        self._padded = not bool(real_BP.all())
        self.tokens_BL, self._real_BP = self.tokens_BL.to(engine.device), real_BP.to(engine.device)
        self._evaluations = self.prompt_tokens  # tokens that went through the layers
        self._started = self._resumed = started
        self._prefill_started = time.perf_counter()
        self._first_token_at: float | None = None
        self._decode_seconds = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, padding not counted."""
        return sum(len(sequence.prompt) for sequence in self.sequences)

    @property
    def done(self) -> bool:
        """Every sequence has ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def new_cache(self) -> KeyValueCache:
        """An empty cache as large as the batch can need."""
        engine, (rows, capacity) = self._engine, self._real_BP.shape
        cache = KeyValueCache(engine.checkpoint.config, rows, capacity, engine.dtype, engine.device)
        self._kv_cache_bytes = cache.bytes
        return cache

    def real(self, cache: KeyValueCache) -> Tensor | None:
        """Bool [B, P] for the next forward, None where nothing is padded."""
        if not self._padded:
            return None
        new = 1 if cache.length else self.tokens_BL.shape[1]
        return self._real_BP[:, : cache.length + new]

    def postprocess(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token of each sequence and let those still going take it; int64 [B]."""
        with torch.inference_mode():
            tokens_B = sample(logits_BV, self._sampling, self._generator)
        for sequence, token in zip(self.sequences, tokens_B.tolist(), strict=True):
            if not sequence.finish_reason:
                sequence.append(token)
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
        else:
            self._decode_seconds += now - self._resumed
        return tokens_B

    def resume(self) -> None:
        """Before a step: the consumer's time ends here, and ended sequences are no longer counted."""
        self._resumed = time.perf_counter()
        going = [not sequence.finish_reason for sequence in self.sequences]
        self._evaluations += sum(going)
        if self._counter is not None:
            self._counter.counted_T = None if all(going) else torch.tensor(going, device=self._real_BP.device)

    def report(self) -> Report:
        """The figures so far."""
        engine = self._engine
        generated = sum(len(sequence.tokens) for sequence in self.sequences)
        first_token_at = self._prefill_started if self._first_token_at is None else self._first_token_at
        layers = [layer.moe for layer in engine.checkpoint.config.layers if layer.moe is not None]
        asked = self._evaluations * sum(moe.experts_per_token for moe in layers)
        counter = self._counter
        return Report(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=generated,
            time_to_first_token_seconds=first_token_at - self._started,
            prefill_tokens_per_second=rate(self.prompt_tokens, first_token_at - self._prefill_started),
            tokens_per_second=rate(generated - len(self.sequences), self._decode_seconds),
            peak_memory_bytes=peak_memory_bytes(),
            weights_bytes=engine.weights_bytes,
            kv_cache_bytes=self._kv_cache_bytes,
            experts_skipped_share=0.0 if counter is None else counter.share,
            experts_skipped_share_per_layer=[0.0] * len(layers) if counter is None else counter.share_per_layer,
            experts_read=asked if counter is None else counter.filled,
        )


def left_padded(prompts: Sequence[Sequence[int]], more: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, L], and which of them and of `more` places behind them are real, bool [B, P]."""
    longest = max(map(len, prompts))
    tokens_BL = torch.zeros(len(prompts), longest, dtype=torch.int64)
    real_BP = torch.ones(len(prompts), longest + more, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
        real_BP[row, : longest - len(prompt)] = False
    return tokens_BL, real_BP


def _generation(sequence: TextStream) -> Generation:
    """The result, once ended."""
    prompt, new = len(sequence.prompt), len(sequence.tokens)
    return Generation(sequence.text, tuple(sequence.tokens), prompt, new, sequence.finish_reason)


@contextmanager
def decode_kernels(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """The faster matrix products for few rows in half precision on a CPU: compiled ones, or torch's instead of oneDNN's.

    With one row, oneDNN's products take up to twice as long as torch's own; with the many rows of prefill they are the
    faster ones.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    # torch.backends.mkldnn.flags is the public way, but warns about TF32 on each use, and warnings are errors here.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and rows > 1)
    try:
        with decoding():
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises OptionError for an unknown device and for CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r} is not known; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("device 'cuda' was asked for and torch finds none; use --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """`auto` is the checkpoint's own. Raises OptionError for what cannot be computed in."""
    if name != "auto" and name not in DTYPES:
        raise OptionError(f"dtype {name!r} is not known; choose auto, {', '.join(DTYPES)}")
    dtype = checkpoint.model_dtype if name == "auto" else DTYPES[name]
    if dtype not in (*DTYPES.values(), torch.float64):
        raise OptionError(f"{checkpoint.directory} is stored in {dtype}; choose a dtype: {', '.join(DTYPES)}")
    return dtype


def set_threads(count: int | None) -> None:
    """Threads of torch for the whole process; None leaves them. Raises OptionError below 1."""
    if count is not None and count < 1:
        raise OptionError(f"threads is {count}; it must be at least 1")
    if count is not None:
        torch.set_num_threads(count)


def _check_room(prompt_tokens: int, max_new_tokens: int, max_positions: int) -> None:
    if max_new_tokens < 1:
        raise OptionError(f"the number of new tokens is {max_new_tokens}; it must be at least 1")
    if prompt_tokens + max_new_tokens > max_positions:
        raise OptionError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones make {prompt_tokens + max_new_tokens}, "
            f"and the model has {max_positions} positions; shorten the prompt or ask for fewer tokens"
        )
