"""Data classes shared by scheduler and server: requests, updates, timings and load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.expert_cache.figures import LayerFigures
from engine.generation.options import SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

GREEDY = SamplingOptions()


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    """Maximum number of new tokens; 0 only reads the prompt, for its log-probabilities."""
    sampling: SamplingOptions = GREEDY
    stop: tuple[str, ...] = ()
    """Strings that end the text and are not part of it."""
    top_logprobs: int | None = None
    """Number of most probable tokens to return with each new token's log-probability; None for no log-probabilities."""
    prompt_logprobs: bool = False
    """Whether to return log-probabilities of the prompt's own tokens, from the second token on."""
    skip_threshold: float | None = None
    """Threshold of adaptive expert skipping; None for the engine's own."""
    ignore_end_tokens: bool = False
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the text, besides the model's own, and are not part of it."""
    min_new_tokens: int = 0
    """Number of new tokens before which no end token, stop token or stop string ends the text."""
    grammar: str = ""
    """A grammar in llguidance's serialized form (the JSON or Lark text that `llguidance.LLMatcher` takes) that the generated
    text must follow; empty for free text.
    """
    shown_special_tokens: tuple[str, ...] = ()
    """Texts of special tokens that are part of the generated text; others are left out."""
    namespace: str = ""
    """Namespace of the prefix cache: requests share cached prompts only within their namespace."""
    images: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Inputs of the model for the images of the prompt; empty without images."""

    @property
    def image_bytes(self) -> int:
        """Bytes of the inputs of images."""
        return sum(tensor.nbytes for tensor in self.images.values())


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability under the model's own distribution (before temperature), with alternatives."""

    token: int
    logprob: float
    """Natural logarithm of the probability."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, best first."""


@dataclass(frozen=True)
class Update:
    """Result of one step for one request."""

    text: str = ""
    """New text in whole characters; text that may become a stop string is held back."""
    tokens: tuple[int, ...] = ()
    """New tokens, including end tokens."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the new tokens, if they were requested."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Log-probabilities of all prompt tokens but the first, in the first update, if they were requested."""
    finish_reason: str = ""
    """Empty while it runs; "stop" at an end token or stop string, "length" at a limit, "cancelled", or "error"."""
    error: str = ""
    """Error message in one line, if the finish reason is "error"."""
    timings: Timings | None = None
    """Timings of the request, in the last update."""
    stop_string: str = ""
    """The stop string that ended the text, in the last update; empty if none did."""


@dataclass
class Timings:
    """Timings of one request, in seconds of `time.monotonic`."""

    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    """Time at which the request left the queue."""
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the cache and not read again."""
    generated_tokens: int = 0


Listener = Callable[[Update], None]
"""Called in the engine's thread, once for each step with a result; it must return at once and never raise."""


@dataclass(frozen=True)
class DraftLoad:
    """Counts of a draft since its start."""

    drafted_tokens: int
    accepted_tokens: int
    """Drafted tokens that the model chose too."""
    is_on: bool
    """Whether the last step was to have drafted tokens."""


@dataclass(frozen=True)
class Load:
    """Load and statistics of an engine, for reports. Counts are since its start."""

    running: int
    waiting: int
    kv_cache_bytes: int
    """Budget of the KV cache. It is allocated at the start, except for an export, whose requests allocate what they need."""
    kv_cache_used_share: float
    """Share of the budget that running requests use, 0..1."""
    weights_bytes: int
    resident_bytes: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    tokens_per_second: float
    """Generated tokens per second, over the last seconds."""
    experts_evaluated_per_layer: tuple[int, ...]
    experts_skipped_per_layer: tuple[int, ...]
    """Skipped experts for each MoE layer."""
    expert_cache: tuple[LayerFigures, ...] = ()
    """Counts of the experts that are read under a memory limit, by MoE layer; empty without one."""
    load_seconds: float = 0.0
    """Time to load the model, in seconds."""
    kv_cache_disk_bytes: int = 0
    """Bytes of the KV caches of all models on disk."""
    kv_cache_disk_blocks_read: int = 0
    kv_cache_disk_blocks_written: int = 0
    kv_cache_disk_blocks_failed: int = 0
    """Blocks that could not be read or written, or for which the disk was too slow."""
    kv_cache_disk_hits: int = 0
    """Requests that found a part of their prompt on disk."""
    draft: DraftLoad | None = None
    """Counts of the draft; None without one. Its weights, cache and loading are part of the figures above."""
