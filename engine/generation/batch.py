"""One run of an engine: the sequences of its prompts, their tokens, and the time and memory that they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapted.adapted_decoder import AdaptedCache
from engine.checkpoint.model_directory import ModelDirectory
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.prediction import PredictionLayer
from engine.expert_cache.cache import ExpertCache
from engine.expert_cache.figures import report as expert_figures
from engine.generation.options import SamplingOptions
from engine.generation.prediction_draft import PredictionReader
from engine.generation.report import Report, SkipCounter, memory_split, peak_memory_bytes, rate
from engine.generation.sampling import penalised_rows, sample
from engine.generation.speculative import DraftReader, Reader, Speculation
from engine.generation.text_stream import TextStream
from engine.kernels.kernel_choice import KernelChoice

Cache = KeyValueCache | AdaptedCache


class Runner(Protocol):
    """The engine of a batch, as far as the batch uses it (engine/generation/generate.py)."""

    checkpoint: ModelDirectory
    device: torch.device
    skip_counter: SkipCounter | None
    kv_cache_dtype: torch.dtype
    prompt_kernels: KernelChoice
    decoding_kernels: KernelChoice
    draft_tokens: int
    load_seconds: float
    expert_cache: ExpertCache | None

    @property
    def draft(self) -> Runner | None: ...

    @property
    def both(self) -> Sequence[Runner]: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def weights_resident_bytes(self) -> int: ...

    @property
    def bytes_read_per_token(self) -> float | None: ...

    def new_cache(self, sequences: int, capacity: int) -> Cache: ...

    def prefill(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache) -> Tensor: ...

    def steps(self, tokens_BL: Tensor, cache: Cache) -> Tensor: ...


class Batch:
    """Sequences that advance together: their tokens, padding and clock. The object outlives the run, for the report."""

    def __init__(
        self,
        engine: Runner,
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

    def new_cache(self, engine: Runner) -> Cache:
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
        """Return the function that takes the decoder's hidden states, from which its own prediction layer drafts."""
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
            self._draft = Reader(own.draft.steps, own_cache(draft_cache))
        if self._draft is not None:
            target = Reader(own.steps, own_cache(cache))
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
            written, prompts = zip(*((sequence.tokens, sequence.prompt) for sequence in self.sequences), strict=True)
            logits_BV = penalised_rows(logits_BV, written, self._sampling, prompts)
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
            weights_bytes=sum(each.weights_bytes for each in engine.both),
            **memory_split(sum(each.weights_resident_bytes for each in engine.both), self._kv_cache_bytes),
            load_seconds=sum(each.load_seconds for each in engine.both),
            experts_skipped_share=0.0 if counter is None else counter.share,
            experts_skipped_share_per_layer=[0.0] * len(layers) if counter is None else counter.share_per_layer,
            experts_read=asked if counter is None else counter.filled,
            weights_read_bytes_per_token=engine.bytes_read_per_token,
            draft_acceptance_rate=speculation.accepted / proposed if speculation and proposed else None,
            expert_cache=self._cache_report(generated),
            tokens_per_target_forward=(generated - 1) / speculation.rounds if speculation and speculation.rounds else None,
        )

    def _cache_report(self, generated: int) -> dict[str, Any] | None:
        """Return the figures of the expert cache; None without one."""
        cache, began = self._engine.expert_cache, self._prefill_started
        if cache is None:
            return None
        seconds = (began if self._first_token_at is None else self._first_token_at) - began + self._decode_seconds
        cost = cache.miss_cost
        figures = expert_figures(cache.figures.values(), self.prompt_tokens + generated, seconds)
        return figures | {"miss_cost": None if cost is None else asdict(cost)}


def own_cache(cache: Cache) -> KeyValueCache:
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
