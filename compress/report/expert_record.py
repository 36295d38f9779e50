"""The artifact's file `expert_record.json`: usage and similarity of the experts before and after, for pictures.

Pictures of usage and similarity (DiEP's figures 5 to 7) can then be drawn without the source model and without its text.
Similarities are rounded to DIGITS decimals. They are left out where they would be more than MOST_NUMBERS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.files.json_file import load_json, write_json

FILE_NAME = "expert_record.json"
SCHEMA_VERSION = 1
DIGITS = 4
MOST_NUMBERS = 500_000
WHEN = ("before", "after")

Matrix = list[list[float]]


@dataclass(frozen=True)
class Experts:
    """One model's experts, by decoder layer; a mapping is empty where nothing was measured."""

    routed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Number of held-out tokens routed to each expert."""
    within: Mapping[int, Matrix] = field(default_factory=dict)
    """RBF CKA between the outputs of each two experts of the layer."""
    between: Mapping[int, Matrix] = field(default_factory=dict)
    """RBF CKA between the layer's experts and those of the MoE layer before."""


@dataclass(frozen=True)
class ExpertRecord:
    """The experts of the source and those of the artifact."""

    before: Experts
    after: Experts


def save_record(record: ExpertRecord, directory: Path) -> None:
    """Write the file into an artifact's directory."""
    write_json(
        directory / FILE_NAME, {"schema_version": SCHEMA_VERSION} | {when: _to_json(getattr(record, when)) for when in WHEN}
    )


def load_record(directory: Path) -> ExpertRecord | None:
    """Return the record of an artifact, None where it has none. Raises CheckpointError for a damaged file."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    values = load_json(path, "record of experts")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(f"{path}: is not of schema {SCHEMA_VERSION}; copy the artifact again")
    try:
        return ExpertRecord(*(_from_json(values[when]) for when in WHEN))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: must have counts and similarities by layer; copy the artifact again") from error


def _to_json(experts: Experts) -> dict[str, Any]:
    numbers = sum(len(row) for kind in (experts.within, experts.between) for own in kind.values() for row in own)
    similar = numbers <= MOST_NUMBERS
    return {
        "routed": {str(layer): list(counts) for layer, counts in experts.routed.items()},
        "similarity": {str(layer): _rounded(own) for layer, own in experts.within.items() if similar},
        "similarity_to_layer_before": {str(layer): _rounded(own) for layer, own in experts.between.items() if similar},
    }


def _rounded(matrix: Matrix) -> list[list[float | None]]:
    return [[round(value, DIGITS) if math.isfinite(value) else None for value in row] for row in matrix]


def _from_json(values: dict[str, Any]) -> Experts:
    return Experts(
        {int(layer): [_count(count) for count in own] for layer, own in values["routed"].items()},
        {int(layer): _matrix(own) for layer, own in values["similarity"].items()},
        {int(layer): _matrix(own) for layer, own in values["similarity_to_layer_before"].items()},
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a count is a number from 0")
    return value


def _matrix(rows: Any) -> Matrix:
    """Return a matrix with NaN in the place of None."""
    matrix = [[math.nan if value is None else float(value) for value in row] for row in rows]
    if not matrix or len({len(row) for row in matrix}) != 1:
        raise ValueError("the rows of a matrix have one length")
    return matrix
