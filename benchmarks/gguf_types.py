"""Decoding of a random mixture from GGUF files of every common type, in this engine and in llama.cpp on the same file.

python benchmarks/gguf_types.py --peer-python PYTHON --llama-quantize PROGRAM [--directory DIR] [--layers 2]

PYTHON has llama-cpp-python, and PROGRAM is llama.cpp's llama-quantize, which makes the files with its own choice of types
for each matrix. The model has 64 experts of 1,536 hidden units, of which a token uses 6. Both programs read texts of random
tokens one by one, in turns, on all cores; a ratio is the median of those of neighboring rounds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from engine_speed import asked
from hidden_instructions import HIDDEN, hide, require_built_without
from llama_cpp_peer import NAME, build_of
from packed_floats import beside_text, rates_in_turns
from random_model import shape, write_random_model
from results import NOT_POSSIBLE_HERE, markdown, save

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions

CHANGES = {"hidden": 2048, "experts": 64, "top_k": 6, "width": 1536}
VOCABULARY, TOKENS = 4096, 40
TYPES = (
    "Q8_0",
    "Q6_K",
    "Q5_K_M",
    "Q5_1",
    "Q5_0",
    "Q4_K_M",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4_MOE",
    "Q3_K_M",
    "Q2_K",
)
"""The types that llama-quantize is asked for."""


def prepare(directory: Path, layers: int) -> Path:
    """Return the GGUF file in bfloat16, which is made if it does not exist yet."""
    model, whole = directory / "model", directory / "whole.gguf"
    if not whole.is_file():
        write_random_model(model, shape(layers=layers, **CHANGES) | {"vocab_size": VOCABULARY})
        export_gguf(GgufExportOptions(model=str(model), output=whole, format="gguf", type="bf16"))
        shutil.rmtree(model)
    return whole


def measured(whole: Path, kind: str, python: str, program: str) -> dict[str, Any]:
    """Return the size of a file of this type, and the rates of both programs."""
    file = whole.with_name(f"{kind}.gguf")
    subprocess.run([program, str(whole), str(file), kind], check=True, capture_output=True)
    found = {"type": kind, "bytes": file.stat().st_size} | rates_in_turns(file, file, TOKENS, python)
    file.unlink()
    return found


def table(figures: dict[str, Any]) -> str:
    """Return a row for each type."""
    rows = []
    for row in figures["rows"]:
        own, peer = (f"{statistics.median(row[key]):.1f}" for key in ("own_rates", "peer_rates"))
        ratio = beside_text(row["own_rates"], row["peer_rates"])
        rows.append([row["type"].removesuffix("_MOE"), f"{row['bytes'] / 1e6:,.0f}", own, peer, ratio])
    return markdown(["type of the file", "MB", "this engine, tokens/s", f"{NAME}, tokens/s", "ratio"], rows)


TABLES = {"gguf_types": table, "gguf_types_without_avx512": table}


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", help="Python that has llama-cpp-python")
    parser.add_argument("--llama-quantize", default=shutil.which("llama-quantize"), help="this program of llama.cpp")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--hide", choices=HIDDEN, default="", help="instructions that nothing uses")


@torch.inference_mode()
def main() -> None:
    with asked(__doc__, more) as (directory, arguments):
        hide(arguments.hide)
        python, program = arguments.peer_python, arguments.llama_quantize
        if not python or not program:
            print("needs --peer-python and --llama-quantize", file=sys.stderr)
            sys.exit(NOT_POSSIBLE_HERE)
        require_built_without(arguments.hide, build_of(python))
        whole = prepare(directory, arguments.layers)
        rows = [measured(whole, kind, python, program) for kind in arguments.types.split(",")]
    name = f"gguf_types_without_{arguments.hide}" if arguments.hide else "gguf_types"
    save(name, {"rows": rows}, {NAME: rows[0]["peer"]})


if __name__ == "__main__":
    main()
