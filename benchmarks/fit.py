"""`compress fit` beside every other way to a smaller model, at equal bytes: perplexity and divergence on held-out text.

    python benchmarks/fit.py [--model demo] [--windows 256] [--rows TITLE …] [--llama-quantize PROGRAM]
    python benchmarks/fit.py --model DIRECTORY --data TEXT --report TEXT …

Each way makes a model of its own size, and `compress fit` is then given the sizes of their weight files. Everything is
calibrated on the training documents of the demo model's text, and judged on the half of the held-out documents that is for
reports; losses are paired by document. Another model, such as examples/real_mixture.py makes, is calibrated on `--data` and
judged on `--report`. With `--fitted`, `fit` is given the sizes of the named rows alone, and every other row is compared with
the largest result that is not larger than its own. Everything is computed in float32, so that only weights differ. Finished
rows are kept in benchmarks/results/fit_MODEL.jsonl, and a run that was interrupted goes on with the first that is missing.

llama.cpp's program `llama-quantize` makes its rows from the model as a GGUF file, with the importance matrix that `compress
export --imatrix-output` writes from the same calibration text. Their size is that of the tensors alone. Types K and IQ need
rows of 256 numbers; of shorter rows llama.cpp makes another type by itself. Without the program these rows are left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from held_out import MODELS, windows_of
from results import BUILD, NOT_POSSIBLE_HERE, RESULTS, ROOT, markdown, remember, remembered, save
from torch import Tensor

from compress.fit_sweep import named
from compress.fitting.divergence import Reference
from compress.fitting.measured import weight_file_bytes
from compress.run.losses import Losses
from compress.run.perplexity import losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve

UNITS = ("prune", "--method", "unit-obs", "--sparsity")
EXPERTS = ("prune", "--granularity", "expert", "--method")
ROWS: dict[str, tuple[str, ...]] = {
    "units, 10 %": (*UNITS, "0.1"),
    "8 bits, nearest": ("quantize", "--bits", "8"),
    "units, 25 %": (*UNITS, "0.25"),
    "experts (fisher), 25 %": (*EXPERTS, "fisher", "--sparsity", "0.25"),
    "experts (reap), 25 %": (*EXPERTS, "reap", "--sparsity", "0.25"),
    "units, 50 %": (*UNITS, "0.5"),
    "experts (fisher), 50 %": (*EXPERTS, "fisher", "--sparsity", "0.5"),
    "experts (reap), 50 %": (*EXPERTS, "reap", "--sparsity", "0.5"),
    "4 bits, nearest": ("quantize", "--bits", "4"),
    "4 bits, awq": ("quantize", "--bits", "4", "--rounding", "awq"),
    "4 bits, gptq": ("quantize", "--bits", "4", "--rounding", "gptq"),
    "units, 75 %": (*UNITS, "0.75"),
    "3 bits, nearest": ("quantize", "--bits", "3"),
    "3 bits, awq": ("quantize", "--bits", "3", "--rounding", "awq"),
    "3 bits, gptq": ("quantize", "--bits", "3", "--rounding", "gptq"),
    "units, 50 %, then 4 bits": (*UNITS, "0.5", "--bits", "4"),
    "experts (fisher), 50 %, then 4 bits": (*EXPERTS, "fisher", "--sparsity", "0.5", "--bits", "4"),
    "units, 75 %, then 2 bits": (*UNITS, "0.75", "--bits", "2"),
    "2 bits, nearest": ("quantize", "--bits", "2"),
    "2 bits, awq": ("quantize", "--bits", "2", "--rounding", "awq"),
    "2 bits, gptq": ("quantize", "--bits", "2", "--rounding", "gptq"),
}
"""Commands by the titles of their rows, from large to small."""
FURTHER = {("shared-expert", "units, 75 %, then 2 bits"): ("--group-size", "16", "--unit-multiple", "16")}
"""Options that a row has for one model: a quarter of the second model's 96 hidden units is less than a group of 32."""
TYPES = {f"llama.cpp, {kind}": kind for kind in ("Q4_K_M", "Q3_K_M", "IQ4_XS", "Q2_K", "IQ3_XXS", "IQ2_XS")}
"""Types of llama.cpp by the titles of their rows."""
SAMPLES = 128
PRETRAINED, FURTHER_SIZES = "fit_pretrained_mixture", "fit_pretrained_mixture_further"
"""Names of the results of a model of one's own: of most rows, and of those that were compared with far smaller results."""
_OTHER_TYPES = re.compile(r"(\d+) of (\d+) tensor\(s\) required fallback")


def command(words: tuple[str, ...], model: str, output: Path, options: argparse.Namespace) -> None:
    """Run a command of this package in a process of its own."""
    if "--resume" not in words:
        shutil.rmtree(output, ignore_errors=True)
        output.unlink(missing_ok=True)
    text = ["--samples", str(options.samples), "--sequence-length", "256", "--data", options.data]
    text += ["--evaluation-samples", "0"] if words[0] != "export" else []
    line = [sys.executable, "-m", "cli", words[0], model, *words[1:], "-o", str(output), "--threads", "1", *text]
    subprocess.run(line, cwd=ROOT, check=True, stdout=sys.stderr)


def by_llama_cpp(kind: str, model: str, place: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Return the file that llama.cpp makes, its version, and how many of how many tensors have another type because their
    rows are short.
    """
    whole, importance, output = (place / f"{name}.gguf" for name in ("whole", "importance", "way"))
    importance.unlink(missing_ok=True)
    command(("export", "--format", "gguf", "--type", "bf16", "--imatrix-output", str(importance)), model, whole, options)
    line = [options.llama_quantize, "--imatrix", str(importance), str(whole), str(output), kind, "1"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    said = done.stdout + done.stderr
    (version,) = re.findall(r"^version: (.*)$", said, re.MULTILINE)
    return output, {"version": version, "other_types": [int(each) for pair in _OTHER_TYPES.findall(said) for each in pair]}


def stored_bytes(model: Path) -> int:
    """Return the bytes of a directory's weight files, or of the tensors of a GGUF file."""
    if model.is_dir():
        return weight_file_bytes(model)
    import gguf

    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(str(model)).tensors)


def measured(model: Path, reference: Reference, tokens_SL: Tensor) -> dict[str, Any]:
    """Return the size of a model, its losses on every window and its divergence."""
    own = Checkpoint(model)
    found = losses(own, tokens_SL, dtype=torch.float32)
    return {
        "bytes": stored_bytes(model),
        "losses": [round(loss, 4) for loss in found.summed_S.tolist()],
        "divergence": reference.divergence(own),
    }


def way(title: str, reference: Reference, tokens_SL: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row with the result of one way."""
    model, path, about = options.source, options.place / "way", dict[str, Any]()
    if title in TYPES:
        path, about = by_llama_cpp(TYPES[title], model, options.place, options)
    else:
        command((*ROWS[title], *FURTHER.get((options.model, title), ())), model, path, options)
    return {"title": title, "way": measured(path, reference, tokens_SL) | about}


def fitted(sizes: Sequence[int], options: argparse.Namespace) -> dict[int, Path]:
    """Return the results of `compress fit` by their sizes, which are made with one set of statistics."""
    output = options.place / "fitted"
    words = ("--target-size", ",".join(map(str, sizes)), "--validation-samples", str(options.validation_samples))
    command(("fit", *words, "--resume"), options.source, output, options)
    return {size: output / named(size) if len(sizes) > 1 else output for size in sizes}


def nearest(fits: Mapping[int, dict[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest of the results of `fit` whose target is not above a row's size. The smallest row has its own."""
    return fits[max(size for size in fits if size <= row["way"]["bytes"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help=f"{', '.join(MODELS)} or a directory")
    parser.add_argument("--windows", type=int, default=256, help="held-out windows of 256 tokens")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration sequences")
    parser.add_argument("--validation-samples", type=int, default=64, help="sequences on which `fit` measures its choices")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS, *TYPES], help="titles of rows; all by default")
    parser.add_argument("--fitted", nargs="*", choices=[*ROWS, *TYPES], help="rows whose sizes are fitted; all by default")
    parser.add_argument("--llama-quantize", default=shutil.which("llama-quantize"), help="this program of llama.cpp")
    parser.add_argument("--data", default="stdlib", help="calibration text")
    parser.add_argument("--report", help="text to judge on; by default the report half of the held-out documents")
    parser.add_argument("--name", default=PRETRAINED, choices=(PRETRAINED, FURTHER_SIZES), help="of a model of your own")
    options = parser.parse_args()
    if options.model not in MODELS and options.report is None:
        print("give --data and --report with a model of your own", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    torch.set_num_threads(1)
    name = f"fit_{options.model.replace('-', '_')}" if options.model in MODELS else options.name
    options.source, options.place = MODELS.get(options.model, options.model), BUILD / name
    source = Checkpoint(resolve(options.source))
    half = "report" if options.report is None else "all"
    windows = windows_of(options.source, half, options.windows, options.report or "stdlib")
    tokens_SL, done = windows.tokens_SL, RESULTS / f"{name}.jsonl"
    key = [options.windows, options.samples]
    titles = options.rows or [*ROWS, *(TYPES if options.llama_quantize else ())]
    lines = [line for line in remembered(done) if line["key"] == key]
    ways = {line["title"]: line for line in lines if "title" in line}
    fits = {line["bytes"]: line["fit"] for line in lines if "fit" in line}
    if not lines:
        shutil.rmtree(options.place, ignore_errors=True)  # results of an earlier benchmark
    options.place.mkdir(parents=True, exist_ok=True)
    with Reference(source, tokens_SL, torch.float32) as reference:
        full = [round(loss, 4) for loss in losses(source, tokens_SL, dtype=torch.float32).summed_S.tolist()]
        for title in titles:
            if title not in ways:
                ways[title] = way(title, reference, tokens_SL, options) | {"key": key}
                remember(done, ways[title])
        wanted = {row["way"]["bytes"] for title, row in ways.items() if title in (options.fitted or ways)}
        wanted.add(min(row["way"]["bytes"] for row in ways.values()))  # no row is compared with a larger result
        sizes = sorted(wanted - fits.keys())
        for size, path in fitted(sizes, options).items() if sizes else ():
            fits[size] = measured(path, reference, tokens_SL)
            remember(done, {"bytes": size, "fit": fits[size], "key": key})
    versions = {row["way"]["version"] for row in ways.values() if "version" in row["way"]}
    save(
        name,
        {
            "samples": options.samples,
            "bytes": weight_file_bytes(source.directory),
            "windows": list(tokens_SL.shape),
            "documents": windows.documents_S.tolist(),
            "full": full,
            "validation_samples": options.validation_samples,
            "rows": [{"title": title, "way": row["way"], "fit": nearest(fits, row)} for title, row in ways.items()],
        },
        {"llama.cpp": {"version": ", ".join(sorted(versions))}} if versions else {},
    )
    done.unlink(missing_ok=True)


def ratios(figures: dict[str, Any], row: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the perplexity ratios of a way and of `fit` to the model, and of `fit` to the way."""
    documents_S, predictions = torch.tensor(figures["documents"]), figures["windows"][1] - 1
    full, way, fitted = (
        Losses(torch.tensor(each, dtype=torch.float64), predictions)
        for each in (figures["full"], row["way"]["losses"], row["fit"]["losses"])
    )
    pairs = ((way, full), (fitted, full), (fitted, way))
    return tuple(one.ratio_to(other, documents_S) for one, other in pairs)  # type: ignore[return-value]


def table(figures: dict[str, Any]) -> str:
    """Return the table of the page, from large results to small ones."""
    cells = []
    for row in sorted(figures["rows"], key=lambda row: -row["way"]["bytes"]):
        way, fitted, between = ratios(figures, row)
        cells.append(
            [
                row["title"],
                f"{row['way']['bytes'] / 1e6:.2f}",
                *(f"{way.value:.3f}", f"{1e3 * row['way']['divergence']:.3f}"),
                *(f"{row['fit']['bytes'] / 1e6:.2f}", f"{fitted.value:.3f}", f"{1e3 * row['fit']['divergence']:.3f}"),
                f"{between.value:.3f} ({between.low:.3f} to {between.high:.3f})",
            ]
        )
    count, length = figures["windows"]
    about = (
        f"{count} × {length} tokens of held-out documents; the model has {figures['bytes'] / 1e6:.1f} MB. Ratios are "
        "perplexities over the model's; KL is from its predictions, in thousandths of a nat per token. The last column is "
        "the perplexity of `fit` over that of the row, with its interval of 95 %, paired by document."
    )
    shares = [own for row in figures["rows"] if (own := row["way"].get("other_types"))]
    if shares:
        least = min(shares)
        about += (
            f" llama.cpp's rows have its importance matrix. In them at least {least[0]} of {least[1]} tensors have another "
            "type, because their rows are too short for the blocks of the one named."
        )
    about += "\n\n"
    head = ["", "MB", "ratio", "KL", "`fit`: MB", "ratio", "KL", "`fit` over the row"]
    return about + markdown(head, cells)


TABLES = {"fit_demo": table, "fit_shared_expert": table, PRETRAINED: table, FURTHER_SIZES: table}


if __name__ == "__main__":
    main()
