"""Text generation from a checkpoint: prefill the prompts, then step and postprocess until every sequence has ended.

The sequences of a batch advance together: prompts of different lengths are padded on the left, and each sequence ends
by itself at an end token, a stop string or its limit.

Shape suffixes: B batch, L new positions, P all positions so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine.adapted.adapted_checkpoint import (
    AdaptedCheckpoint,
    open_image_checkpoint,
    open_mixture_checkpoint,
)
from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.adapted.adapted_pass import routings_of
from engine.checkpoint.artifact import compare_checksums
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer
from engine.checkpoint.tokenizer_checks import tokenizing
from engine.decoder.gpu.step import use_gpu_steps
from engine.decoder.gpu.triton_experts import use_triton
from engine.decoder.kv_cache import KeyValueCache, position_bytes, state_bytes
from engine.decoder.model import Decoder
from engine.decoder.prediction import PredictionLayer
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import CompressError, OptionError, UnsupportedError
from engine.expert_cache.attach import BY_LAYER_TOKENS, check_limited, open_limited
from engine.expert_cache.cache import ExpertCache
from engine.files.image_file import pictures_of
from engine.generation.batch import Batch, Cache, own_cache
from engine.generation.checks import check_pair, check_room, cpu_only, resolve_dtype, resolve_kv_cache_dtype
from engine.generation.options import LOAD_MODES, MAPPED, MEMORY, OWN_LAYERS, GenerateOptions, OpenOptions, SamplingOptions
from engine.generation.prediction_draft import open_prediction
from engine.generation.report import (
    ExportedSkipCounter,
    Report,
    SkipCounter,
    resident_weights_bytes,
)
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
from engine.passes.held_weights import hold_weights
from engine.passes.library_pages import release_library_pages
from engine.passes.memory_budget import free_memory_bytes
from engine.progress import Progress, no_progress
from engine.transformers_models.image_reader import ImagePrompt, ImageReader, check_vision

GREEDY = SamplingOptions()
PREFILL_CHUNK = 512
"""Prompt positions in one forward pass of the prefill."""
LONGEST_CHUNK = 2048
"""Most positions of such a pass with latent attention. A pass computes the keys and values of all earlier positions from
their latent vectors, so passes grow with what lies before them."""


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
        self.load_mode = OpenOptions.load_mode
        """Where weights are, or shall be when `prepare` has read them: MAPPED files, or MEMORY of the process's own."""
        self.load_seconds = 0.0
        """Duration of `open` in seconds."""
        self.prompt_kernels, self.decoding_kernels = PROMPT, DECODING
        """Kernels that compute the products of prompts and of decoding, on the threads that the model was opened with."""
        self.expert_cache: ExpertCache | None = None
        """The experts in memory, where the model is read within a limit; None where it is mapped as a whole."""
        self.progress: Progress = no_progress
        """Shows the compilation of kernels, where there is any."""
        self.image_reader: ImageReader | None = None
        """The model's processor of images, once `open_images` was called."""
        self._last: Batch | None = None
        self._is_prepared = False

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
        memory_limit: int | None = OpenOptions.memory_limit,
        miss_threshold: float = OpenOptions.miss_threshold,
        load_mode: str = OpenOptions.load_mode,
        progress: Progress = no_progress,
    ) -> Engine:
        """Open a directory, a hub id or `demo`; weights are memory-mapped and not read, if device and dtype allow it.

        Raises CheckpointError, UnsupportedError, and OptionError for options that this machine or model does not support.
        `threads` applies to the whole process. `backend`: "torch" for checkpoints, "onnx" for exported models, or "auto".
        `kv_cache_dtype`: dtype of the KV cache, "float16", "bfloat16" or "int8", or "auto" for the compute dtype; where a
        model computes in bfloat16, the compiled kernels read a cache in bfloat16 or int8, and torch reads others.
        `checksums`: first compare every file with its recorded checksum. `draft`: a smaller model with the same tokenizer,
        which proposes `draft_tokens` tokens at a time; it never changes the distribution of the text, only the speed
        (Leviathan et al. 2023); or "mtp": the model's own layers for multi-token prediction. `images`: prompts may have
        images; transformers then runs the whole model, also one of a family that our own decoder runs. `memory_limit`: most
        resident bytes of the process; experts are then read when they are needed, and `miss_threshold` lets others take the
        places of some that are not in memory (engine/expert_cache/missing.py). `load_mode`: "mapped", or "memory" to read
        weights into huge pages before the first token, if these leave half of the free memory. `progress`: shows the
        compilation of kernels, where there is any.
        """
        started = time.perf_counter()
        if not 1 <= draft_tokens < COMPILED_MAX_ROWS:
            raise OptionError(f"draft tokens are {draft_tokens}; they must be from 1 to {COMPILED_MAX_ROWS - 1}")
        if not 0 <= miss_threshold <= 1:
            raise OptionError(f"the miss threshold is {miss_threshold}; it must be from 0 to 1")
        if miss_threshold > 0 and memory_limit is None:
            raise OptionError("a miss threshold is about experts that a memory limit keeps out; give --memory-limit too")
        if load_mode not in LOAD_MODES:
            raise OptionError(f"the load mode is {load_mode!r}; it must be one of {', '.join(LOAD_MODES)}")
        set_threads(threads)
        directory = resolve(str(model))
        if images and draft is not None:
            raise OptionError("a draft reads no images; leave out the draft, or the images")
        if checksums:
            compare_checksums(directory)
        predicts = draft == OWN_LAYERS
        drafting = None if draft is None or predicts else resolve(str(draft))
        if drafting is not None or predicts:
            check_pair(directory, drafting)
        if backend_of(directory, backend) == "onnx":
            if skip_threshold > 0:
                raise OptionError("an exported model has a fixed skip threshold; give the skip threshold to the export")
            if kv_cache_dtype != "auto":
                raise OptionError("an exported model has its own KV cache; leave the KV cache dtype at auto")
            if images:
                raise OptionError("an exported model reads text only; leave out the images, or take the checkpoint")
            if memory_limit is not None:
                raise OptionError("an exported model is read whole by onnxruntime; leave out the memory limit")
            exported = ModelDirectory(directory)
            engine = cls(exported, open_exported(exported, device, dtype))
            engine.load_seconds = time.perf_counter() - started
            return engine
        checkpoint = open_image_checkpoint(directory) if images else open_mixture_checkpoint(directory)
        place = resolve_device(device) if not isinstance(checkpoint, AdaptedCheckpoint) else cpu_only(checkpoint, device)
        config = checkpoint.config
        tables = load_skip_tables(checkpoint.directory, config) if skip_threshold > 0 else None
        computed = resolve_dtype(dtype, checkpoint)
        kept = resolve_kv_cache_dtype(kv_cache_dtype, computed, checkpoint)
        own = routings_of(checkpoint, computed, place)
        routings = skipping_routings(config, tables, skip_threshold, skip_min_experts, place, own=own, rule=skip_rule)
        decoder: Decoder | AdaptedDecoder
        expert_cache: ExpertCache | None = None
        if memory_limit is not None:
            check_limited(checkpoint, place, predicts=predicts)
            source = checkpoint.weights(computed, place, block_types_multiplied(computed, place))
            decoder, expert_cache = open_limited(
                checkpoint, source, memory_limit, dtype=computed, miss_threshold=miss_threshold
            )
        elif isinstance(checkpoint, AdaptedCheckpoint):
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
            if isinstance(decoder, Decoder):
                use_gpu_steps(decoder)
        engine = cls(checkpoint, decoder, skipping=skip_threshold > 0)
        engine.expert_cache, engine.load_mode = expert_cache, load_mode
        engine.kv_cache_dtype, engine.progress, engine.skip_rule = kept, progress, skip_rule
        engine.prompt_kernels, engine.decoding_kernels = PROMPT.with_threads(threads), DECODING.with_threads(threads)
        if images:
            engine.open_images()
        engine.load_seconds = time.perf_counter() - started
        if drafting is not None:
            engine.draft = cls.open(
                drafting, device=device, dtype=dtype, checksums=checksums, load_mode=load_mode, progress=progress
            )
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

    def prepare(self, reserved_bytes: int = 0) -> None:
        """Load the kernels that this model decodes with, and the weights, so that the first token does not wait for them.

        Weights are read into huge pages, if `load_mode` says so and these leave half of the free memory; `load_mode` then
        says what was done. The pages of library code that were used to open the model are released. reserved_bytes: memory
        that is not free, although nobody uses it yet. Raises CheckpointError for a file that cannot be read, and
        OptionError if the system has no memory for the weights.
        """
        if isinstance(self.decoder, Decoder):
            prepare_decoding(self.dtype, self.device, self.decoder.kernels_needed, self.progress)
        elif isinstance(self.decoder, AdaptedDecoder):
            self.decoder.prepare()
        if not self._is_prepared:
            self._hold_weights(reserved_bytes)
            release_library_pages()
            self._is_prepared = True

    def _hold_weights(self, reserved_bytes: int) -> None:
        is_held, started = False, time.perf_counter()
        is_here = self.expert_cache is None and self.device.type == "cpu"
        if self.load_mode == MEMORY and is_here and isinstance(self.decoder, Decoder):
            assert isinstance(self.checkpoint, Checkpoint), "our own decoder is made from one"
            most = (free_memory_bytes() - reserved_bytes) // 2
            is_held = hold_weights(self.checkpoint.files, (*self.decoder.weights, *self._prediction_weights), most)
        self.load_mode = MEMORY if is_held else MAPPED
        self.load_seconds += time.perf_counter() - started

    @property
    def _prediction_weights(self) -> tuple[Tensor, ...]:
        return () if self.prediction is None else tuple(self.prediction.parameters())

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
        if self.expert_cache is not None:
            position, state = self.cache_sizes
            self.expert_cache.reserve(sequences * (capacity * position + state))
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
        if self.expert_cache is not None:
            return self.expert_cache.fixed_bytes + self.expert_cache.held_bytes
        if not isinstance(self.checkpoint, Checkpoint) or isinstance(self.decoder, OnnxDecoder):
            return self.weights_bytes
        weights = (*self.decoder.weights, *self._prediction_weights)
        return resident_weights_bytes(weights, (file.path for file in self.checkpoint.files))

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in the compute dtype; tied weights count once."""
        own = sum(weight.nbytes for weight in self._prediction_weights)
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

        So many positions are read at a time as `_chunk` says, with the rotary angles of the whole prompt; activations do not
        grow beyond those of the longest piece. Under a memory limit, BY_LAYER_TOKENS positions go through a layer before
        the next one, so that its experts are read once for all of them. An exported graph and transformers read all
        positions at once.
        """
        decoder, first, last = self.decoder, cache.length, cache.length + tokens_BL.shape[1]
        cache.read_as = last if real_BP is None else int(real_BP[:, :last].sum(-1).max())
        with torch.inference_mode():
            if self.expert_cache is not None and last - first > PREFILL_CHUNK and _is_whole(real_BP, last):
                assert isinstance(decoder, Decoder), "only our own decoder has an expert cache"
                for group_BL in tokens_BL.split(BY_LAYER_TOKENS, dim=1):
                    last_BLD = decoder.read_by_layer(group_BL, own_cache(cache), self.prompt_kernels, PREFILL_CHUNK)
                return decoder.logits(last_BLD[:, -1], self.prompt_kernels)
            while isinstance(decoder, Decoder) and (end := cache.length + _chunk(decoder, cache.length)) < last:
                start = cache.length
                piece, seen = tokens_BL[:, start - first : end - first], self._seen(real_BP, start, end)
                decoder.hidden_states(piece, seen, own_cache(cache), self.prompt_kernels)
            start = cache.length
            piece, seen = tokens_BL[:, start - first :], self._seen(real_BP, start, last)
            return self._last_logits(piece, seen, cache, self.prompt_kernels)

    def _last_logits(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache, choice: KernelChoice) -> Tensor:
        """Return the logits of the last position, [B, V]. Only our own decoder takes a choice of kernels."""
        if isinstance(self.decoder, Decoder):
            return self.decoder.last_logits(tokens_BL, real_BP, own_cache(cache), choice)
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
            return self.decoder.step_logits(tokens_BL, own_cache(cache), self.decoding_kernels)

    def _start(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: str | Sequence[str],
        images: Sequence[Any],
    ) -> Batch:
        _ = self.tokenizer, self.end_tokens  # loaded by the first run, and not counted in its time
        for engine in self.both:
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
        for engine in self.both:
            name = "the model" if engine is self else "the draft"
            check_room(max(map(len, ids)), max_new_tokens, engine.checkpoint.config, name)
        decode = partial(plain_text, self.tokenizer)
        sequences = [TextStream(prompt, max_new_tokens, self.end_tokens, stops, decode) for prompt in ids]
        if self.skip_counter is not None:
            self.skip_counter.reset()
        if self.expert_cache is not None:
            self.expert_cache.count_anew()
        inputs = [prompt.inputs for prompt in read if prompt.inputs]
        self._last = Batch(self, sequences, max_new_tokens, sampling, started, inputs)
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

    def _run(self, batch: Batch) -> Iterator[None]:
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

    def _rounds(self, batch: Batch) -> Iterator[None]:
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
    def both(self) -> list[Engine]:
        """This engine and its draft, if any."""
        return [self] if self.draft is None else [self, self.draft]


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


def _chunk(decoder: Decoder, past: int) -> int:
    """Return how many positions of a prompt are read at a time after `past` others."""
    longest = LONGEST_CHUNK if decoder.config.latent is not None else PREFILL_CHUNK
    return max(PREFILL_CHUNK, min(past // 4, longest))


def _is_whole(real_BP: Tensor | None, last: int) -> bool:
    """Return whether all positions before `last` are real."""
    return real_BP is None or bool(real_BP[:, :last].all())
