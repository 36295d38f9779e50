"""Whether drafting pays, by the time of steps with drafted tokens and without, for each number of sequences in a step.

With many sequences in a step, reading the weights is shared already, and the further rows of drafted tokens cost more than
they give. Both kinds of steps are therefore measured, the cheaper kind is used, and the other one is tried again from time
to time. Nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL_STEPS = 16
"""Steps of one kind that are measured before both kinds are compared."""
FIRST_WAIT, LONGEST_WAIT = 64, 1024
"""Steps up to the next trial: the first number after a change, and twice as many after each trial that changes nothing."""
MARGIN = 0.03
"""Share by which drafting must be cheaper to be switched on, so that noise does not switch it on and off."""
KEPT = 0.97
"""Factor of earlier measurements at each new one."""


@dataclass
class Mean:
    """Mean of something for each token, over the last measurements."""

    tokens: float = 0.0
    total: float = 0.0

    def add(self, tokens: float, total: float) -> None:
        """Add a measurement of so many tokens together."""
        self.tokens, self.total = KEPT * self.tokens + tokens, KEPT * self.total + total

    @property
    def each(self) -> float:
        """The mean for one token; 0 before the first measurement."""
        return self.total / self.tokens if self.tokens else 0.0


@dataclass
class _Size:
    """Measurements for one number of sequences."""

    is_on: bool = True
    """The kind of steps that was cheaper."""
    costs: dict[bool, Mean] = field(default_factory=dict)
    """Seconds per token, in steps that were to have drafted tokens (True) and in others."""
    tried: bool = True
    """The kind of steps that is measured for a comparison."""
    left: int = TRIAL_STEPS
    """Steps that are still to be measured for it; 0 outside of a trial."""
    wait: int = FIRST_WAIT
    waited: int = 0
    is_known: bool = False
    """Whether both kinds have been compared."""


class DraftSwitch:
    """Chooses between steps with drafted tokens and without."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._reading = Mean()
        """Seconds in which the draft reads a token of a prompt."""
        self._prompts = Mean()
        """Tokens of prompts for each generated token, of the requests that have ended."""

    def wants(self, sequences: int) -> bool:
        """Return whether the next step of so many sequences shall have drafted tokens."""
        size = self._size(sequences)
        return size.tried if size.left else size.is_on

    def measured(self, sequences: int, tokens: int, seconds: float) -> None:
        """Take the number of new tokens and the time of a step, of the kind that `wants` has returned for it.

        A step that was to have drafted tokens may have had none, as before the draft has read the prompts.
        """
        size = self._size(sequences)
        size.costs.setdefault(size.tried if size.left else size.is_on, Mean()).add(tokens, seconds)
        if size.left:
            size.left -= 1
            if not size.left:
                self._compare(size)
            return
        size.waited += 1
        if size.waited >= size.wait:
            self._try(size, not size.is_on)

    def has_read(self, tokens: int, seconds: float) -> None:
        """Take the time in which the draft has read tokens of prompts."""
        self._reading.add(tokens, seconds)

    def has_ended(self, read: int, generated: int) -> None:
        """Take the number of tokens of a prompt that were read for a request, and of its generated ones."""
        self._prompts.add(generated, read)

    def _size(self, sequences: int) -> _Size:
        """Return the measurements for so many sequences.

        Drafting gains less with more sequences. At first it is therefore off for a number of sequences if it is off for a
        smaller number, and on if it is on for a larger one.
        """
        if sequences not in self._sizes:
            known = [(count, size.is_on) for count, size in self._sizes.items() if size.is_known]
            is_off = any(count < sequences and not is_on for count, is_on in known)
            is_on = any(count > sequences and is_on for count, is_on in known)
            self._sizes[sequences] = _Size(is_on=not is_off, left=0 if is_off or is_on else TRIAL_STEPS)
        return self._sizes[sequences]

    def _try(self, size: _Size, kind: bool) -> None:
        size.tried, size.left, size.waited = kind, TRIAL_STEPS, 0
        size.costs.pop(kind, None)  # it may have changed since

    def _compare(self, size: _Size) -> None:
        """Choose the cheaper kind after a trial. Each token pays for its share of the draft's reading of prompts."""
        if len(size.costs) < 2:
            self._try(size, not size.tried)
            return
        size.is_known = True
        drafted = size.costs[True].each + self._reading.each * self._prompts.each
        before, plain = size.is_on, size.costs[False].each
        size.is_on = drafted < plain if before else drafted < (1 - MARGIN) * plain
        size.wait = FIRST_WAIT if size.is_on != before else min(LONGEST_WAIT, 2 * size.wait)
