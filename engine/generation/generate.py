"""Text generation from a checkpoint: prefill the prompts, then step and postprocess until every sequence has ended.

The sequences of a batch advance together: prompts of different lengths are padded on the left, and each sequence ends
by itself at an end token, a stop string or its limit.

Shape suffixes: B batch, L new positions, P all positions so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine.checkpoint.artifact import compare_checksums
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.checkpoint.tokenizer import check_same_tokens, end_tokens, load_tokenizer
from engine.checkpoint.tokenizer_checks import tokenizing
from engine.decoder.kv_cache import KV_CACHE_DTYPES, KeyValueCache, position_bytes, state_bytes
from engine.decoder.model import Decoder
from engine.decoder.prediction import PredictionLayer
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.decoder.triton_experts import use_triton
from engine.errors import CompressError, OptionError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.files.image_file import pictures_of
from engine.generation.options import GenerateOptions, OpenOptions, SamplingOptions
from engine.generation.prediction_draft import OWN_LAYERS, PredictionReader, check_predicts, open_prediction
from engine.generation.report import (
    ExportedSkipCounter,
    Report,
    SkipCounter,
    memory_split,
    peak_memory_bytes,
    rate,
    resident_weights_bytes,
)
from engine.generation.sampling import penalised_rows, sample
from engine.generation.speculative import DraftReader, Reader, Speculation
from engine.generation.text_stream import TextStream, plain_text
from engine.kernels.devices import resolve_device, set_threads
from engine.kernels.kernel_choice import (
    COMPILED_MAX_ROWS,
    DECODING,
    PROMPT,
    KernelChoice,
    block_types_multiplied,
    prepare_decoding,
)
from engine.onnx.runtime import OnnxDecoder, backend_of, open_exported
from engine.progress import Progress, no_progress
from engine.transformers_models.adapted_checkpoint import (
    AdaptedCheckpoint,
    open_image_checkpoint,
    open_mixture_checkpoint,
)
from engine.transformers_models.adapted_decoder import AdaptedCache, AdaptedDecoder
from engine.transformers_models.adapted_pass import routings_of
from engine.transformers_models.image_reader import ImagePrompt, ImageReader, check_vision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Cache = KeyValueCache | AdaptedCache
GREEDY = SamplingOptions()
PREFILL_CHUNK = 512
"""Prompt positions in one forward pass of the prefill."""


@dataclass(frozen=True)
class Generation:
    """Continuation of one prompt."""

    text: str
    """Generated text, without the prompt, special tokens and the text from a stop string on."""
    token_ids: tuple[int, ...]
    """All generated tokens, including the end token."""
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    """"stop" at an end token or stop string, "length" at the limit."""


class Engine:
    """A loaded checkpoint that generates text and reports time and memory."""

    def __init__(
        self, checkpoint: ModelDirectory, decoder: Decoder | OnnxDecoder | AdaptedDecoder, skipping: bool = False
    ) -> None:
        """`skipping`: the decoder's routings leave slots empty, and the empty slots are counted."""
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
        if isinstance(decoder, AdaptedDecoder):
            decoder.counter = self.skip_counter
        self.draft: Engine | None = None
        """Engine of the draft model, whose tokens this one verifies; None without a draft."""
        self.prediction: PredictionLayer | None = None
        """Layer for multi-token prediction that drafts in place of another model; None where none does."""
        self.draft_tokens = OpenOptions.draft_tokens
        self.skip_rule = OpenOptions.skip_rule
        """Rule by which requests skip experts (engine/decoder/skip_tables.py)."""
        self.kv_cache_dtype = decoder.dtype
        """Dtype of the KV cache."""
        self.load_seconds = 0.0
        """Duration of `open` in seconds."""
        self.prompt_kernels, self.decoding_kernels = PROMPT, DECODING
        """Kernels that compute the products of prompts and of decoding, on the threads that the model was opened with."""
        self.progress: Progress = no_progress
        """Shows the compilation of kernels, where there is any."""
        self.image_reader: ImageReader | None = None
        """The model's processor of images, once `open_images` was called."""
        self._last: _Batch | None = None

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        device: str = OpenOptions.device,
        dtype: str = OpenOptions.dtype,
        threads: int | None = OpenOptions.threads,
        skip_threshold: float = OpenOptions.skip_threshold,
        skip_min_experts: int = OpenOptions.skip_min_experts,
        skip_rule: str = OpenOptions.skip_rule,
        backend: str = OpenOptions.backend,
        checksums: bool = OpenOptions.checksums,
        draft: str | Path | None = OpenOptions.draft,
        draft_tokens: int = OpenOptions.draft_tokens,
        kv_cache_dtype: str = OpenOptions.kv_cache_dtype,
        images: bool = False,
        progress: Progress = no_progress,
    ) -> Engine:
        """Open a directory, a hub id or `demo`; weights are memory-mapped and not read, if device and dtype allow it.

        Raises CheckpointError, UnsupportedError, and OptionError for options that this machine or model does not
        support. `threads` applies to the whole process. `backend`: "torch" for checkpoints, "onnx" for exported models,
        or "auto". `kv_cache_dtype`: dtype of the KV cache, "float16", "bfloat16" or "int8", or "auto" for the compute
        dtype; the compiled attention kernels support bfloat16 only. `checksums`: first compare every file with its
        recorded checksum. `draft`: a smaller model with the same tokenizer, which proposes `draft_tokens` tokens at a
        time; it never changes the distribution of the text, only the speed (Leviathan et al. 2023); or "mtp": the model's
        own layers for multi-token prediction. `images`: prompts may
        have images; transformers then runs the whole model, also one of a family that our own decoder runs. `progress`:
        shows the compilation of kernels, where there is any.
        """
        started = time.perf_counter()
        if not 1 <= draft_tokens < COMPILED_MAX_ROWS:
            raise OptionError(f"draft tokens are {draft_tokens}; they must be from 1 to {COMPILED_MAX_ROWS - 1}")
        set_threads(threads)
        directory = resolve(str(model))
        if images and draft is not None:
            raise OptionError("a draft reads no images; leave out the draft, or the images")
        if checksums:
            compare_checksums(directory)
        predicts = draft == OWN_LAYERS
        drafting = None if draft is None or predicts else resolve(str(draft))
        if drafting is not None or predicts:
            _check_pair(directory, drafting)
        if backend_of(directory, backend) == "onnx":
            if skip_threshold > 0:
                raise OptionError("an exported model has a fixed skip threshold; give the skip threshold to the export")
            if kv_cache_dtype != "auto":
                raise OptionError("an exported model has its own KV cache; leave the KV cache dtype at auto")
            if images:
                raise OptionError("an exported model reads text only; leave out the images, or take the checkpoint")
            exported = ModelDirectory(directory)
            engine = cls(exported, open_exported(exported, device, dtype))
            engine.load_seconds = time.perf_counter() - started
            return engine
        checkpoint = open_image_checkpoint(directory) if images else open_mixture_checkpoint(directory)
        place = resolve_device(device) if not isinstance(checkpoint, AdaptedCheckpoint) else _cpu(checkpoint, device)
        config = checkpoint.config
        tables = load_skip_tables(checkpoint.directory, config) if skip_threshold > 0 else None
        computed = resolve_dtype(dtype, checkpoint)
        kept = resolve_kv_cache_dtype(kv_cache_dtype, computed, checkpoint)
        own = routings_of(checkpoint, computed, place)
        routings = skipping_routings(config, tables, skip_threshold, skip_min_experts, place, own=own, rule=skip_rule)
        decoder: Decoder | AdaptedDecoder
        if isinstance(checkpoint, AdaptedCheckpoint):
            decoder = AdaptedDecoder(checkpoint, computed, progress)
        else:
            blocks = block_types_multiplied(computed, place)
            decoder = Decoder(config, checkpoint.weights(computed, place, blocks)).eval()
        if computed != checkpoint.model_dtype or place.type != "cpu":
            checkpoint.release()  # all weights were copied
        for block, routing in zip(decoder.moe_blocks, routings, strict=True):
            block.routing = routing
        if place.type == "cuda":
            use_triton(decoder.moe_blocks)
        engine = cls(checkpoint, decoder, skipping=skip_threshold > 0)
        engine.kv_cache_dtype, engine.progress, engine.skip_rule = kept, progress, skip_rule
        engine.prompt_kernels, engine.decoding_kernels = PROMPT.with_threads(threads), DECODING.with_threads(threads)
        if images:
            engine.open_images()
        engine.load_seconds = time.perf_counter() - started
        if drafting is not None:
            engine.draft = cls.open(drafting, device=device, dtype=dtype, checksums=checksums, progress=progress)
        if predicts:
            engine.prediction = open_prediction(checkpoint, computed, place)
        engine.draft_tokens = draft_tokens
        return engine

    def open_images(self) -> None:
        """Load the model's processor of images, and the parts of the model that read them.

        Raises CheckpointError, UnsupportedError and OptionError for a model that reads no images here.
        """
        if not isinstance(self.decoder, AdaptedDecoder):
            check_vision(self.checkpoint.directory)
            raise UnsupportedError(
                f"{self.checkpoint.directory}: our own decoder runs this model, and it reads text only; open it for images "
                "(generate --image, serve --images, Engine.open(images=True)), so that transformers runs the whole model"
            )
        reader = ImageReader(self.checkpoint.directory, self.checkpoint.config.vocabulary_size)
        self.decoder.load_images()
        self.image_reader = reader

    @cached_property
    def images_refusal(self) -> str | None:
        """Why prompts cannot have images, without the path of the model; None if they can.

        Its first use loads what reads images, where transformers runs the model.
        """
        try:
            if self.image_reader is None:
                self.open_images()
        except CompressError as error:
            directory = self.checkpoint.directory
            reason = str(error).removeprefix(f"{directory}: ").replace(f"{directory}/", "")
            return reason.replace(str(directory), directory.name)
        return None

    def prepare(self) -> None:
        """Load the kernels that this model decodes with, so that the first token does not wait for them."""
        if isinstance(self.decoder, Decoder):
            prepare_decoding(self.dtype, self.device, self.decoder.kernels_needed, self.progress)
        elif isinstance(self.decoder, AdaptedDecoder):
            self.decoder.prepare()

    @cached_property
    def cache_sizes(self) -> tuple[int, int]:
        """Bytes of the cache for each position of a sequence, and for its states, whatever its length."""
        if isinstance(self.decoder, AdaptedDecoder):
            return self.decoder.cache_sizes
        config, dtype = self.checkpoint.config, self.kv_cache_dtype
        return position_bytes(config, dtype), state_bytes(config, dtype)

    def new_cache(self, sequences: int, capacity: int) -> Cache:
        """Return an empty cache with this many positions for each sequence of a batch; that of transformers grows."""
        if isinstance(self.decoder, AdaptedDecoder):
            return self.decoder.new_cache()
        return KeyValueCache(self.checkpoint.config, sequences, capacity, self.kv_cache_dtype, self.device)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint, loaded when first needed."""
        return load_tokenizer(self.checkpoint)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return end_tokens(self.checkpoint)

    @property
    def weights_resident_bytes(self) -> int:
        """Bytes of the weights in memory: all weights, or the resident pages of memory-mapped ones."""
        if self.device.type != "cpu":
            return 0
        if not isinstance(self.checkpoint, Checkpoint) or isinstance(self.decoder, OnnxDecoder):
            return self.weights_bytes
        return resident_weights_bytes(self.decoder.weights, (file.path for file in self.checkpoint.files))

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in the compute dtype; tied weights count once."""
        own = 0 if self.prediction is None else sum(weight.nbytes for weight in self.prediction.parameters())
        return self.decoder.weights_bytes + own

    @property
    def bytes_read_per_token(self) -> float | None:
        """Average bytes of weights read per token when decoding one sequence, given the share of skipped experts so far.

        None for an exported model.
        """
        if isinstance(self.decoder, OnnxDecoder):
            return None
        blocks, counter = self.decoder.moe_blocks, self.skip_counter
        return self.decoder.bytes_read_per_token([0.0] * len(blocks) if counter is None else counter.share_per_layer)

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises OptionError for an empty prompt if the model has no token to begin with.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise OptionError("the prompt is not valid UTF-8; give it in that encoding") from error
        with tokenizing(self.checkpoint.directory):
            ids: list[int] = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise OptionError("the prompt is empty and this model has no begin token; give a prompt")
        return ids

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = GenerateOptions.tokens,
        sampling: SamplingOptions = GREEDY,
        stop: str | Sequence[str] = (),
        images: Sequence[Any] = (),
    ) -> list[Generation]:
        """Continue all prompts in one batch. Raises OptionError for prompts or limits that do not fit the model.

        images: image files, or images of Pillow, which each prompt is about. The prompt is then a user's message of the chat
        template, and is answered; call this in the main thread.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not prompts:
            return []
        batch = self._start(prompts, max_new_tokens, sampling, stop, images)
        for _ in self._run(batch):
            pass
        return [_generation(sequence) for sequence in batch.sequences]

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = GenerateOptions.tokens,
        sampling: SamplingOptions = GREEDY,
        stop: str | Sequence[str] = (),
        images: Sequence[Any] = (),
    ) -> Iterator[str]:
        """Yield the text of `generate` in pieces of whole characters as it is generated. Errors are raised immediately."""
        batch = self._start([prompt], max_new_tokens, sampling, stop, images)
        return (piece for _ in self._run(batch) if (piece := batch.sequences[0].take()))

    def report(self) -> Report:
        """Return time and memory of the last run. Raises OptionError before any run."""
        if self._last is None:
            raise OptionError("nothing was generated yet, so there is nothing to report")
        return self._last.report()

    def prefill(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache) -> Tensor:
        """Read the new tokens into the cache and return the logits [B, V] of the last position.

        Activations do not grow with the prompt: PREFILL_CHUNK positions are read at a time, with the rotary angles of
        the whole prompt. An exported graph and transformers read all positions at once.
        """
        decoder, first, last = self.decoder, cache.length, cache.length + tokens_BL.shape[1]
        cache.read_as = last if real_BP is None else int(real_BP[:, :last].sum(-1).max())
        with torch.inference_mode():
            while isinstance(decoder, Decoder) and cache.length + PREFILL_CHUNK < last:
                start, end = cache.length, cache.length + PREFILL_CHUNK
                piece, seen = tokens_BL[:, start - first : end - first], self._seen(real_BP, start, end)
                decoder.hidden_states(piece, seen, _own(cache), self.prompt_kernels)
            start = cache.length
            piece, seen = tokens_BL[:, start - first :], self._seen(real_BP, start, last)
            return self._last_logits(piece, seen, cache, self.prompt_kernels)

    def _last_logits(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache, choice: KernelChoice) -> Tensor:
        """Return the logits of the last position, [B, V]. Only our own decoder leaves the choice of kernels."""
        if isinstance(self.decoder, Decoder):
            return self.decoder.last_logits(tokens_BL, real_BP, _own(cache), choice)
        return self.decoder.last_logits(tokens_BL, real_BP, cast(Any, cache))

    def _seen(self, real_BP: Tensor | None, start: int, end: int) -> Tensor | None:
        """Return which positions before `end` are real; the skip counter counts only the real ones from `start` on."""
        seen_BP = None if real_BP is None else real_BP[:, :end]
        if self.skip_counter is not None:
            self.skip_counter.counted_T = None if seen_BP is None else seen_BP[:, start:].flatten()
        return seen_BP

    def step(self, tokens_B: Tensor, real_BP: Tensor | None, cache: Cache) -> Tensor:
        """Read one more token of each sequence and return the logits [B, V] after it."""
        with torch.inference_mode(), torch_products(tokens_B.shape[0], self.dtype, self.device):
            return self._last_logits(tokens_B[:, None], real_BP, cache, self.decoding_kernels)

    def steps(self, tokens_BL: Tensor, cache: Cache) -> Tensor:
        """Read several known tokens of each sequence in one forward pass and return the logits [B, L, V] after each."""
        assert isinstance(self.decoder, Decoder), "only our own decoder has such a forward"
        with torch.inference_mode(), torch_products(tokens_BL.numel(), self.dtype, self.device):
            return self.decoder.step_logits(tokens_BL, _own(cache), self.decoding_kernels)

    def _start(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: str | Sequence[str],
        images: Sequence[Any],
    ) -> _Batch:
        _ = self.tokenizer, self.end_tokens  # loaded by the first run, and not counted in its time
        for engine in self._engines:
            engine.prepare()
        started = time.perf_counter()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not text for text in stops):
            raise OptionError("a stop string is empty; leave it out to generate up to the limit")
        read = self._read(prompts, images)
        ids = [prompt.token_ids for prompt in read]
        if (self.draft is not None or self.prediction is not None) and len(ids) > 1:
            raise OptionError(
                f"a draft model works on one prompt at a time, and {len(ids)} were given; give one, or no draft"
            )
        for engine in self._engines:
            name = "the model" if engine is self else "the draft"
            _check_room(max(map(len, ids)), max_new_tokens, engine.checkpoint.config, name)
        decode = partial(plain_text, self.tokenizer)
        sequences = [TextStream(prompt, max_new_tokens, self.end_tokens, stops, decode) for prompt in ids]
        if self.skip_counter is not None:
            self.skip_counter.reset()
        inputs = [prompt.inputs for prompt in read if prompt.inputs]
        self._last = _Batch(self, sequences, max_new_tokens, sampling, started, inputs)
        return self._last

    def _read(self, prompts: Sequence[str], images: Sequence[Any]) -> list[ImagePrompt]:
        """Return the token ids of prompts, with the inputs of the images where there are any."""
        if not images:
            return [ImagePrompt(self.encode(prompt), {}) for prompt in prompts]
        pictures = pictures_of(images)
        if self.image_reader is None:
            self.open_images()
        assert self.image_reader is not None
        return [self.image_reader.prompt(prompt, pictures) for prompt in prompts]

    def _run(self, batch: _Batch) -> Iterator[None]:
        """Run the generation loop. Yields after each forward pass, with torch's global modes restored for the consumer."""
        watching = self.decoder if isinstance(self.decoder, Decoder) else None
        if watching is None or self.prediction is None:
            yield from self._rounds(batch)
            return
        watching.watch = batch.watch(watching, self.prediction)
        try:
            yield from self._rounds(batch)
        finally:
            watching.watch = None

    def _rounds(self, batch: _Batch) -> Iterator[None]:
        cache = batch.new_cache(self)
        logits_BV = self.prefill(batch.tokens_BL, batch.real(cache), cache)
        speculation = batch.speculate(cache)
        tokens_B = batch.postprocess(logits_BV)
        batch.grew(cache)
        yield
        while not batch.done:
            batch.resume()
            if speculation is None:
                tokens_B = batch.postprocess(self.step(tokens_B, batch.real(cache), cache))
                batch.grew(cache)
            else:
                (sequence,) = batch.sequences
                batch.take([speculation.round(sequence.prompt, sequence.tokens, sequence.room)])
            yield

    @property
    def _engines(self) -> list[Engine]:
        """This engine and its draft, if any."""
        return [self] if self.draft is None else [self, self.draft]


class _Batch:
    """Sequences that advance together: their tokens, padding and clock. The object outlives the run, for the report."""

    def __init__(
        self,
        engine: Engine,
        sequences: list[TextStream],
        max_new_tokens: int,
        sampling: SamplingOptions,
        started: float,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        self.sequences = sequences
        self._sampling, self._images = sampling, images
        self._generator = sampling.generator(engine.device)
        self._counter = engine.skip_counter
        self._engine = engine
        self._kv_cache_bytes = 0
        self._draft: DraftReader | None = None
        self._speculation: Speculation | None = None
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
        """Number of tokens of all prompts, without padding."""
        return sum(len(sequence.prompt) for sequence in self.sequences)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def new_cache(self, engine: Engine) -> Cache:
        """Return an empty cache that is large enough for the whole batch."""
        cache = engine.new_cache(*self._real_BP.shape)
        if isinstance(cache, AdaptedCache):
            cache.images = self._images
        self._kv_cache_bytes += cache.bytes
        return cache

    def grew(self, cache: Cache) -> None:
        """Take the size of a cache after a forward pass: that of transformers grows with its sequences."""
        self._kv_cache_bytes = max(self._kv_cache_bytes, cache.bytes)

    def watch(self, decoder: Decoder, layer: PredictionLayer) -> Callable[[Tensor], None]:
        """Return what takes the decoder's hidden states, so that its own layer for multi-token prediction drafts."""
        own = self._engine
        reader = PredictionReader(decoder, layer, self._real_BP.shape[1], own.kv_cache_dtype)
        reader.kernels = own.prompt_kernels, own.decoding_kernels
        self._kv_cache_bytes += reader.cache.bytes
        self._draft = reader
        return reader.watch

    def speculate(self, cache: Cache) -> Speculation | None:
        """Return the rounds of drafting, where there is a draft; `cache` is the target's, which has read the prompt.

        A draft model reads it here.
        """
        own = self._engine
        if own.draft is not None:
            draft_cache = self.new_cache(own.draft)
            own.draft.prefill(self.tokens_BL, None, draft_cache)
            self._draft = Reader(own.draft.steps, _own(draft_cache))
        if self._draft is not None:
            target = Reader(own.steps, _own(cache))
            self._speculation = Speculation(target, self._draft, own.draft_tokens, self._sampling, self._generator)
        return self._speculation

    def real(self, cache: Cache) -> Tensor | None:
        """Return the mask of real positions for the next forward, bool [B, P]; None if nothing is padded."""
        if not self._padded:
            return None
        new = 1 if cache.length else self.tokens_BL.shape[1]
        return self._real_BP[:, : cache.length + new]

    def postprocess(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token of each sequence, append it to the unfinished ones, and return the tokens, int64 [B]."""
        with torch.inference_mode():
            logits_BV = penalised_rows(logits_BV, [sequence.tokens for sequence in self.sequences], self._sampling)
            tokens_B = sample(logits_BV, self._sampling, self._generator)
        self.take(tokens_B[:, None].tolist())
        return tokens_B

    def take(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append the next tokens to each sequence, up to its end."""
        for sequence, following in zip(self.sequences, tokens, strict=True):
            for token in following:
                if not sequence.finish_reason:
                    sequence.append(token)
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
        else:
            self._decode_seconds += now - self._resumed

    def resume(self) -> None:
        """Restart the clock after the consumer's time, and exclude ended sequences from the counts."""
        self._resumed = time.perf_counter()
        going = [not sequence.finish_reason for sequence in self.sequences]
        self._evaluations += sum(going)
        if self._counter is not None:
            self._counter.counted_T = None if all(going) else torch.tensor(going, device=self._real_BP.device)

    def report(self) -> Report:
        """Return the figures of the run so far."""
        engine = self._engine
        generated = sum(len(sequence.tokens) for sequence in self.sequences)
        first_token_at = self._prefill_started if self._first_token_at is None else self._first_token_at
        layers = [layer.moe for layer in engine.checkpoint.config.layers if layer.moe is not None]
        speculation = self._speculation
        proposed = 0 if speculation is None else speculation.proposed
        asked = (self._evaluations + proposed) * sum(moe.experts_per_token for moe in layers)
        counter = self._counter
        return Report(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=generated,
            time_to_first_token_seconds=first_token_at - self._started,
            prefill_tokens_per_second=rate(self.prompt_tokens, first_token_at - self._prefill_started),
            tokens_per_second=rate(generated - len(self.sequences), self._decode_seconds),
            peak_memory_bytes=peak_memory_bytes(),
            weights_bytes=sum(each.weights_bytes for each in engine._engines),
            **memory_split(sum(each.weights_resident_bytes for each in engine._engines), self._kv_cache_bytes),
            load_seconds=sum(each.load_seconds for each in engine._engines),
            experts_skipped_share=0.0 if counter is None else counter.share,
            experts_skipped_share_per_layer=[0.0] * len(layers) if counter is None else counter.share_per_layer,
            experts_read=asked if counter is None else counter.filled,
            weights_read_bytes_per_token=engine.bytes_read_per_token,
            draft_acceptance_rate=speculation.accepted / proposed if speculation and proposed else None,
            tokens_per_target_forward=(generated - 1) / speculation.rounds if speculation and speculation.rounds else None,
        )


def _own(cache: Cache) -> KeyValueCache:
    """Return the cache of our own decoder."""
    assert isinstance(cache, KeyValueCache), "the cache is of another decoder"
    return cache


def left_padded(prompts: Sequence[Sequence[int]], more: int) -> tuple[Tensor, Tensor]:
    """Return the padded tokens, int64 [B, L], and the mask of real positions with `more` later ones, bool [B, P]."""
    longest = max(map(len, prompts))
    tokens_BL = torch.zeros(len(prompts), longest, dtype=torch.int64)
    real_BP = torch.ones(len(prompts), longest + more, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
        real_BP[row, : longest - len(prompt)] = False
    return tokens_BL, real_BP


def _generation(sequence: TextStream) -> Generation:
    """Return the result of an ended sequence."""
    prompt, new = len(sequence.prompt), len(sequence.tokens)
    return Generation(sequence.text, tuple(sequence.tokens), prompt, new, sequence.finish_reason)


@contextmanager
def torch_products(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let torch compute products of one row in half precision on a CPU by its own code, in place of oneDNN's.

    With one row, oneDNN's products take up to twice as long; with several rows they are faster. The switch belongs to
    torch and to the whole process, so it is put back after each step.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    # torch.backends.mkldnn.flags is the public API, but it warns about TF32 on each use, and warnings are errors here.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and rows > 1)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def resolve_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the compute dtype; `auto` is the checkpoint's own. Raises OptionError for an unsupported dtype."""
    if name != "auto" and name not in DTYPES:
        raise OptionError(f"dtype {name!r} is not known; choose auto, {', '.join(DTYPES)}")
    dtype = checkpoint.model_dtype if name == "auto" else DTYPES[name]
    if dtype not in (*DTYPES.values(), torch.float64):
        raise OptionError(f"{checkpoint.directory} is stored in {dtype}; choose a dtype: {', '.join(DTYPES)}")
    return dtype


def _cpu(checkpoint: AdaptedCheckpoint, device: str) -> torch.device:
    """Return the device of a model that transformers runs. Raises OptionError for any but the CPU."""
    if device not in ("auto", "cpu"):
        raise OptionError(
            f"{checkpoint.directory}: a model of the family {checkpoint.model_type} runs through transformers here, on the "
            f"CPU only; device is {device!r}, choose auto or cpu"
        )
    return AdaptedDecoder.device


def resolve_kv_cache_dtype(name: str, computed: torch.dtype, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the KV cache; `auto` is the compute dtype.

    Raises OptionError for an unknown dtype, and for any but `auto` with latent attention or a cache of transformers.
    """
    if name == "auto":
        return computed
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise OptionError(
            f"{checkpoint.directory}: transformers keeps the cache of a model of the family {checkpoint.model_type} in the "
            "compute dtype; leave the KV cache dtype at auto"
        )
    if checkpoint.config.latent is not None:
        raise OptionError(
            f"{checkpoint.directory}: latent attention keeps the compute dtype; leave the KV cache dtype at auto"
        )
    if name not in KV_CACHE_DTYPES:
        raise OptionError(f"KV cache dtype {name!r} is not known; choose auto, {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[name]


def _check_pair(target: Path, draft: Path | None) -> None:
    """Raise OptionError unless `draft`, or for None the model's own layers, can draft for `target`."""
    for directory in (target,) if draft is None else (target, draft):
        if backend_of(directory, "auto") == "onnx":
            raise OptionError(f"{directory}: is an exported model, and drafting needs checkpoints; give both as such")
        checkpoint = open_mixture_checkpoint(directory)
        if isinstance(checkpoint, AdaptedCheckpoint):
            raise OptionError(
                f"{directory}: transformers runs a model of the family {checkpoint.model_type} here, and its cache cannot "
                "undo tokens, which drafting requires; leave out the draft"
            )
        if checkpoint.config.linear_layers:
            raise OptionError(
                f"{directory}: layers with a state cannot undo tokens, which drafting requires; leave out the draft"
            )
    if draft is None:
        check_predicts(Checkpoint(target), target)
    else:
        check_same_tokens(Checkpoint(target), Checkpoint(draft))


def _check_room(prompt_tokens: int, max_new_tokens: int, config: DecoderConfig, name: str) -> None:
    if max_new_tokens < 1:
        raise OptionError(f"the number of new tokens is {max_new_tokens}; it must be at least 1")
    if (asked := prompt_tokens + max_new_tokens) > config.max_positions:
        raise OptionError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones make {asked}, and {name} has "
            f"{config.max_positions} positions{config.why_no_more}; shorten the prompt or ask for fewer tokens"
        )
