"""click parameters made from dataclasses of options, and dataclasses made from the values that click has parsed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from compress.commands.click_options import all_leaves, make, parameter
from engine.options import changed, declared, declared_part, left_out, option, part


@dataclass(frozen=True)
class Search:
    epochs: int = option(10, group="Search", help="Passes.", minimum=0)
    rate: float | None = option(None, group="Search", help="Rate.", unset="by kind")
    draw: bool = option(False, group="Search", help="Draw.", choices={"layer": False, "token": True})
    seed: int = 0


@dataclass(frozen=True)
class Rounding:
    bits: int = field(metadata=declared(group="Rounding", help="Bits.", choices=(8, 4)))
    group_size: int = option(32, group="Rounding", help="Group.")


@dataclass(frozen=True, kw_only=True)
class Everything:
    model: str = option("demo", group="", is_argument=True, help="Model.")
    output: Path | None = option(None, group="Output", short="-o", help="Output.")
    force: bool = option(False, group="Output", help="Force.")
    speed: bool = option(True, group="Output", off="no-speed", help="Speed.")
    memory: int | None = option(None, group="Machine", is_size=True, help="Memory.")
    timeout: float = option(600.0, group="Machine", above=0, help="Timeout.")
    key: tuple[str, ...] = option((), group="Machine", several="repeated", envvar="KEY_OF_TEST", help="Key.")
    sizes: tuple[int, ...] = option((), group="Machine", several="commas", minimum=1, metavar="N", help="Sizes.")
    search: Search = part(Search, epochs=changed(3, flag="search-epochs"))
    rounding: Rounding | None = field(default=None, metadata=declared_part(Rounding, group_size=changed(16)))
    device: str = "cpu"


def parsed(*arguments: str, of: tuple[type, ...] = (Everything,), env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the values that click makes of arguments."""
    values: dict[str, Any] = {}
    command = click.Command(
        "test", params=[parameter(leaf) for leaf in all_leaves(of).values()], callback=lambda **given: values.update(given)
    )
    result = CliRunner().invoke(command, arguments, env=env)
    if result.exit_code == 2:
        raise ValueError(result.output)
    assert result.exit_code == 0, result.output
    return values


def test_defaults_are_those_of_the_dataclass() -> None:
    assert make(Everything, parsed(), {}) == Everything(search=Search(3))


def test_every_kind_of_value() -> None:
    arguments = ["other", "-o", "out", "--force", "--no-speed", "--memory", "1.5GiB", "--timeout", "2", "--key", "a"]
    arguments += ["--key", "b", "--sizes", "1,2", "--search-epochs", "0", "--rate", "0.5", "--draw", "token", "--bits", "4"]
    assert make(Everything, parsed(*arguments), {"seed": 5, "device": "cuda"}) == Everything(
        model="other",
        output=Path("out"),
        force=True,
        speed=False,
        memory=3 << 29,
        timeout=2.0,
        key=("a", "b"),
        sizes=(1, 2),
        search=Search(0, 0.5, True, 5),
        rounding=Rounding(4, 16),
        device="cuda",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--search-epochs", "-1"],
        ["--timeout", "0"],
        ["--sizes", "1,0"],
        ["--bits", "3"],
        ["--draw", "sometimes"],
        ["--memory", "much"],
        ["--epochs", "1"],
    ],
    ids=" ".join,
)
def test_what_is_outside_the_limits_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="Usage: "):
        parsed(*arguments)


def test_a_variable_of_the_environment() -> None:
    assert parsed(env={"KEY_OF_TEST": "k"})["key"] == ("k",)


@dataclass(frozen=True, kw_only=True)
class Needs:
    count: int = field(metadata=declared(group="Output", help="Count."))
    kind: str = option("a", group="Output", help="Kind.", choices=("a", "b"))
    hidden: Search = part(Search, epochs=left_out(4), rate=left_out(), draw=left_out())


@dataclass(frozen=True)
class Also:
    kind: str = option("b", group="Output", help="Another kind.", choices=("b", "c"))


def test_an_option_without_a_default_is_required() -> None:
    with pytest.raises(ValueError, match="Missing option '--count'"):
        parsed(of=(Needs,))
    assert make(Needs, parsed("--count", "2", of=(Needs,)), {}) == Needs(count=2, hidden=Search(4))


def test_options_of_one_name_are_one_with_the_choices_of_all() -> None:
    given = parsed("--count", "2", "--kind", "c", of=(Needs, Also))
    assert make(Also, given, {}) == Also("c")
    assert parsed("--count", "2", of=(Needs, Also))["kind"] == "a", "the default is the first's"


def test_what_is_fixed_is_not_read_from_the_command_line() -> None:
    assert make(Everything, parsed("--bits", "4"), {}, rounding=None, model="fixed").rounding is None


def test_a_default_that_is_changed_in_a_part_holds_without_the_command_line_too() -> None:
    assert make(Everything, {}, {}) == Everything() and Everything().search == Search(3)
    assert make(Everything, {"rate": 0.5}, {}).search == Search(3, 0.5)
