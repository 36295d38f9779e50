"""Speculative decoding: a small model drafts a few tokens, the target reads them all in one forward (Leviathan et al. 2023).

What comes out has the target's own distribution, whatever the draft is; a good draft only makes it faster. p is what the
target gives for the next token and q what the draft gives, both after temperature, top-k, top-p and penalties.

Shape suffixes: K drafted tokens, L new positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.decoder.kv_cache import KeyValueCache
from engine.generation.sampling import SamplingOptions, penalised_rows, probabilities


def verify(
    p_V: Sequence[Tensor], q_V: Sequence[Tensor], drafted: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, int]:
    """How many of the drafted tokens are accepted, and the token that follows them (Leviathan et al., Algorithm 1).

    p_V: K + 1 distributions [V], after the text and after each drafted token. q_V: the K that these were drawn from.
    uniforms: K + 1 independent numbers in [0, 1), r_1 to r_K and what the last token is drawn with.
    """
    for place, (x, r) in enumerate(zip(drafted, uniforms, strict=False)):
        p, q = p_V[place], q_V[place]
        if r * float(q[x]) >= float(p[x]):  # x stays with probability min(1, p(x) / q(x))
            return place, draw(residual(p, q), uniforms[-1])
    return len(drafted), draw(p_V[-1], uniforms[-1])


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(0, p − q) [V], what a rejected token is replaced by in proportion to (Leviathan et al., Section 2.3)."""
    left_V = (p_V - q_V).clamp_min(0)
    # Nothing is left only where p and q differ by their rounding.
    return left_V if bool(left_V.any()) else p_V


def draw(weights_V: Tensor, uniform: float) -> int:
    """A token with probability in proportion to its weight: the first whose running sum exceeds `uniform` of the whole."""
    sums_V = weights_V.double().cumsum(0)
    return int(torch.searchsorted(sums_V, uniform * sums_V[-1], right=True))


class Reader:
    """One of the two models, and what it has read of the text."""

    def __init__(self, steps: Callable[[Tensor, KeyValueCache], Tensor], cache: KeyValueCache) -> None:
        """steps: from tokens [1, L] and the cache to the logits [1, L, V] after each."""
        self._steps, self._cache = steps, cache

    def read(self, text: Sequence[int]) -> Tensor:
        """Logits [L, V] after each token of the text that it had not read."""
        unread = torch.tensor([text[self._cache.length :]], device=self._cache.keys.device)
        return self._steps(unread, self._cache)[0]

    def keep(self, length: int) -> None:
        """Forget what was read beyond so many tokens: their places are written again."""
        self._cache.length = min(self._cache.length, length)


class Speculation:
    """Rounds of drafting and verifying for one sequence, and how they went."""

    def __init__(
        self, target: Reader, draft: Reader, draft_tokens: int, sampling: SamplingOptions, generator: torch.Generator
    ) -> None:
        self._target, self._draft, self._draft_tokens = target, draft, draft_tokens
        self._sampling, self._generator = sampling, generator
        self.rounds = 0
        """Forwards of the target, its reading of the prompt not counted."""
        self.proposed = 0
        """Drafted tokens."""
        self.accepted = 0
        """Those of them that the target kept."""

    @torch.inference_mode()
    def round(self, prompt: Sequence[int], written: Sequence[int], room: int) -> list[int]:
        """The next tokens, at least one and at most `room`. The target has read all but the last token of the text."""
        text, begin = [*prompt, *written], len(prompt)
        known, count = len(text), min(self._draft_tokens, room - 1)
        device = self._generator.device
        uniforms = torch.rand(2 * count + 1, dtype=torch.float64, generator=self._generator, device=device).tolist()
        q_V: list[Tensor] = []
        for uniform in uniforms[:count]:
            logits_1V = self._draft.read(text)[-1:]
            q_V += probabilities(penalised_rows(logits_1V, [text[begin:]], self._sampling), self._sampling)
            text.append(draw(q_V[-1], uniform))
        before = [text[begin:end] for end in range(known, len(text) + 1)]
        p_V = probabilities(penalised_rows(self._target.read(text), before, self._sampling), self._sampling)
        accepted, following = verify(list(p_V), q_V, text[known:], uniforms[count:])
        for reader in (self._target, self._draft):
            reader.keep(known + accepted)
        self.rounds, self.proposed, self.accepted = self.rounds + 1, self.proposed + count, self.accepted + accepted
        return [*text[known : known + accepted], following]
