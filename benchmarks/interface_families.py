"""The families of the installed transformers whose experts share its interface: tiny random models, calibrated and pruned.

python benchmarks/interface_families.py [--families exaone_moe,nemotron_h]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import BUILD, ROOT, markdown, record, remember, remembered, save

UNFINISHED = BUILD / "interface_families.jsonl"
"""The families that an interrupted run has measured; a run continues there."""


def table(figures: dict[str, Any]) -> str:
    """Return the largest difference by family and column, and what is refused with the reason."""
    found, refused, columns = figures["families"], dict(figures["refused"]), figures["columns"]
    rows = [[f"`{name}`", *(_shown(own[column]) for column in columns)] for name, own in found.items()]
    partly = [
        (name, column, own[column]) for column in columns for name, own in found.items() if isinstance(own[column], str)
    ]
    lines = [f"Refused: `{name}`: {reason}." for name, reason in refused.items()]
    lines += [f"Refused ({column}): `{name}`: {reason}." for name, column, reason in partly]
    return "\n".join([markdown(["family", *columns], rows), *lines]) + "\n"


def _shown(cell: float | str) -> str:
    return "—" if isinstance(cell, str) else f"{cell:.0e}"


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the number of families that have the interface, of those that work, and the names of those that work and have
    no decoder of ours.
    """
    from engine.families.table import ARCHITECTURES
    from engine.families.wrappers import WRAPPERS

    works, refused = len(figures["families"]), len(figures["refused"])
    names = [f"`{name}`" for name in figures["families"] if name not in {*ARCHITECTURES, *WRAPPERS}]
    return {"all": str(works + refused), "works": str(works), "names": ", ".join(names)}


TABLES = {"interface_families": table}
IN_TEXT = {"interface_families": in_text}


def main() -> None:
    import torch
    from transformers import dynamic_module_utils

    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from tiny_families import COLUMNS, measured
    from tiny_generation import COLUMNS as RUNNING
    from tiny_generation import measured_running
    from tiny_rounding import COLUMNS as ROUNDING
    from tiny_rounding import measured_rounding

    from engine.adapted.interface_families import interface_families

    families = interface_families()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(family.name for family in families))
    named = parser.parse_args().families.split(",")
    if unknown := sorted(set(named) - {family.name for family in families}):
        parser.error(f"--families: the installed transformers has no family {', '.join(unknown)}")
    torch.set_num_threads(1)
    dynamic_module_utils.HF_MODULES_CACHE = tempfile.mkdtemp()
    code = {key: record()[key] for key in ("commit", "uncommitted_changes")}
    done = {line["family"]: line["found"] for line in remembered(UNFINISHED) if line.get("code") == code}
    for family in families:
        if family.name in named and family.name not in done:
            with tempfile.TemporaryDirectory() as temporary:
                done[family.name] = measured(family, Path(temporary))
                if isinstance(done[family.name], dict):
                    done[family.name] |= measured_running(family, Path(temporary) / "running")
                    done[family.name] |= measured_rounding(family, Path(temporary) / "rounding")
            remember(UNFINISHED, {"code": code, "family": family.name, "found": done[family.name]})
    UNFINISHED.unlink(missing_ok=True)
    found = {name: done[name] for name in named if isinstance(done[name], dict)}
    refused = {name: done[name] for name in named if isinstance(done[name], str)}
    save("interface_families", {"columns": [*COLUMNS, *RUNNING, *ROUNDING], "families": found, "refused": refused})


if __name__ == "__main__":
    main()
