"""Options, each declared once: on the field of the dataclass that uses it.

    @dataclass(frozen=True)
    class Steps:
        batch_size: int = option(16, group="Training", help="Sequences per step.", minimum=1)
        bits: int = field(metadata=declared(group="Weights", help="Bits per weight.", choices=(8, 4)))  # has no default

        def __post_init__(self) -> None:
            check(self)

The name, type and default are the field's own. The command line is made from such fields (compress/commands), and `check`
holds Python callers to the same limits. A field that is itself a dataclass of options is declared with `part`; what differs
there from the declaration of its own fields is said with `changed`, and `left_out` keeps a field off the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from engine.errors import OptionError

_KEY, _PART = "option", "part"
_LIMITS = {"minimum", "maximum", "above"}


@dataclass(frozen=True)
class Option:
    """Properties of an option, beside its field's name, type and default, for the command line and `check`."""

    help: str
    group: str
    """Heading of the option's group in the help text."""
    flag: str | None = None
    """Name on the command line, without dashes; None for the field's own name."""
    short: str | None = None
    """One-letter flag, with its dash."""
    choices: Collection[Any] | None = None
    """Permitted values. A mapping has the command line's words as keys and the field's values as values."""
    models: str | None = None
    """Kind of model that the choices hold for, where others have more."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower limit."""
    metavar: str | None = None
    unset: str | None = None
    """Description of the value None."""
    envvar: str | None = None
    """Environment variable that gives the value if the command line does not."""
    off: str | None = None
    """Flag that makes a bool false; a bool without one is made true by its flag only."""
    is_size: bool = False
    """A number of bytes, written like 500MB or 2GB."""
    several: Literal["repeated", "commas"] | None = None
    """Several values on the command line: by repeating the flag, or with commas between them."""
    is_argument: bool = False
    """Whether the option is given by its position, without a flag."""


REQUIRED: Any = object()
"""In place of a changed default: the option has no default."""


class Changed(NamedTuple):
    """Changes of a part's field to its own declaration."""

    default: Any
    """MISSING for an unchanged default, REQUIRED for none."""
    row: dict[str, Any] | None
    """Fields of Option that differ; None keeps the field off the command line."""


class NestedOptions(NamedTuple):
    """Metadata of a field that is a dataclass of options."""

    of: type
    changes: Mapping[str, Changed]
    """Changes by name of the part's field."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the changed defaults."""
        return {name: each.default for name, each in self.changes.items() if each.default not in (MISSING, REQUIRED)}


def declared(*, help: str, group: str, **row: Any) -> dict[str, Any]:
    """Return the metadata of a field without a default: such an option is required."""
    return {_KEY: Option(help, group, **row)}


def option(default: Any, *, help: str, group: str, **row: Any) -> Any:
    """Return a dataclass field with a default; `row` has further fields of Option."""
    return field(default=default, metadata=declared(help=help, group=group, **row))


def like(of: type, name: str, default: Any = MISSING, **row: Any) -> Any:
    """Return a field declared as in another dataclass, with another default or other fields of Option."""
    other = next(each for each in fields(of) if each.name == name)
    default = other.default if default is MISSING else default
    return field(default=default, metadata={_KEY: replace(other.metadata[_KEY], **row)})


def unlisted(of: type, name: str) -> Any:
    """Return a field with the default that it has in another dataclass, but off the command line."""
    other = next(each for each in fields(of) if each.name == name)
    if other.default_factory is not MISSING:
        return field(default_factory=other.default_factory)
    return field(default=other.default)


def changed(default: Any = MISSING, **row: Any) -> Changed:
    """Return another default, or other fields of Option, for a field of a part."""
    return Changed(default, row)


def left_out(default: Any = MISSING) -> Changed:
    """Return the change that keeps a field of a part off the command line, with another default if one is given."""
    return Changed(default, None)


def declared_part(of: type, **changes: Changed) -> dict[str, Any]:
    """Return the metadata of a field that is a dataclass of options and has no default."""
    return {_PART: NestedOptions(of, changes)}


def part(of: type, **changes: Changed) -> Any:
    """Return a dataclass field whose default is an instance of `of` with the changed defaults."""
    return field(default_factory=partial(of, **NestedOptions(of, changes).defaults), metadata=declared_part(of, **changes))


@dataclass(frozen=True)
class Leaf:
    """One option of a dataclass or of its parts."""

    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    type: Any
    """Without None."""
    is_optional: bool
    """Whether it may be None."""
    default: Any
    """MISSING for a required option."""
    option: Option

    @property
    def flag(self) -> str:
        """Name on the command line, without dashes."""
        return self.option.flag or self.path[-1].replace("_", "-")

    @property
    def name(self) -> str:
        """The flag as an identifier; values of the command line are kept under it."""
        return self.flag.replace("-", "_")


def leaves(of: type) -> Iterator[Leaf]:
    """Yield all options of a dataclass and its parts, those that the class itself declares before those of its bases."""
    for each in sorted(fields(of), key=lambda each: _place(of, each)):
        if _PART in each.metadata:
            inner: NestedOptions = each.metadata[_PART]
            _, is_optional = annotation(of, each)
            for leaf in leaves(inner.of):
                yield from _of_part(each.name, leaf, inner.changes, is_optional)
        elif _KEY in each.metadata:
            kind, is_optional = annotation(of, each)
            yield Leaf((each.name,), kind, is_optional, each.default, each.metadata[_KEY])


def names(of: type) -> set[str]:
    """Return the names of a dataclass's options on the command line, including those of its parts."""
    return {leaf.name for leaf in leaves(of)}


def _of_part(name: str, leaf: Leaf, changes: Mapping[str, Changed], is_optional: bool) -> Iterator[Leaf]:
    """Yield the leaf with the changes of the whole. An option required by a part that may be None is optional."""
    change = changes.get(leaf.path[0], changed())
    if change.row is None:
        return
    default = leaf.default if change.default is MISSING else change.default
    default = MISSING if default is REQUIRED else default
    if default is MISSING and is_optional and change.default is not REQUIRED:
        default = None
    row = replace(leaf.option, **change.row)
    yield replace(leaf, path=(name, *leaf.path), default=default, option=row)


def annotation(of: type, each: Field[Any]) -> tuple[Any, bool]:
    """Return the type of a field without None, and whether it may be None."""
    kind = each.type
    if isinstance(kind, str):  # not get_type_hints: types of other fields are imported for type checkers only
        kind = eval(kind, vars(sys.modules[_owner(of, each).__module__]))
    alternatives = get_args(kind)
    if NoneType in alternatives:
        (kind,) = (one for one in alternatives if one is not NoneType)
        return kind, True
    return kind, False


def _place(of: type, each: Field[Any]) -> tuple[int, int]:
    """Return the position of a field's declaration: distance of its class in the MRO, then its place in that class."""
    owner = _owner(of, each)
    return of.__mro__.index(owner), list(vars(owner)["__annotations__"]).index(each.name)


def _owner(of: type, each: Field[Any]) -> type:
    """Return the class nearest in the MRO that declares a field."""
    return next(base for base in of.__mro__ if each.name in vars(base).get("__annotations__", {}))


def part_of(of: type, name: str) -> NestedOptions | None:
    """Return the declaration of a field that is a dataclass of options; None for any other field."""
    found: NestedOptions | None = next(each for each in fields(of) if each.name == name).metadata.get(_PART)
    return found


def check(options: Any) -> None:
    """Raise OptionError for a value outside the limits or choices that its field declares.

    Parts check themselves; this checks only the limits that the whole changes.
    """
    for each in fields(options):
        value = getattr(options, each.name)
        if _KEY in each.metadata:
            _check_field(each.name, value, each.metadata[_KEY])
        elif _PART in each.metadata and value is not None:
            for name, change in each.metadata[_PART].changes.items():
                if change.row is not None and _LIMITS & change.row.keys():
                    _check_field(name, getattr(value, name), Option(**{"help": "", "group": ""} | change.row))


def _check_field(name: str, value: Any, row: Option) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if one is not None:
            check_value(row.flag or name.replace("_", "-"), one, row)


def check_value(name: str, value: Any, row: Option) -> None:
    """Raise OptionError for one value outside its limits or choices."""
    if row.choices is not None:
        permitted = row.choices.values() if isinstance(row.choices, Mapping) else row.choices
        if value not in permitted:
            words = [str(each) for each in permitted]
            known = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
            whose = f"for {row.models} it" if row.models else "it"
            raise OptionError(f"{name} is {value!r}; {whose} must be {known}")
    if row.minimum is not None and not value >= row.minimum:
        raise OptionError(f"{name} is {value}; it must be at least {row.minimum}")
    if row.above is not None and not value > row.above:
        raise OptionError(f"{name} is {value}; it must be above {row.above}")
    if row.maximum is not None and not value <= row.maximum:
        raise OptionError(f"{name} is {value}; it must be at most {row.maximum}")
