"""The results that each family supports: the matrix of tests/engine/families/test_families.py as a table with its figures.

python benchmarks/families.py        and then: python benchmarks/results.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from results import ROOT, markdown, save

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "support"))
sys.path.insert(0, str(ROOT))  # before `tests`, which has folders of the same names
from family_matrix import COLUMNS, NOTES, REFUSED, ROWS, Made, refusals


def main() -> None:
    import torch
    from transformers import dynamic_module_utils

    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        dynamic_module_utils.HF_MODULES_CACHE = str(Path(temporary) / "modules")
        for family in ROWS:
            (Path(temporary) / family).mkdir()
            made = Made(family, Path(temporary) / family)
            figures[family] = {
                column: measure(made) for column, measure in COLUMNS.items() if (family, column) not in REFUSED
            }
    rows = [
        [ROWS[family], *(f"{own[column]:.0e}" if column in own else "refused" for column in COLUMNS)]
        for family, own in figures.items()
    ]
    save("families", figures, f"{markdown(['family', *COLUMNS], rows)}\n{NOTES}\n{refusals()}\n")


if __name__ == "__main__":
    main()
