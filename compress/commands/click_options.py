"""Conversion of option dataclasses to click parameters, and of parsed values back to dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import click

from engine.options import Leaf, Option, leaves, part_of

Made = TypeVar("Made")
_PLAIN: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


class ByteSize(click.ParamType[int]):
    """A size such as 500MB, 2GB or 1.5GiB, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes; a number without a unit is a number of bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).strip().lower())
        if match is None or (match[3] and not match[2]) or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size; write it like 500MB, 2GB or 1.5GiB", param, ctx)
        return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


class Several(click.ParamType[tuple[Any, ...]]):
    """One value or several values separated by commas, as a tuple."""

    name = "several"

    def __init__(self, one: click.ParamType[Any], metavar: str | None) -> None:
        self.one, self.metavar = one, metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder of the help text, such as `R[,R…]` or `[a|b][,…]`."""
        if self.metavar is None:
            return f"{self.one.get_metavar(param, ctx) or self.one.name.upper()}[,…]"
        return f"{self.metavar}[,{self.metavar}…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the values, each converted by the item type."""
        if isinstance(value, tuple):
            return value
        return tuple(self.one.convert(item.strip(), param, ctx) for item in str(value).split(","))


class GroupedOption(click.Option):
    """An option that the help text lists under a heading."""

    def __init__(self, declarations: list[str], group: str, **settings: Any) -> None:
        super().__init__(declarations, **settings)
        self.group = group


def all_leaves(dataclasses: Iterable[type]) -> dict[str, Leaf]:
    """Return the options of several dataclasses by name. Options with one name are merged: the first, with all choices."""
    found: dict[str, Leaf] = {}
    for each in dataclasses:
        for leaf in leaves(each):
            first = found.setdefault(leaf.name, leaf)
            if first.option.choices and leaf.option.choices and not isinstance(leaf.option.choices, Mapping):
                choices = tuple(dict.fromkeys((*first.option.choices, *leaf.option.choices)))
                found[leaf.name] = replace(first, option=replace(first.option, choices=choices))
    return found


def parameter(leaf: Leaf) -> click.Parameter:
    """Return the option or argument of the command line for one field."""
    row, default = leaf.option, default_of(leaf)
    is_required = leaf.default is MISSING and row.unset is None
    if row.is_argument:
        several: dict[str, Any] = {} if row.several is None else {"nargs": -1}
        given = {} if is_required or several else {"default": default}
        return click.Argument([leaf.name], type=click_type(leaf), required=is_required, **several, **given)
    flag, short = f"--{leaf.flag}", [row.short] if row.short else []
    text = row.help if row.unset is None else f"{row.help}  [default: {row.unset}]"
    settings: dict[str, Any] = {"help": text, "group": row.group}
    if leaf.type is bool and row.choices is None:
        flag += f"/--{row.off}" if row.off else ""
        return GroupedOption(
            [*short, flag, leaf.name],
            is_flag=True,
            default=default,
            show_default=row.off is not None and row.unset is None,
            **settings,
        )
    settings |= {"multiple": row.several == "repeated", "envvar": row.envvar, "show_envvar": row.envvar is not None}
    if row.several != "commas" and row.metavar is not None:
        settings["metavar"] = row.metavar
    if not is_required and default not in (None, ()):
        settings |= {"default": default, "show_default": row.unset is None}
    return GroupedOption([*short, flag, leaf.name], type=click_type(leaf), required=is_required, **settings)


def default_of(leaf: Leaf) -> Any:
    """Return the default as the command line writes it; None where there is none."""
    if leaf.default is MISSING:
        return None
    if isinstance(leaf.option.choices, Mapping):
        return next(word for word, value in leaf.option.choices.items() if value == leaf.default)
    return leaf.default


def click_type(leaf: Leaf) -> click.ParamType[Any]:
    """Return the click type that parses a field's values and checks its limits."""
    row, kind = leaf.option, leaf.type
    one = _one_type(row, _item(kind) if get_origin(kind) is tuple else kind)
    return Several(one, row.metavar) if row.several == "commas" else one


def _item(kind: Any) -> Any:
    """Return the item type of a tuple of any length."""
    item, ellipsis = get_args(kind)
    assert ellipsis is ..., f"{kind} is no type of an option"
    return item


def _one_type(row: Option, kind: Any) -> click.ParamType[Any]:
    if row.choices is not None:
        return click.Choice(tuple(row.choices))
    if row.is_size:
        return ByteSize()
    if kind is Path:
        return click.Path(path_type=Path)
    if (row.minimum, row.maximum, row.above) == (None, None, None):
        return _PLAIN[kind]
    if kind is int:
        return click.IntRange(cast("int | None", row.minimum), cast("int | None", row.maximum))
    if row.above is not None:
        return click.FloatRange(row.above, row.maximum, min_open=True)
    return click.FloatRange(row.minimum, row.maximum)


def make(of: Callable[..., Made], values: Mapping[str, Any], shared: Mapping[str, Any], **fixed: Any) -> Made:
    """Return a dataclass of options made from the command line's values by name.

    `shared` has values for fields that are no options themselves, such as the seed, in the dataclass and its parts. `fixed`
    has fields of the dataclass that are not read from the command line. An optional part is None where an option that it
    requires was left out.
    """
    found = {leaf.path: leaf for leaf in leaves(cast(type, of))}
    made: Made = _made(of, (), found, values, shared, fixed)
    return made


def _made(
    of: Any,
    path: tuple[str, ...],
    found: Mapping[tuple[str, ...], Leaf],
    values: Mapping[str, Any],
    shared: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> Any:
    given: dict[str, Any] = {}
    for each in fields(of):
        here = (*path, each.name)
        part = part_of(of, each.name)
        if each.name in fixed:
            given[each.name] = fixed[each.name]
        elif part is not None:
            read = {path[-1] for path, leaf in found.items() if path[:-1] == here and leaf.name in values}
            inner = {name: value for name, value in part.defaults.items() if name not in read}
            given[each.name] = _made(part.of, here, found, values, shared, inner)
        elif here not in found:
            if each.name in shared:
                given[each.name] = shared[each.name]
        elif (name := found[here].name) in values and (values[name] is not None or found[here].is_optional):
            given[each.name] = _value(found[here], values[name])
    required = [each.name for each in fields(of) if each.default is each.default_factory is MISSING]
    if path and any(given.get(name) is None for name in required):
        return None
    return of(**given)


def _value(leaf: Leaf, value: Any) -> Any:
    choices = leaf.option.choices
    return choices[value] if isinstance(choices, Mapping) and value is not None else value
