"""Decoding and prefill of a random mixture of 1.5 B parameters: ours, transformers, llama.cpp and vLLM, in 16, 8 and 4 bits.

pip install llama-cpp-python gguf matplotlib
python benchmarks/decode.py [--directory DIR] [--rounds 5] [--vllm-python PYTHON] [--hide avx512 | --require amx|zen4]

All contenders of equal bits are loaded at once and timed in turn. Speeds are medians. A ratio is the median of ratios of two
consecutive measurements: memory bandwidth drifts within a minute, so contenders decode in turn several times a round.
transformers is measured with its defaults, and with the fastest of its implementations of experts in each test; long
prompts, which are read in every second round, with those that compile no shape of their own. vLLM is timed in turn with
this engine alone, after the others, because all do not fit into 24 GB. llama.cpp gets the same weights, as `compress export
--format gguf` writes them. Memory bandwidth is measured in turn with decoding too, by summing 1 GB in huge pages with as
many threads; a contender's share of it is the median of shares of two measurements of one turn.

With `--hide avx512` nothing uses AVX-512, which shows the speed on a processor with AVX2 alone. llama.cpp must have been
built without it: `GGML_NATIVE=OFF`. Layers compiled by torch.compile are left out then: torch 2.13 ends with a protection
fault in them. With `--require amx` or `zen4` the figures are stored apart, as those of a processor with Intel's
matrix tiles or of a Zen 4.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_speed import write_skip_tables
from hidden_instructions import HIDDEN, hide, require_built_without
from random_model import shape, write_random_model
from results import NOT_POSSIBLE_HERE, RESULTS, markdown, require, save, times
from vllm_agreement import version as vllm_version

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.bench.backends import COMPILED, BenchCase, BenchSpec, TorchBackend, TransformersBackend, run_case
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.files.huge_pages import zeros
from engine.kernels.compiler.processor import HOST

PROMPT, LONG, NEW, BATCH = 512, 4096, 64, 8
LLAMA_TYPES = {"BF16": None, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
"""Names of llama.cpp's file types, and their numbers."""
TURNS = 3
"""Number of times in a round that contenders of equal bits decode in turn."""
OURS = {"ours, bf16": "bf16", "ours, 8 bits": "8-bit", "ours, 4 bits": "4-bit"}
SKIPPING = "ours, bf16, skipping at 1"
DEFAULT, BEST = "transformers, bf16", "transformers, bf16, its best"
COMPILED_LAYERS = "transformers, compiled layers"
BITS = {"bf16": ("ours, bf16", DEFAULT, BEST, "llama.cpp BF16"), "8 bits": ("ours, 8 bits", "llama.cpp Q8_0")}
BITS["4 bits"] = ("ours, 4 bits", "llama.cpp Q4_0", "llama.cpp Q4_K_M")
VLLM, BESIDE_VLLM = "vLLM, bf16", "ours, beside vLLM"
PREFILL, LONG_PREFILL = f"prefill {PROMPT}", f"prefill {LONG}"
DECODE, TOGETHER = f"decode {NEW}", f"decode {NEW}, {BATCH} sequences"
TESTS = (PREFILL, LONG_PREFILL, DECODE, TOGETHER)
PEERS = {"transformers": BEST, "llama_cpp": "llama.cpp BF16", "llama_cpp_8_bits": "llama.cpp Q8_0"}
PEERS["llama_cpp_4_bits"] = "llama.cpp Q4_0"
QUOTED = {"decode": DECODE, "prompt": PREFILL}
"""Peers and tests that sentences quote, by the parts of their names there."""
IMPLEMENTATIONS = {
    LONG_PREFILL: ("grouped_mm", "eager"),
    TOGETHER: ("grouped_mm", "eager", f"{COMPILED}grouped_mm"),
    PREFILL: ("grouped_mm", "eager", f"{COMPILED}grouped_mm"),
    DECODE: ("grouped_mm", "batched_mm", "eager", f"{COMPILED}grouped_mm", f"{COMPILED}batched_mm"),
}
"""Implementations of experts in transformers, some with each layer compiled by torch.compile. batched_mm is left out for
prompts: it copies every token's experts, 18 GB for a prompt of 512.
"""
REQUIRED = {"amx": torch.cpu._is_amx_tile_supported, "zen4": lambda: HOST == "znver4"}
"""Whether the processor is of a kind, by the name of what figures require."""
Rates = dict[str, dict[str, list[float]]]


def prepare(directory: Path, layers: int, *, for_peers: bool = True) -> None:
    """Make the mixture, our low-bit results and llama.cpp's files, if they do not exist yet."""
    model = directory / "bf16"
    if not model.is_dir():
        write_random_model(model, shape(layers=layers))
    if not (model / FILE_NAME).exists():
        write_skip_tables(model)
    for bits in (8, 4):
        if not (directory / f"{bits}-bit").is_dir():
            options = ["--bits", str(bits), "--quantize-head", "--evaluation-samples", "0"]
            command = [sys.executable, "-m", "cli", "quantize", str(model), *options, "-o", str(directory / f"{bits}-bit")]
            subprocess.run(command, check=True)
    if not for_peers:
        return
    if not (directory / "BF16.gguf").exists():
        export_gguf(GgufExportOptions(model=str(model), output=directory / "BF16.gguf", type="bf16"))
    for name, number in LLAMA_TYPES.items():
        if number is not None and not (directory / f"{name}.gguf").exists():
            quantise_gguf(directory / "BF16.gguf", directory / f"{name}.gguf", number)


def quantise_gguf(source: Path, target: Path, number: int) -> None:
    """Quantize a file with llama.cpp's own rounding."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = number
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
    assert not failed, f"{target}: llama.cpp could not make it"


# Workers: each loads its model once, and answers the name of a test with tokens per second.

CASES = {PREFILL: (BenchCase("pp", PROMPT), 1), LONG_PREFILL: (BenchCase("pp", LONG), 1), DECODE: (BenchCase("tg", NEW), 1)}
CASES[TOGETHER] = BenchCase("tg", NEW), BATCH


def worker_of_ours(given: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return the worker of this engine."""
    hide(given["hidden"])
    backend = TorchBackend(BenchSpec(given["model"], threads=given["threads"], skip_threshold=given["skip_threshold"]))
    backend.count_skips(False)

    def answer(test: str) -> dict[str, Any]:
        rate = _rate(backend, test)
        return {"rate": rate, "bytes_per_token": backend.bytes_read_per_token, "skipped": backend.experts_skipped_share}

    backend.count_skips(True)
    _rate(backend, DECODE)
    backend.count_skips(False)
    return answer


def worker_of_transformers(given: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return the worker of transformers. A test's name may end with a colon and the implementation of experts."""
    backend = TransformersBackend(BenchSpec(given["model"], "transformers", threads=given["threads"]))
    own: str = backend._model.config._experts_implementation

    def answer(request: str) -> dict[str, Any]:
        test, _, implementation = request.partition(":")
        backend.use_experts(implementation or own)
        return {"rate": _rate(backend, test)}

    return answer


def _rate(backend: Any, test: str) -> float:
    case, batch = CASES[test]
    tokens_BL = torch.randint(32000, (batch, LONG), generator=torch.Generator().manual_seed(0))
    return case.tokens * batch / run_case(backend, case, tokens_BL)


def worker_of_llama_cpp(given: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return the worker of llama.cpp, which uses the Python wrapper of its C API."""
    import llama_cpp

    sizes = {"n_ctx": LONG + NEW, "n_batch": PROMPT, "n_ubatch": PROMPT}
    threads = {"n_threads": given["threads"], "n_threads_batch": given["threads"]}
    model = llama_cpp.Llama(given["model"], verbose=False, **threads, **sizes)
    tokens = np.random.default_rng(0).integers(0, model.n_vocab(), LONG).tolist()
    together = _sequences_of_llama_cpp(model, given["threads"], tokens)

    def answer(test: str) -> dict[str, Any]:
        if test == TOGETHER:
            return {"rate": together()}
        model.reset()
        started = time.perf_counter()
        if test in (PREFILL, LONG_PREFILL):
            count = PROMPT if test == PREFILL else LONG
            model.eval(tokens[:count])
            return {"rate": count / (time.perf_counter() - started)}
        for token in tokens[:NEW]:
            model.eval([token])
        return {"rate": NEW / (time.perf_counter() - started)}

    return answer


def _sequences_of_llama_cpp(model: Any, threads: int, tokens: list[int]) -> Callable[[], float]:
    """Return a function that decodes several sequences of a loaded model at once, and returns their tokens per second."""
    import llama_cpp

    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max = BATCH * 4 * NEW, BATCH
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model._model.model, parameters)
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    batch.n_tokens = BATCH

    def rate() -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        for position in range(NEW):
            for row in range(BATCH):
                batch.token[row], batch.pos[row] = tokens[row * NEW + position], position
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, True
            failed = llama_cpp.llama_decode(context, batch)
            assert not failed, f"llama_decode returned {failed}"
            llama_cpp.llama_synchronize(context)
        return BATCH * NEW / (time.perf_counter() - started)

    return rate


def _tokens_of(case: BenchCase) -> tuple[int, int]:
    """Return the tokens of a prompt and the new ones of a case in vLLM, which makes a token after each prompt."""
    return (min(case.tokens, LONG - 1), 1) if case.kind == "pp" else (1, case.tokens)


WORKERS = {"ours": worker_of_ours, "transformers": worker_of_transformers, "llama.cpp": worker_of_llama_cpp}


class Setting(NamedTuple):
    """Settings that all contenders share."""

    threads: int
    vllm_python: Path | None
    hidden: str = ""
    """A key of HIDDEN, or nothing."""
    required: str = ""
    """A key of REQUIRED, or nothing."""

    @property
    def result(self) -> str:
        """The name of the results."""
        if self.hidden:
            return f"decode_without_{self.hidden}"
        return f"decode_with_{self.required}" if self.required else "decode"


class Contender:
    """A process that holds one model."""

    def __init__(self, kind: str, model: Path, setting: Setting, skip_threshold: float = 0.0) -> None:
        given = {"kind": kind, "model": str(model), "threads": setting.threads, "skip_threshold": skip_threshold}
        given["hidden"] = setting.hidden
        command = [sys.executable, __file__, "--worker", json.dumps(given)]
        if kind == "vLLM":
            given["tests"] = {name: (*_tokens_of(case), batch) for name, (case, batch) in CASES.items()}
            command = [str(setting.vllm_python), str(Path(__file__).with_name("vllm_peer.py")), json.dumps(given)]
        environment = os.environ | HIDDEN.get(setting.hidden, {})
        if kind == "vLLM":
            environment |= {"OMP_NUM_THREADS": str(setting.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.ask(PREFILL)  # so that the next one loads undisturbed

    def ask(self, test: str) -> dict[str, Any]:
        """Return the answer to one test."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(test, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"rate"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._process.args}: ended without an answer")

    def end(self) -> None:
        """Let the process end with its input: killed, vLLM's would leave processes of its own."""
        self._process.communicate()


def opened(bits: str, directory: Path, setting: Setting) -> dict[str, Contender]:
    """Return the contenders with weights of so many bits, each with its model loaded."""
    made = {title: Contender("ours", directory / OURS[title], setting) for title in BITS[bits] if title in OURS}
    if bits == "bf16":
        made[SKIPPING] = Contender("ours", directory / "bf16", setting, 1.0)
        for title in (DEFAULT,) if setting.hidden else (DEFAULT, COMPILED_LAYERS):  # layers that are compiled once stay so
            made[title] = Contender("transformers", directory / "bf16", setting)
    peers = {f"llama.cpp {name}": name for name in LLAMA_TYPES}
    for title in (title for title in BITS[bits] if title in peers):
        made[title] = Contender("llama.cpp", directory / f"{peers[title]}.gguf", setting)
    return made


def measure(
    directory: Path, rounds: int, setting: Setting
) -> tuple[Rates, dict[str, dict[str, Any]], dict[str, list[float]]]:
    """Return rates by contender and test, the figures of our reports, and memory bandwidth in GB/s by the turns' bits."""
    kept = (DEFAULT,) if setting.hidden else (DEFAULT, COMPILED_LAYERS)
    implementations = {test: [name for name in names if holder(name) in kept] for test, names in IMPLEMENTATIONS.items()}
    contenders: dict[str, Contender] = {}
    """Those of the bits that are measured at the moment: all of them do not fit into 24 GB."""
    rates: Rates = {}
    said: dict[str, dict[str, Any]] = {}
    streams: dict[str, list[float]] = {bits: [] for bits in BITS}
    buffer = zeros((1 << 27,), torch.int64).fill_(1)

    def time_once(title: str, test: str, place: int) -> None:
        said[title] = contenders[title].ask(test)
        if place:
            rates.setdefault(title, {}).setdefault(test, []).append(said[title]["rate"])

    for bits in BITS:
        contenders.update(opened(bits, directory, setting))
        members = [title for title in (*BITS[bits], SKIPPING) if title in contenders]
        for place in range(rounds + 1):  # the first warms up
            for title in members:
                contenders[title].ask(PREFILL)  # the system may have evicted pages of a waiting process
                time_once(title, PREFILL, place)
                if place % 2:
                    time_once(title, LONG_PREFILL, place)
            for _ in range(TURNS):
                for title in members:
                    time_once(title, DECODE, place)
                if place:
                    streams[bits].append(stream(buffer, setting.threads))
            for title in members:
                time_once(title, TOGETHER, place)
            for test, names in implementations.items():
                for name in names if DEFAULT in members and (place % 2 or test != LONG_PREFILL) else ():
                    time_once(holder(name), f"{test}:{name}", place)
        while contenders:
            contenders.popitem()[1].end()
    rates[BEST] = {
        test: max((rates[holder(name)][f"{test}:{name}"] for name in names), key=statistics.median)
        for test, names in implementations.items()
    }
    return rates, said, streams


def measure_vllm(directory: Path, rounds: int, setting: Setting) -> Rates:
    """Return the rates of vLLM, and ours in the same rounds."""
    kinds = {BESIDE_VLLM: "ours", VLLM: "vLLM"}
    contenders = {title: Contender(kind, directory / "bf16", setting) for title, kind in kinds.items()}
    rates: Rates = {title: {test: [] for test in TESTS} for title in kinds}
    for place in range(rounds + 1):
        for test in (PREFILL, *((LONG_PREFILL,) if place % 2 else ()), *(DECODE,) * TURNS, TOGETHER):
            for title, contender in contenders.items():
                rate = contender.ask(test)["rate"]
                if place:
                    rates[title][test].append(rate)
    for contender in contenders.values():
        contender.end()
    return rates


def holder(implementation: str) -> str:
    """Return the contender that runs an implementation of transformers."""
    return COMPILED_LAYERS if implementation.startswith(COMPILED) else DEFAULT


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of paired ratios, or the ratio of medians if the two were not measured in turn."""
    if len(ours) != len(theirs):
        return statistics.median(ours) / statistics.median(theirs)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def speed_up(row: dict[str, Any], ours: list[float], test: str) -> str:
    """Return the ratio of our speed to that of a row, with its range.

    Where ours were timed several times in each round of the peer, the range is of their medians.
    """
    theirs = row["rounds"][test]
    turns, rest = divmod(len(ours), len(theirs))
    if turns > 1 and not rest:
        ours = [statistics.median(ours[at : at + turns]) for at in range(0, len(ours), turns)]
    return times(row[f"{test} ratio"], ours, theirs)


def stream(buffer: torch.Tensor, threads: int) -> float:
    """Return GB/s of reading memory with so many threads, the best of three."""
    torch.set_num_threads(threads)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def rows(
    rates: Rates, said: dict[str, dict[str, Any]], streams: dict[str, list[float]], directory: Path
) -> list[dict[str, Any]]:
    """Return a row for each contender: its speeds, the ratio of our speed at equal bits to each, and its share of memory."""
    made = []
    for bits, titles in BITS.items():
        for title in (*titles, *((VLLM, SKIPPING) if bits == "bf16" else ())):
            if title not in rates:
                continue
            found, ours = rates[title], rates[BESIDE_VLLM if title == VLLM else titles[0]]
            row: dict[str, Any] = {"title": title, "bits": bits} | {test: statistics.median(found[test]) for test in TESTS}
            row |= {f"{test} ratio": ratio(ours[test], found[test]) for test in TESTS}
            read = bytes_per_token(title, said, directory)
            row |= {"bytes_per_token": read, "share": read / 1e9 * ratio(found[DECODE], streams[bits])}
            row |= {"skipped": said[title]["skipped"]} if title == SKIPPING else {}
            row |= {"ours": {test: ours[test] for test in TESTS}} if title == VLLM else {}
            made.append(row | {"rounds": {test: found[test] for test in TESTS}})
    return made


def bytes_per_token(title: str, said: dict[str, dict[str, Any]], directory: Path) -> float:
    """Return the bytes of weights that are read for one token."""
    if not title.startswith("llama.cpp"):
        own: float = said[title if title in said and title.startswith("ours") else "ours, bf16"]["bytes_per_token"]
        return own
    import gguf

    config = json.loads((directory / "bf16" / "config.json").read_text())
    used = config["num_experts_per_tok"] / config["num_local_experts"]
    tensors = gguf.GGUFReader(directory / f"{title.split()[-1]}.gguf").tensors
    return float(
        sum(each.n_bytes * (used if "_exps" in each.name else 1.0) for each in tensors if each.name != "token_embd.weight")
    )


def table(figures: dict[str, Any]) -> str:
    """Return the table of the page. A speed-up is that of this engine over the peer of its row."""
    model = f"{figures['parameters'] / 1e9:.1f} B parameters, {figures['top_k']} of {figures['experts']} experts"
    header = [model, *(part for test in TESTS for part in (f"{test} t/s", "speed-up of ours"))]
    header += ["MB a token", "share of memory bandwidth"]
    ours = {row["bits"]: row["rounds"] for row in figures["rows"] if row["title"] in OURS}

    def cells(row: dict[str, Any], test: str) -> list[str]:
        speed = f"{row[test]:.0f}" if test in (PREFILL, LONG_PREFILL) else f"{row[test]:.1f}"
        is_peer = not row["title"].startswith("ours")
        own = row.get("ours", ours[row["bits"]])
        return [speed, speed_up(row, own[test], test) if is_peer else ""]

    lines = []
    for row in figures["rows"]:
        name = row["title"] + (f" ({row['skipped']:.0%} skipped)" if "skipped" in row else "")
        speeds = [cell for test in TESTS for cell in cells(row, test)]
        lines.append([name, *speeds, f"{row['bytes_per_token'] / 1e6:.0f}", f"{row['share']:.0%}"])
    return markdown(header, lines)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the range of the memory bandwidth over the rounds, in GB/s, our shares of it, and ratios to the peers."""
    found = figures["stream_gb_per_second"]
    said = {"stream_low": f"{min(found):.0f}", "stream_high": f"{max(found):.0f}"}
    rows = {row["title"]: row for row in figures["rows"]}
    for bits, (own, *_) in BITS.items():
        said[f"share_{bits.replace(' ', '_')}"] = f"{rows[own]['share']:.0%}"
    for peer, title in PEERS.items():
        ours = rows[BITS[rows[title]["bits"]][0]]["rounds"]
        said |= {f"{name}_{peer}": speed_up(rows[title], ours[test], test) for name, test in QUOTED.items()}
    return said


TABLES = {"decode": table, "decode_without_avx512": table, "decode_with_amx": table, "decode_with_zen4": table}
IN_TEXT = {"decode": quoted, "decode_without_avx512": quoted, "decode_with_zen4": quoted}


def picture(figures: dict[str, Any], path: Path) -> None:
    """Draw bars of both tests, in groups of equal bits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in figures["rows"] if row["title"] != SKIPPING]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, test in zip(axes, (DECODE, PREFILL), strict=True):
        places, place = [], 0.0
        for index, row in enumerate(shown):
            place += 1.6 if index and row["bits"] != shown[index - 1]["bits"] else 1.0
            places.append(place)
        colours = ["#1f6f8b" if row["title"].startswith("ours") else "#b9c4c9" for row in shown]
        bars = axis.barh(places, [row[test] for row in shown], color=colours)
        axis.bar_label(bars, [f"{row[test]:.0f}" for row in shown], padding=3, fontsize=9)
        axis.set_title(f"{test}, tokens per second", loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[0].set_yticks(places, [row["title"] for row in shown])
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vllm-python", type=Path, help="of the environment of vLLM; without it vLLM is left out")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--hide", choices=HIDDEN, default="", help="instructions that nothing uses")
    kind.add_argument("--require", choices=REQUIRED, default="", help="kind of processor that the figures are of")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        given = json.loads(arguments.worker)
        answer = WORKERS[given["kind"]](given)
        for line in sys.stdin:
            print(json.dumps(answer(line.strip())), flush=True)
        return
    require("llama_cpp", "gguf", "matplotlib")
    require_built_without(arguments.hide, peers(arguments.vllm_python)["llama.cpp by llama-cpp-python"]["build"])
    if arguments.hide and arguments.vllm_python:
        parser.error("--hide has no effect on vLLM; leave out --vllm-python")
    if arguments.require and not REQUIRED[arguments.require]():
        print(f"this processor is not of the kind {arguments.require}", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    setting = Setting(arguments.threads, arguments.vllm_python, arguments.hide, arguments.require)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, arguments.layers)
        rates, said, streams = measure(directory, arguments.rounds, setting)
        store(directory, setting, rates, said, streams)
        if setting.vllm_python is not None:
            rates |= measure_vllm(directory, arguments.rounds, setting)
            store(directory, setting, rates, said, streams)


def store(
    directory: Path, setting: Setting, rates: Rates, said: dict[str, dict[str, Any]], streams: dict[str, list[float]]
) -> None:
    """Write the figures that are there, and the picture."""
    checkpoint = Checkpoint(directory / "bf16")
    config = checkpoint.raw_config
    figures = {"parameters": checkpoint.parameters, "experts": config["num_local_experts"]}
    figures |= {
        "top_k": config["num_experts_per_tok"],
        "threads": setting.threads,
        "stream_gb_per_second": [rate for each in streams.values() for rate in each],
    }
    figures["rows"] = rows(rates, said, streams, directory)
    save(setting.result, figures, peers(setting.vllm_python))
    if setting.result == "decode":
        picture(figures, RESULTS / "decode.png")


def peers(vllm_python: Path | None) -> dict[str, dict[str, str]]:
    """Return the versions of the peers, and the instruction sets that llama.cpp was built with."""
    import llama_cpp
    import transformers

    built = llama_cpp.llama_print_system_info().decode().strip()
    found = {
        "llama.cpp by llama-cpp-python": {"version": llama_cpp.__version__, "build": built},
        "transformers": {"version": transformers.__version__},
    }
    if vllm_python is not None:
        found["vLLM"] = {"version": str(vllm_version(str(vllm_python)))}
    return found


if __name__ == "__main__":
    main()
