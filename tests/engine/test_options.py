"""Options declared on dataclass fields: their rows, their limits for Python callers, and parts."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.errors import OptionError
from engine.options import (
    REQUIRED,
    changed,
    check,
    declared,
    declared_part,
    leaves,
    left_out,
    like,
    names,
    option,
    part,
    unlisted,
)


@dataclass(frozen=True)
class Inner:
    steps: int = option(10, group="G", help="Steps.", minimum=1)
    rate: float = option(0.5, group="G", help="Rate.", above=0, maximum=1)
    hidden: int = 3

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Outer:
    bits: int = field(metadata=declared(group="H", help="Bits.", choices=(8, 4)))
    kind: str = option("a", group="H", help="Kind.", choices=("a", "b", "c"), models="things")
    each: bool = option(False, group="H", help="Draw.", choices={"layer": False, "token": True})
    sizes: tuple[int, ...] = option((), group="H", help="Sizes.", several="commas", minimum=1)
    path: Path | None = option(None, group="H", help="Path.")
    inner: Inner = part(Inner, steps=changed(20, flag="inner-steps", minimum=5), rate=left_out(0.25))

    def __post_init__(self) -> None:
        check(self)


def test_leaves_have_the_type_default_and_name_of_their_field() -> None:
    found = {leaf.name: leaf for leaf in leaves(Outer)}
    assert list(found) == ["bits", "kind", "each", "sizes", "path", "inner_steps"] and names(Outer) == set(found)
    assert found["bits"].default is MISSING and found["bits"].type is int
    assert found["path"].type is Path and found["path"].is_optional and found["path"].default is None
    steps = found["inner_steps"]
    assert (steps.path, steps.flag, steps.default, steps.option.minimum) == (("inner", "steps"), "inner-steps", 20, 5)
    assert steps.option.help == "Steps." and steps.option.group == "G"


def test_a_part_has_the_defaults_that_are_changed() -> None:
    assert Outer(bits=8).inner == Inner(20, 0.25)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bits": 3}, "bits is 3; it must be 8 or 4"),
        ({"bits": 8, "kind": "d"}, "kind is 'd'; for things it must be one of a, b, c"),
        ({"bits": 8, "sizes": (1, 0)}, "sizes is 0; it must be at least 1"),
        ({"bits": 8, "inner": Inner(2)}, "inner-steps is 2; it must be at least 5"),
    ],
)
def test_python_callers_have_the_limits_of_the_command_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Outer(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"rate": 1.5}, "rate is 1.5; it must be at most 1"),
        ({"rate": float("nan")}, "rate is nan; it must be above 0"),
    ],
)
def test_limits(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Inner(**given)


def test_none_is_within_all_limits_and_is_no_choice() -> None:
    assert Outer(bits=8, path=None).path is None


@dataclass(frozen=True, kw_only=True)
class Other(Outer):
    steps: int = like(Inner, "steps", 7, help="Other steps.")
    kind: str = unlisted(Outer, "kind")
    inner: Inner = unlisted(Outer, "inner")


def test_a_declaration_is_used_again() -> None:
    found = {leaf.name: leaf for leaf in leaves(Other)}
    assert "kind" not in found and "inner_steps" not in found
    assert found["steps"].default == 7 and found["steps"].option.help == "Other steps."
    assert found["steps"].option.minimum == 1
    assert next(iter(found)) == "steps", "options of the class itself come before those of its bases"
    assert Other(bits=4).kind == "a" and Other(bits=4).inner == Inner(20, 0.25)


@dataclass(frozen=True)
class Maybe:
    outer: Outer | None = field(default=None, metadata=declared_part(Outer, kind=changed(REQUIRED)))


def test_what_a_part_requires_is_required_only_where_the_part_is_or_where_that_is_said() -> None:
    found = {leaf.name: leaf.default for leaf in leaves(Maybe)}
    assert found["bits"] is None and found["kind"] is MISSING
