"""Speculative decoding: a draft model proposes tokens, the target verifies them (Leviathan et al. 2023).

The generated text has the target's own distribution for any draft model; a good draft only makes it faster. p is the
target's distribution of the next token and q is the draft's, both after all options of sampling.

Shape suffixes: K drafted tokens, L new positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.decoder.kv_cache import KeyValueCache
from engine.generation.options import SamplingOptions
from engine.generation.sampling import drawn, penalised_rows, probabilities


def verify(
    p_V: Sequence[Tensor], q_V: Sequence[Tensor], drafted: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, int]:
    """Return the number of accepted tokens, and the token that follows them (Leviathan et al., Algorithm 1).

    p_V: K + 1 distributions [V], after the text and after each drafted token. q_V: the K distributions of the drafted
    tokens. uniforms: K + 1 independent numbers in [0, 1): r_1 to r_K, and one to draw the last token.
    """
    for place, (x, r) in enumerate(zip(drafted, uniforms, strict=False)):
        p, q = p_V[place], q_V[place]
        if r * float(q[x]) >= float(p[x]):  # x is kept with probability min(1, p(x) / q(x))
            return place, draw(residual(p, q), uniforms[-1])
    return len(drafted), draw(p_V[-1], uniforms[-1])


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Return max(0, p − q) [V], the unnormalized distribution that replaces a rejected token (ibid., Section 2.3)."""
    left_V = (p_V - q_V).clamp_min(0)
    # All zeros occur only if p and q differ by rounding alone.
    return left_V if bool(left_V.any()) else p_V


def draw(weights_V: Tensor, uniform: float) -> int:
    """Return a token drawn in proportion to its weight, by one uniform number."""
    return int(drawn(weights_V[None], weights_V.new_full((1, 1), uniform, dtype=torch.float64)))


class DraftReader(Protocol):
    """A source of drafted tokens, with the text that it has read."""

    def read(self, text: Sequence[int]) -> Tensor:
        """Read the new tokens of the text and return logits [L, V], the last row after all of the text."""

    def keep(self, length: int) -> None:
        """Forget all tokens beyond this length."""


class Reader:
    """One of the two models, with the text that it has read in its cache."""

    def __init__(self, steps: Callable[[Tensor, KeyValueCache], Tensor], cache: KeyValueCache) -> None:
        """steps: from tokens [1, L] and the cache to the logits [1, L, V] after each."""
        self._steps, self._cache = steps, cache

    def read(self, text: Sequence[int]) -> Tensor:
        """Read the new tokens of the text and return the logits [L, V] after each of them."""
        unread = torch.tensor([text[self._cache.length :]], device=self._cache.device)
        return self._steps(unread, self._cache)[0]

    def keep(self, length: int) -> None:
        """Forget all tokens beyond this length; their places in the cache are overwritten."""
        self._cache.length = min(self._cache.length, length)


class Speculation:
    """Rounds of drafting and verification for one sequence, with statistics."""

    def __init__(
        self, target: Reader, draft: DraftReader, draft_tokens: int, sampling: SamplingOptions, generator: torch.Generator
    ) -> None:
        self._target, self._draft, self._draft_tokens = target, draft, draft_tokens
        self._sampling, self._generator = sampling, generator
        self.rounds = 0
        """Number of forward passes of the target, without the prefill."""
        self.proposed = 0
        """Number of drafted tokens."""
        self.accepted = 0
        """Number of drafted tokens that the target accepted."""

    @torch.inference_mode()
    def round(self, prompt: Sequence[int], written: Sequence[int], room: int) -> list[int]:
        """Return the next tokens, at least one and at most `room`. The target has read the text except its last token."""
        text, begin = [*prompt, *written], len(prompt)
        known, count = len(text), min(self._draft_tokens, room - 1)
        device = self._generator.device
        uniforms = torch.rand(2 * count + 1, dtype=torch.float64, generator=self._generator, device=device).tolist()
        q_V: list[Tensor] = []
        for uniform in uniforms[:count]:
            logits_1V = self._draft.read(text)[-1:]
            q_V += probabilities(penalised_rows(logits_1V, [text[begin:]], self._sampling, [prompt]), self._sampling)
            text.append(draw(q_V[-1], uniform))
        before = [text[begin:end] for end in range(known, len(text) + 1)]
        logits_LV = penalised_rows(self._target.read(text), before, self._sampling, [prompt] * len(before))
        p_V = probabilities(logits_LV, self._sampling)
        accepted, following = verify(list(p_V), q_V, text[known:], uniforms[count:])
        for reader in (self._target, self._draft):
            reader.keep(known + accepted)
        self.rounds, self.proposed, self.accepted = self.rounds + 1, self.proposed + count, self.accepted + accepted
        return [*text[known : known + accepted], following]
