"""The results that each family supports: the matrix of tests/engine/families/test_families.py as a table with its figures.

python benchmarks/families.py [--families mixtral,olmoe]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, markdown, save


def table(figures: dict[str, Any]) -> str:
    """Return the largest difference of a logit by family and result, and the refusals."""
    rows = [
        [family, *(f"{own[column]:.0e}" if column in own else "refused" for column in figures["columns"])]
        for family, own in figures["families"].items()
    ]
    return "\n".join([markdown(["family", *figures["columns"]], rows), *figures["notes"]]) + "\n"


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the names of the families, without the marks of notes."""
    return {"names": "; ".join(name.rstrip(" ¹²³⁴") for name in figures["families"])}


TABLES = {"families": table}
IN_TEXT = {"families": in_text}


def main() -> None:
    import torch
    from transformers import dynamic_module_utils

    sys.path.insert(0, str(ROOT / "tests"))
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    sys.path.insert(0, str(ROOT))  # before `tests`, which has folders of the same names
    from family_matrix import COLUMNS, NOTES, REFUSED, ROWS, Made, refusals

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(ROWS))
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        dynamic_module_utils.HF_MODULES_CACHE = str(Path(temporary) / "modules")
        for family in parser.parse_args().families.split(","):
            (Path(temporary) / family).mkdir()
            made = Made(family, Path(temporary) / family)
            found[ROWS[family]] = {
                column: measure(made) for column, measure in COLUMNS.items() if (family, column) not in REFUSED
            }
    save("families", {"columns": list(COLUMNS), "families": found, "notes": f"{NOTES}\n{refusals()}".splitlines()})


if __name__ == "__main__":
    main()
