"""The matrix of families, and what is particular to some of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from conftest import FAMILIES, FURTHER_FAMILIES
from family_matrix import COLUMNS, REFUSED, ROWS, Made

from engine.architectures import ARCHITECTURES
from engine.errors import UnsupportedError


@pytest.fixture(name="made_of", scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model of each family, made when first asked for."""
    return cache(lambda family: Made(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies remote code into a cache whose path it read when it was imported."""
    place = tmp_path_factory.getbasetemp() / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place))


@pytest.mark.parametrize("family", ROWS)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_a_family_can_become(family: str, column: str, made_of: Any, matrix: Any) -> None:
    if (reason := REFUSED.get((family, column))) is not None:
        with pytest.raises(UnsupportedError, match=reason):
            COLUMNS[column](made_of(family))
    else:
        matrix(family, "", column, COLUMNS[column](made_of(family)))


def test_every_family_is_tested() -> None:
    assert set(FAMILIES | FURTHER_FAMILIES) == set(ARCHITECTURES)
    assert set(ROWS) == {name for name, row in ARCHITECTURES.items() if row.experts_keys}
