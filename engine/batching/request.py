"""What is asked of a running engine, and what comes back while it runs: the words that scheduler and server share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.generation.sampling import SamplingOptions

GREEDY = SamplingOptions()


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    """0 reads the prompt only: for its own log-probabilities."""
    sampling: SamplingOptions = GREEDY
    stop: tuple[str, ...] = ()
    """Strings that end the text, and are not part of it."""
    top_logprobs: int | None = None
    """Of each new token its log-probability, and so many of the most probable tokens with theirs; None for neither."""
    prompt_logprobs: bool = False
    """The same of the prompt's own tokens, from the second on."""
    skip_threshold: float | None = None
    """Of adaptive skipping; None for the engine's own."""
    ignore_end_tokens: bool = False
    namespace: str = ""
    """Requests share what they have read of equal prompts with others of their namespace, and with nobody else."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, how probable it was by the model's own distribution (before temperature), and what else was."""

    token: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, best first."""


@dataclass(frozen=True)
class Update:
    """What one step gave one request."""

    text: str = ""
    """New text in whole characters; what may become a stop string is held back."""
    tokens: tuple[int, ...] = ()
    """New tokens, end tokens included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the new tokens, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the first update, where they were asked for: one for each prompt token but the first."""
    finish_reason: str = ""
    """Empty while it runs; "stop" at an end token or stop string, "length" at a limit, "cancelled", or "error"."""
    error: str = ""
    """One line, where the reason is "error"."""
    timings: Timings | None = None
    """With the last update."""


@dataclass
class Timings:
    """Of one request, in seconds of `time.monotonic`."""

    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    """It left the queue."""
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, read by an earlier request and not again."""
    generated_tokens: int = 0


Listener = Callable[[Update], None]
"""Called in the engine's thread, once for each step that gave something; must return at once and never raise."""


@dataclass(frozen=True)
class Load:
    """How busy an engine is and what it has done, for reports. Counts are since its start."""

    running: int
    waiting: int
    kv_cache_bytes: int
    """Of the budget. Reserved at the start, but by an export, which takes of it what its requests need."""
    kv_cache_used_share: float
    """0..1 of the budget, by running requests."""
    weights_bytes: int
    resident_bytes: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    tokens_per_second: float
    """Generated, over the last seconds."""
    experts_evaluated_per_layer: tuple[int, ...]
    experts_skipped_per_layer: tuple[int, ...]
    """One for each MoE layer."""
    load_seconds: float = 0.0
    """Of the model, before the start."""
