"""A mixture of 1.5, 2 and 3.4 times the memory of its process: our expert cache, plain mapping, and llama.cpp's mapping.

python benchmarks/larger_than_memory.py [--directory DIR] [--times 1.5,2,3.4] [--tokens 48] [--rounds 2] [--layers 24]
    [--peer-python PYTHON]

Every contender reads a prompt of 512 tokens, which uses almost all experts, and decodes the same tokens. It runs in a
process of its own, in a control group without swap whose limit counts the page cache, and its files are not cached at the
start. All contenders take turns in each round, together with the same model in free memory. A contender that takes more than
two minutes is stopped and not tried again. Making a group takes root or a delegated group. Our logits must be equal to the
bit.

The weights are random, and random routers use all experts alike, which no trained model does. So the rows of each router
are multiplied by factors of a log-normal distribution (σ = 0.75): with a quarter of the experts in memory, LRU then finds
about 62 % of them. Embeddings are large beside what layers add, so that tokens differ in every layer, and neighboring
layers see similar states, as in trained models. llama.cpp's issue 27861 counted 81 % for a trained model of 512 experts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llama_cpp_peer import NAME
from memory_limit import NoControlGroupError, forget_files, memory_limit, peak_bytes, run_in
from random_model import random_tensor, shape, write_tensors, write_tokenizer
from results import NOT_POSSIBLE_HERE, markdown, save

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.checkpoint.checkpoint import EMBEDDINGS
from engine.expert_cache.file_memory import FileMemory
from engine.expert_cache.places import Part
from engine.expert_cache.policies import compared
from engine.expert_cache.readers import NOW, Loading, Readers
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors, names_on_disk
from engine.files.mapped_file import Extent
from engine.files.safetensors_file import SafetensorsFile
from engine.generation.generate import Engine

SIGMA = 0.75
MOST_SECONDS = 120
SHAPE: dict[str, Any] = {"hidden": 1024, "experts": 128, "top_k": 8, "width": 512}
OWN, MAPPED = "expert cache", "mapping"
BESIDE = 24 << 20
"""Bytes of the group beside the process's limit: its kernel structures, and files of the page cache in use."""
PROMPT, WARM_UP = 512, 32
"""Tokens of the prompt, which uses almost every expert, and of those that are decoded before the clock starts."""


def main() -> None:
    options = arguments()
    if options.worker:
        print(json.dumps(decode(*options.worker)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        model, gguf = directory / "model", directory / "gguf" / "model.gguf"
        if not model.is_dir():
            write_skewed_model(model, options.layers)
        if options.peer_python and not gguf.exists():
            gguf.parent.mkdir(exist_ok=True)
            export_gguf(GgufExportOptions(model=str(model), output=gguf, format="gguf"))
        try:
            figures = measured(model, gguf, options)
        except NoControlGroupError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_POSSIBLE_HERE)
    save("larger_than_memory", figures)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--times", type=lambda text: [float(each) for each in text.split(",")], default=[1.5, 2.0, 3.4])
    parser.add_argument("--tokens", type=int, default=48, help="tokens that are timed, after the warm-up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--peer-python", help="Python that has llama-cpp-python; without it, llama.cpp is left out")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_skewed_model(directory: Path, layers: int) -> None:
    """Write random weights, with routers that prefer some experts."""
    config = shape(layers=layers, **SHAPE)
    generator = torch.Generator().manual_seed(0)
    own = decoder_config(config)
    on_disk = names_on_disk(own)
    shapes = {on_disk.get(name, name): size for name, size in expected_tensors(own).items()}
    alike = {size: random_tensor(size, generator) for size in set(shapes.values())}

    def tensor(name: str) -> torch.Tensor:
        if name == EMBEDDINGS:
            return alike[shapes[name]] * config["hidden_size"]
        if not name.endswith("gate.weight"):
            return alike[shapes[name]]
        factors_N1 = torch.exp(SIGMA * torch.randn(shapes[name][0], 1, generator=generator))
        return (random_tensor(shapes[name], generator).float() * factors_N1).bfloat16()

    directory.mkdir(parents=True)
    write_tensors(directory, config, shapes, tensor)
    write_tokenizer(directory, config["vocab_size"])


def decode(model: str, limit: str, tokens: str) -> dict[str, Any]:
    """Decode tokens one by one in this process. limit: bytes for the expert cache; 0 for plain mapping."""
    engine = Engine.open(model, memory_limit=int(limit) or None)
    generator = torch.Generator().manual_seed(1)
    count, vocabulary = PROMPT + WARM_UP + int(tokens), engine.checkpoint.config.vocabulary_size
    given = torch.randint(0, vocabulary, (count,), generator=generator)
    engine.prepare()
    cache = engine.new_cache(1, len(given))
    engine.prefill(given[None, :PROMPT], None, cache)
    trace: list[tuple[int, list[int]]] = []
    digest = hashlib.sha256()
    for layer, block in zip(engine.checkpoint.config.moe_layers, engine.decoder.moe_blocks, strict=True):
        block.observer = lambda x, logits, selection, layer=layer: trace.append((layer, selection.experts[0].tolist()))
    for token in given[PROMPT : PROMPT + WARM_UP]:
        engine.step(token[None], None, cache)
    before = totals(engine)
    started = time.perf_counter()
    for token in given[PROMPT + WARM_UP :]:
        digest.update(engine.step(token[None], None, cache).view(torch.int16).numpy().tobytes())
    seconds = time.perf_counter() - started
    after = totals(engine)
    found: dict[str, Any] = {"tokens_per_second": int(tokens) / seconds, "logits": digest.hexdigest()}
    if engine.expert_cache is not None:
        found |= {name: after[name] - before[name] for name in after}
        slots = engine.expert_cache.held_bytes * len(engine.expert_cache.expert_sizes) // engine.expert_cache.expert_bytes
        found |= {"slots": slots, "experts": len(engine.expert_cache.expert_sizes)}
        policies = compared(trace, slots, uncounted=WARM_UP * len(engine.checkpoint.config.moe_layers))
        found["misses_by_policy"] = {name: each.misses for name, each in policies.items()}
        found["hit_rates"] = {name: each.hit_rate for name, each in policies.items()}
        found["expert_bytes"] = engine.expert_cache.expert_bytes // len(engine.expert_cache.expert_sizes)
        found["tokens"] = int(tokens)
    return found


def totals(engine: Engine) -> dict[str, float]:
    """Return what the cache counted so far."""
    if engine.expert_cache is None:
        return {}
    names = ("uses", "hits", "late", "read", "read_ahead", "wasted", "read_bytes", "waited_seconds")
    return {name: sum(getattr(own, name) for own in engine.expert_cache.figures.values()) for name in names}


def measured(model: Path, gguf: Path, options: argparse.Namespace) -> dict[str, Any]:
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    free: list[dict[str, Any]] = []
    disk: list[float] = []
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _ in range(options.rounds):
        disk.append(disk_speed(model))
        free.append(own_run(model, 4 * stored, 0, options.tokens))
        for times in options.times:
            limit = int(stored / times)
            row = rows.setdefault(f"{times:g}", {})
            row.setdefault(OWN, []).append(own_run(model, limit, limit - BESIDE, options.tokens))
            others = {MAPPED: partial(own_run, model, limit, 0, options.tokens)}
            if options.peer_python:
                others[NAME] = partial(peer_run, options.peer_python, gguf, limit, options.tokens)
            for name, run in others.items():
                own = row.setdefault(name, [])
                if not any(each["tokens_per_second"] is None for each in own):
                    own.append(run())
            print(times, {name: each[-1]["tokens_per_second"] for name, each in row.items()}, file=sys.stderr, flush=True)
    own = [*free, *(one for row in rows.values() for name in (OWN, MAPPED) for one in row[name])]
    same = {each["logits"] for each in own if "logits" in each}
    return {"checkpoint_bytes": stored, "free": free, "disk_bytes_per_second": disk, "rows": rows, "same": len(same) == 1}


def own_run(model: Path, group_limit: int, limit: int, tokens: int) -> dict[str, Any]:
    """Return the figures of a process of ours in a group. limit: of its expert cache; 0 for plain mapping."""
    forget_files(model)
    return in_group(group_limit, [sys.executable, __file__, "--worker", str(model), str(limit), str(tokens)])


def peer_run(python: str, gguf: Path, limit: int, tokens: int) -> dict[str, Any]:
    forget_files(gguf.parent)
    given = {"model_path": str(gguf), "n_ctx": 1024, "n_batch": PROMPT, "n_threads": torch.get_num_threads()}
    script = (
        "import json, sys, time, numpy, llama_cpp\n"
        "given = json.loads(sys.argv[1])\n"
        "model = llama_cpp.Llama(verbose=False, **given)\n"
        "prompt, warm, count = map(int, sys.argv[2:])\n"
        "tokens = numpy.random.default_rng(1).integers(0, model.n_vocab(), prompt + warm + count).tolist()\n"
        "model.eval(tokens[:prompt])\n"
        "[model.eval([token]) for token in tokens[prompt:prompt + warm]]\n"
        "started = time.perf_counter()\n"
        "[model.eval([token]) for token in tokens[prompt + warm:]]\n"
        "print(json.dumps({'tokens_per_second': count / (time.perf_counter() - started)}))\n"
    )
    return in_group(limit, [python, "-c", script, json.dumps(given), str(PROMPT), str(WARM_UP), str(tokens)])


def in_group(limit: int, command: list[str]) -> dict[str, Any]:
    with memory_limit(limit) as group:
        try:
            done = run_in(group, command, MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return {"tokens_per_second": None}
        if done.returncode:
            raise SystemExit(f"ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]) | {"group_peak_bytes": peak_bytes(group)}


def disk_speed(model: Path) -> float:
    """Return bytes per second of reading pieces in random order as the cache does, past the page cache."""
    forget_files(model)
    path = max(model.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    memory, readers = FileMemory(SafetensorsFile(path)), Readers()
    size, piece = path.stat().st_size, 3 << 20
    starts = torch.randperm(size // piece - 1, generator=torch.Generator().manual_seed(2))[:400].tolist()
    loadings = [Loading([Part(memory, Extent(start * piece, (start + 1) * piece))]) for start in starts]
    started = time.perf_counter()
    for loading in loadings:
        readers.start(loading, NOW)
    readers.wait(loadings)
    seconds = time.perf_counter() - started
    readers.close()
    memory.close()
    return len(starts) * piece / seconds


def table(figures: dict[str, Any]) -> str:
    """Return each overcommitment's speeds beside free memory, and the misses beside those of the best policy."""
    free = statistics.median(each["tokens_per_second"] for each in figures["free"])
    disk = statistics.median(figures["disk_bytes_per_second"])
    rows = [["no limit", f"{free:.1f}", "", "", "", "", ""]]
    for times, row in figures["rows"].items():
        speeds = {name: [each["tokens_per_second"] for each in own] for name, own in row.items()}
        peers = [_median(speeds.get(name, [])) for name in (MAPPED, NAME)]
        own = row[OWN][-1]
        uses, late = own["uses"], own["late"] + own["read"]
        best = own["misses_by_policy"]["best"] / own["tokens"] * own["expert_bytes"] / disk
        shares = [one / each["tokens_per_second"] for one, each in zip(speeds[OWN], figures["free"], strict=True)]
        rows.append(
            [
                f"{times}x",
                f"{statistics.median(speeds[OWN]):.1f}",
                f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
                *peers,
                f"{1 - late / uses:.0%}",
                f"{own['hit_rates']['lru']:.0%}, {own['hit_rates']['worth']:.0%}, {own['hit_rates']['best']:.0%}",
                f"{1 / (1 / free + best):.1f} to {1 / max(1 / free, best):.1f}",
            ]
        )
    rows[0].append("")
    header = [
        "model / memory",
        "expert cache, tokens/s",
        "its share of the speed without a limit",
        "plain mapping",
        NAME,
        "experts found",
    ]
    header += [
        "simulated without reading ahead: LRU, ours, best in hindsight",
        "what the disk allows the best policy, tokens/s",
    ]
    return markdown(header, rows)


def _median(speeds: list[float | None]) -> str:
    """Return a speed as text; nothing for a contender that did not run, and a dash for one that was stopped."""
    ended = [speed for speed in speeds if speed is not None]
    return f"{statistics.median(ended):.1f}" if ended else "—" if speeds else ""


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return, for the least memory, the share of the experts that it has room for, and what LRU finds there."""
    own = list(figures["rows"].values())[-1][OWN][-1]
    return {"least_slots": f"{own['slots'] / own['experts']:.0%}", "least_lru": f"{own['hit_rates']['lru']:.0%}"}


TABLES = {"larger_than_memory": table}
IN_TEXT = {"larger_than_memory": in_text}

if __name__ == "__main__":
    main()
