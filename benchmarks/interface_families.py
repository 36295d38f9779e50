"""The families of the installed transformers whose experts share its interface: tiny random models, calibrated and pruned.

python benchmarks/interface_families.py [--families lfm2_moe,nemotron_h]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, markdown, save


def table(figures: dict[str, Any]) -> str:
    """Return the largest difference of a logit by family and column, and the families that are refused with the reason."""
    found, refused = figures["families"], figures["refused"]
    rows = [[f"`{name}`", *(f"{own[column]:.0e}" for column in figures["columns"])] for name, own in found.items()]
    lines = [f"Refused: `{name}`: {reason}." for name, reason in refused.items()]
    return "\n".join([markdown(["family", *figures["columns"]], rows), *lines]) + "\n"


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the number of families that have the interface, and of those that work."""
    works, refused = len(figures["families"]), len(figures["refused"])
    return {"all": str(works + refused), "works": str(works)}


TABLES = {"interface_families": table}
IN_TEXT = {"interface_families": in_text}


def main() -> None:
    import torch

    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from tiny_families import COLUMNS, measured

    from engine.transformers_models.interface_families import interface_families

    families = interface_families()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(family.name for family in families))
    named = parser.parse_args().families.split(",")
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for family in families:
        if family.name in named:
            with tempfile.TemporaryDirectory() as temporary:
                own = measured(family, Path(temporary))
            if isinstance(own, str):
                refused[family.name] = own
            else:
                found[family.name] = own
    save("interface_families", {"columns": list(COLUMNS), "families": found, "refused": refused})


if __name__ == "__main__":
    main()
