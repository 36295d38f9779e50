"""When drafts are used, by costs that the tests make up: no clock is read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.batching.draft_switch import FIRST_WAIT, LONGEST_WAIT, TRIAL_STEPS, DraftSwitch, Mean


def run(switch: DraftSwitch, steps: int, drafted: float, plain: float, sequences: int = 1) -> list[bool]:
    """Run steps of two tokens with a draft and of one without, for each sequence; return which had drafts.

    drafted and plain: seconds of a step.
    """
    kinds = []
    for _ in range(steps):
        kinds.append(switch.wants(sequences))
        switch.measured(sequences, sequences * (2 if kinds[-1] else 1), drafted if kinds[-1] else plain)
    return kinds


TRIALS = [True] * TRIAL_STEPS + [False] * TRIAL_STEPS
"""The first steps of every number of sequences."""


@pytest.mark.parametrize(("drafted", "is_on"), [(1.9, True), (2.1, False)])
def test_the_cheaper_kind_is_used(drafted: float, is_on: bool) -> None:
    """A drafted step gives twice as many tokens, so it pays if it takes less than twice the time."""
    kinds = run(DraftSwitch(), 2 * TRIAL_STEPS + 100, drafted, 1.0)
    assert kinds[: 2 * TRIAL_STEPS] == TRIALS
    wait = FIRST_WAIT if not is_on else 2 * FIRST_WAIT  # on is what it began with
    assert set(kinds[2 * TRIAL_STEPS :][:wait]) == {is_on}


def test_the_other_kind_is_tried_ever_more_seldom() -> None:
    switch = DraftSwitch()
    kinds = run(switch, 12_000, 3.0, 1.0)
    trials = [step for step in range(1, len(kinds)) if kinds[step] and not kinds[step - 1]]
    gaps = [later - earlier - TRIAL_STEPS for earlier, later in pairwise(trials)]
    assert gaps[:4] == [2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT, 16 * FIRST_WAIT]
    assert gaps[4:] == [LONGEST_WAIT] * len(gaps[4:]) and len(gaps) > 8


def test_it_is_switched_on_again_when_it_pays() -> None:
    switch = DraftSwitch()
    assert not run(switch, 500, 3.0, 1.0)[-1]
    kinds = run(switch, LONGEST_WAIT + 2 * TRIAL_STEPS, 1.5, 1.0)
    assert kinds[-1]
    assert not run(switch, LONGEST_WAIT + 2 * TRIAL_STEPS, 3.0, 1.0)[-1]


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """2 tokens in 1.98 seconds are 1% cheaper than one in a second; 3% are needed to switch on, and none to stay on."""
    on, off = DraftSwitch(), DraftSwitch()
    run(off, 2 * TRIAL_STEPS, 2.1, 1.0)
    assert run(on, 2 * TRIAL_STEPS + 1, 1.98, 1.0)[-1]
    assert not run(off, FIRST_WAIT + TRIAL_STEPS + 1, 1.98, 1.0)[-1]


def test_each_number_of_sequences_has_its_own_answer() -> None:
    switch = DraftSwitch()
    for _ in range(3):
        one, eight = run(switch, 40, 1.0, 1.0), run(switch, 40, 3.0, 1.0, sequences=8)
    assert one[-1] and not eight[-1]


def test_a_new_number_of_sequences_begins_with_what_is_known() -> None:
    """Drafts are on with 4 sequences and off with 8. They are tried at once between the two only, and elsewhere later."""
    switch = DraftSwitch()
    run(switch, 2 * TRIAL_STEPS, 1.0, 1.0, sequences=4)
    run(switch, 2 * TRIAL_STEPS, 3.0, 1.0, sequences=8)
    assert run(switch, FIRST_WAIT + 1, 1.0, 1.0, sequences=2) == [True] * FIRST_WAIT + [False]
    assert run(switch, FIRST_WAIT + 1, 3.0, 1.0, sequences=9) == [False] * FIRST_WAIT + [True]
    assert run(switch, 2 * TRIAL_STEPS, 1.0, 1.0, sequences=6) == TRIALS


def test_prompts_that_the_draft_reads_count() -> None:
    """A token costs 0.5 with a draft and 1 without. Reading one costs 0.1, and a request reads 4 or 6 for each new one."""
    for read, is_on in ((40, True), (60, False)):
        switch = DraftSwitch()
        switch.has_read(100, 10.0)
        for _ in range(200):
            switch.has_ended(read, 10)
        assert run(switch, 2 * TRIAL_STEPS + 1, 1.0, 1.0)[-1] == is_on


def test_a_draft_that_only_reads_prompts_is_switched_off() -> None:
    """Requests may end before the draft has read their prompts. Their steps cost as much as others, and reading more."""
    switch = DraftSwitch()
    for _ in range(2 * TRIAL_STEPS):
        if switch.wants(3):
            switch.has_read(256, 2.0)
        switch.measured(3, 3, 1.0)
    assert not switch.wants(3)


def test_a_mean_is_of_the_last_measurements() -> None:
    cost = Mean()
    assert cost.each == 0.0
    for _ in range(1000):
        cost.add(2, 8.0)
    for _ in range(300):
        cost.add(2, 1.0)
    assert cost.each == pytest.approx(0.5, rel=1e-2)
