"""Mutates model directories and the files beside them, and checks the outcome of every door.

    python benchmarks/fuzz_model_directory.py [--mutations 10000] [--seed 0] [--jobs 2]
        python benchmarks/fuzz_model_directory.py --only 1234        # repeats one mutation, with all output

Each mutation changes one file of a tiny artifact, of an exported one, or of a run's other inputs: bytes (flip, cut, insert,
splice, repeat) or structure (an absurd value, a key removed, renamed or given twice, two values swapped, steps of a
tokenizer or pieces of a template inserted). Half of the changed artifacts are signed again: their compression.json lists the
present files, as an attacker can write it. Then one or two doors (tests/support/doors_for_tests.py) are opened, each in a
forked process with limits on memory and time. There must be no traceback, no signal, no hang, no file written outside the
output, and under --checksums, unless the artifact was signed again, no text but the original's.

Kinds take turns. An interrupted run resumes: benchmarks/results/fuzz_model_directory.jsonl has a line for each mutation. The
script prints a table, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine" / "server"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from doors_for_tests import DOORS, Outcome, make_place, run_door
from results import RESULTS, markdown, remember, remembered, save
from test_attacks import sign

NAME = "fuzz_model_directory"
STATE = RESULTS / f"{NAME}.jsonl"
CPU_SECONDS, SECONDS = 20, 90
OUTCOMES = ("refused", "loaded", "loaded differently", "traceback", "signal", "hang", "written outside", "mixed up")
FAILURES = OUTCOMES[3:]
"""Outcomes that must not occur. The last one is another text under --checksums without a new signature."""

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """One kind of mutation: the files of a place that it changes, how, and the doors that read them."""

    files: tuple[str, ...]
    doors: tuple[str, ...]
    """Doors of which one is opened for each mutation."""
    structure: Change | None = None
    always: tuple[str, ...] = ("generate --checksums",)
    """Doors that are opened for every mutation."""
    of: str = "artifact"


# Bytes


def change_bytes(data: bytes, chosen: random.Random) -> bytes:
    """Change the bytes in one place. Half of the places are near the beginning, where headers are."""
    place = chosen.randrange(max(1, len(data) if chosen.random() < 0.5 else min(len(data), 2_000)))
    size = chosen.choice((1, 1, 2, 8, 100))
    match chosen.choice(("flip", "cut", "insert", "splice", "repeat", "empty" if chosen.random() < 0.1 else "flip")):
        case "flip":
            piece = bytes(byte ^ chosen.randrange(1, 256) for byte in data[place : place + min(size, 8)])
            return data[:place] + piece + data[place + len(piece) :]
        case "cut":
            return data[:place] + (data[place + size :] if chosen.random() < 0.5 else b"")
        case "insert":
            return data[:place] + chosen.randbytes(size) + data[place:]
        case "splice":
            other = chosen.randrange(max(1, len(data)))
            return data[:place] + data[other : other + size] + data[place + size :]
        case "repeat":
            return data[:place] + data[place : place + size] * chosen.choice((2, 50, 5_000)) + data[place + size :]
        case _:
            return b""


# JSON

ABSURD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -(2**63), 10**12, 10**30, 10**400, -(10**9)),
    *(0.0, -0.5, 1e-38, 1e38, 1e308, float("nan"), float("inf"), True, False, None),
    *(
        "",
        "x",
        "NaN",
        "1e999",
        "../x",
        "/etc/passwd",
        "..",
        "a\nb",
        "\x00",
        "\ud800",
        "\u202e",
        "{{ 1 / 0 }}",
        "a" * 100_000,
    ),
    *([], {}, [None], [[]], {"": {}}, [0] * 10_000, ["x", 1, None], {"type": "Sequence"}),
)


VERY_DEEP = "lists, deeper than Python writes them"


def deep(levels: int) -> Any:
    """Return lists in lists."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def change_json(data: bytes, chosen: random.Random) -> bytes:
    """Make one to three changes of structure, or change bytes if the data is not JSON."""
    try:
        values = json.loads(data)
    except ValueError:
        return change_bytes(data, chosen)
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        change_values(values, chosen)
    text = json.dumps(values).replace(json.dumps(VERY_DEEP), "[" * 5_000 + "]" * 5_000)
    if chosen.random() < 0.05 and isinstance(values, dict) and values:  # a duplicate key
        key = chosen.choice(list(values))
        text = f"{{{json.dumps(key)}: {json.dumps(chosen.choice(ABSURD))}, {text[1:]}"
    return text.encode()


def change_values(values: Any, chosen: random.Random) -> None:
    """Make one change in place, somewhere in a tree."""
    place, key = values, None
    while isinstance(place, dict | list) and place:
        key = chosen.choice(list(place)) if isinstance(place, dict) else chosen.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.3:
            break
        place = inner
    if key is None:
        return
    match chosen.choice(("replace", "replace", "replace", "near", "remove", "rename", "swap", "copy", "deep")):
        case "replace":
            place[key] = chosen.choice(ABSURD)
        case "near":
            near = place[key]
            number = isinstance(near, int | float) and not isinstance(near, bool)
            place[key] = chosen.choice((near + 1, near - 1, near * 2, -near, str(near))) if number else [near]
        case "remove":
            del place[key]
        case "rename" if isinstance(place, dict):
            place[chosen.choice(("", "type", "x" * 300, key.upper(), f"{key} "))] = place.pop(key)
        case "swap":
            other = chosen.choice(list(place)) if isinstance(place, dict) else chosen.randrange(len(place))
            place[key], place[other] = place[other], place[key]
        case "copy" if isinstance(place, list):
            place.extend(place[:1_000] * chosen.choice((1, 3)))
        case "deep":
            place[key] = (
                chosen.choice((deep(3), deep(400), VERY_DEEP)) if chosen.random() < 0.5 else {"a": {"a": place[key]}}
            )


# Formats


def change_header(data: bytes, chosen: random.Random) -> bytes:
    """Change the header of a safetensors file, and its length with it."""
    length = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + length], chosen)
    length = len(header) if chosen.random() < 0.9 else chosen.choice((0, 2**63, len(data), len(header) + 1))
    return length.to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]


def change_digested(data: bytes, chosen: random.Random) -> bytes:
    """Change the header of a state file, and remove the digest that would reveal the change."""
    changed = change_header(data, chosen)
    length = int.from_bytes(changed[:8], "little")
    try:
        header = json.loads(changed[8 : 8 + length])
        header["__metadata__"].pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return changed
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + changed[8 + length :]


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
STEPS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a"}, _replace({"String": " "}, "b")]},
        {"type": "Sequence", "normalizers": [_replace({"String": "e"}, "ee")] * 5},
        _replace({"Regex": r"\s+"}, " "),
        {"type": "Precompiled", "precompiled_charsmap": "AAgAAAAABAAAAAAAAAAAAA=="},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "NFKC"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ),
    "pre_tokenizer": (
        _SPLIT | {"pattern": {"Regex": r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"}},
        _SPLIT | {"pattern": {"String": " "}},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "Whitespace"}]},
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "CharDelimiterSplit", "delimiter": " "},
        {"type": "FixedLength", "length": 3},
    ),
    "decoder": (
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "ByteLevel"}]},
        {"type": "Strip", "content": "a", "start": 1, "stop": 0},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "a"},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    ),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [_TEXT], "pair": [_TEXT], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["<s>", 1], "cls": ["</s>", 2]},
        {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["a", 2], "trim_offsets": True, "add_prefix_space": True},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}]},
    ),
    "truncation": ({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},),
    "padding": (
        {
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": 8,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    ),
    "model": (
        {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[chr(97 + number), -1.0] for number in range(26)],
            "byte_fallback": False,
        },
        {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "the": 1}},
        {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0, "##b": 1}, "max_input_chars_per_word": 100},
    ),
}


def change_tokenizer(data: bytes, chosen: random.Random) -> bytes:
    """Insert steps of other tokenizers, and then change the steps or any other part."""
    if chosen.random() < 0.3:
        return change_json(data, chosen)
    try:
        values = json.loads(data)
        part = chosen.choice(list(STEPS))
        values[part] = json.loads(json.dumps(chosen.choice(STEPS[part])))
        if part == "model" and chosen.random() < 0.7:
            tokens = values["model"]["vocab"]
            for number in range(len(tokens), 250):
                tokens.append([f"w{number}", -2.0]) if isinstance(tokens, list) else tokens.update({f"w{number}": number})
    except (ValueError, KeyError, TypeError):
        return change_json(data, chosen)
    for _ in range(chosen.choice((0, 1, 1, 2, 3))):
        change_values(values[part], chosen)
    return json.dumps(values).encode()


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIECES = (
    *r"""
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 'a' * 10**9 }}
{{ 10 ** 10 ** 9 }}
{{ 10 ** 5000 }}
{{ '%c' % -1 }}
{% for a in range(10**9) %}{% endfor %}
{% for a in range(10**9) %}x{% endfor %}
{{ range(10**12) | list | length }}
{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{{ ''.__class__.__mro__ }}
{{ cycler.__init__.__globals__.os }}
{{ raise_exception('no') }}
{{ messages[9].content }}
{{ messages.append(1) }}
{% include '/etc/passwd' %}
{% extends 'x' %}
{{ undefined.x.y }}
{{ none + 1 }}
{% endfor %}
{{
{% set x =
{#
{{ 1e999 }}
{{ strftime_now('%' * 1000) }}
{{ 'x' | center(10**9) }}
{{ '{0:>1000000000}'.format(1) }}
{{ messages | tojson }}
{{ ('a' * 1000).replace('a', 'a' * 100000) }}
{{ lipsum(10**6) }}
{{ dict(a=1).b.c }}
{{ -1 | float | int * 'x' }}
{% generation %}a{% endgeneration %}
{% break %}
{{ loop }}
{{ self }}
{{ 2 ** 100000 }}
""".strip().splitlines(),
    *("(" * 500, "{{ " + "(" * 500, "\ufffe", "{{ [" * 300),
)


def change_template(data: bytes, chosen: random.Random) -> bytes:
    """Insert pieces into a template, or change its words."""
    text = data.decode(errors="replace") if chosen.random() < 0.3 else TEMPLATE
    for _ in range(chosen.choice((0, 1, 1, 2))):
        place = chosen.choice((0, len(text), text.find("{{"), chosen.randrange(len(text) + 1)))
        text = text[:place] + chosen.choice(PIECES) + text[place:]
    return change_bytes(text.encode(), chosen) if chosen.random() < 0.2 else text.encode()


def change_tokenizer_config(data: bytes, chosen: random.Random) -> bytes:
    """Change a template in tokenizer_config.json, or any other part of that file."""
    if chosen.random() < 0.5:
        return change_json(data, chosen)
    values = json.loads(data)
    values["chat_template"] = change_template(TEMPLATE.encode(), chosen).decode(errors="replace")
    return json.dumps(values).encode()


def change_graph(data: bytes, chosen: random.Random) -> bytes:
    """Change nodes, attributes, weights and metadata of an ONNX graph."""
    import onnx

    model = onnx.load_from_string(data)
    graph = model.graph
    for _ in range(chosen.choice((1, 1, 2, 4))):
        node, tensor = chosen.choice(graph.node), chosen.choice(graph.initializer)
        match chosen.randrange(10):
            case 0:
                node.op_type = chosen.choice(
                    ("Loop", "If", "Scan", "Identity", "Tile", "Expand", "Exp", "Nope", node.op_type)
                )
            case 1:
                graph.node.remove(node)
            case 2:
                other = chosen.choice(graph.node)
                if node.input and other.output:
                    node.input[chosen.randrange(len(node.input))] = chosen.choice(other.output)
            case 3 if node.attribute:
                attribute = chosen.choice(node.attribute)
                attribute.i = chosen.choice((0, -1, 2**31, 2**62, attribute.i + 1))
                attribute.f = chosen.choice((0.0, float("nan"), 1e38))
            case 4 if tensor.dims:
                tensor.dims[chosen.randrange(len(tensor.dims))] = chosen.choice((0, -1, 1, 2**31, 2**62))
            case 5 if tensor.external_data:
                entry = chosen.choice(tensor.external_data)
                entry.value = chosen.choice(("-1", "0", str(2**62), "../text.txt", "/etc/passwd", "model.onnx", "", "x"))
            case 6:
                tensor.data_type = chosen.randrange(25)
            case 7:
                tensor.raw_data = chosen.randbytes(chosen.choice((0, 1, 8, 100)))
            case 8:
                value = chosen.choice((*graph.input, *graph.output))
                value.name = chosen.choice(("input_ids", "logits", "", "x"))
            case _:
                double = onnx.helper.make_node("Concat", [node.output[0]] * 100, [f"{node.output[0]}_long"], axis=0)
                graph.node.insert(list(graph.node).index(node) + 1, double)
                for later in graph.node:
                    for place, name in enumerate(later.input):
                        if later is not double and name == node.output[0] and later.output[0] != double.output[0]:
                            later.input[place] = double.output[0]
    return model.SerializeToString()


READERS = ("generate", "inspect", "evaluate", "prune", "calibrate")
KINDS: dict[str, Kind] = {
    "safetensors": Kind(
        ("model.safetensors",), (*READERS, "bench --backend transformers", "export", "quantize"), change_header
    ),
    "ONNX export": Kind(
        ("model.onnx", "model.onnx.data", "config.json"), ("generate", "inspect", "serve"), change_graph, of="export"
    ),
    "tokenizer": Kind(("tokenizer.json",), ("generate", "serve", "evaluate", "prune"), change_tokenizer),
    "template": Kind(("chat_template.jinja", "tokenizer_config.json"), ("chat",), change_template, always=()),
    "config": Kind(("config.json",), (*READERS, "serve", "densify", "merge", "quantize", "export"), change_json),
    "transformers": Kind(("config.json", "generation_config.json"), ("bench --backend transformers",), change_json),
    "generation config": Kind(("generation_config.json",), ("generate", "serve", "prune"), change_json),
    "index": Kind(("model.safetensors.index.json",), READERS, change_json),
    "compression.json": Kind(("compression.json",), (*READERS, "inspect --checksums", "merge"), change_json),
    "skip tables": Kind(("skip_tables.safetensors",), ("generate --skip-threshold", "inspect"), change_header),
    "statistics": Kind(("../statistics",), ("prune --statistics",), change_digested, always=()),
    "plan": Kind(("../plan.json",), ("prune --plan",), change_json, always=()),
    "work directory": Kind(("../work/*",), ("prune --resume",), None, always=()),
}
BY_FORMAT: dict[str, Change] = {
    ".json": change_json,
    ".safetensors": change_digested,
    ".onnx": change_graph,
    ".data": change_bytes,
}
"""Changes for files whose kind's own change is for another format."""


@dataclass
class Fuzz:
    """A place that is mutated, and the results of its doors without a mutation."""

    good: Path
    place: Path
    seed: int

    def try_one(self, number: int, show: bool = False) -> dict[str, Any]:
        """Try one mutation, and return its description and its outcome at each door."""
        kind_name = list(KINDS)[number % len(KINDS)]
        kind, chosen = KINDS[kind_name], random.Random(self.seed * 10**9 + number)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.good, self.place)
        directory = self.place / kind.of
        how = self._mutate(directory, kind, chosen)
        signed = how["file"] != "compression.json" and not kind.files[0].startswith("../") and chosen.random() < 0.5
        if signed:
            sign(directory)
        found: dict[str, str] = {}
        seconds = 0.0
        for door in (*kind.always, chosen.choice(kind.doors)):
            outcome = run_door(door, DOORS[door], self.place, directory, cpu_seconds=CPU_SECONDS, seconds=SECONDS)
            seconds += outcome.seconds
            found[door] = self._verdict(outcome, kind, signed)
            if show or found[door] in FAILURES:
                print(
                    f"{number}: {kind_name}, {how}, {'signed' if signed else 'as it is'}: {found[door]}: {outcome}",
                    flush=True,
                )
        return {"number": number, "kind": kind_name, **how, "signed": signed, "doors": found, "seconds": round(seconds, 3)}

    def _mutate(self, directory: Path, kind: Kind, chosen: random.Random) -> dict[str, str]:
        pattern = chosen.choice(kind.files)
        path = chosen.choice(sorted(directory.glob(pattern))) if "*" in pattern else directory / pattern
        if path.name == "chat_template.jinja":
            path.write_text(TEMPLATE)
        if path.name == "tokenizer_config.json":
            change: Change | None = change_tokenizer_config
        else:
            change = BY_FORMAT.get(path.suffix, kind.structure) if kind.structure in (None, change_graph) else kind.structure
        structural = change is not None and chosen.random() < 0.6
        data = path.read_bytes()
        changed = change(data, chosen) if change is not None and structural else change_bytes(data, chosen)
        path.write_bytes(changed)
        return {"file": pattern if "*" not in pattern else path.name, "how": "structure" if structural else "bytes"}

    def _verdict(self, outcome: Outcome, kind: Kind, signed: bool) -> str:
        if outcome.kind not in ("refused", "done"):
            named = {"outside": "written outside", "traceback": "traceback", "hang": "hang"}
            return named.get(outcome.kind, "signal")
        if outcome.kind == "refused":
            return "refused"
        if outcome.result == self.result(outcome.door, kind.of):
            return "loaded"
        return "mixed up" if outcome.door.endswith("--checksums") and not signed else "loaded differently"

    def result(self, door: str, of: str) -> Any:
        """Return the result of a door without a mutation."""
        if (door, of) not in _RESULTS:
            outcome = run_door(door, DOORS[door], self.good, self.good / of)
            assert outcome.kind == "done", outcome
            _RESULTS[door, of] = outcome.result
        return _RESULTS[door, of]


_RESULTS: dict[tuple[str, str], Any] = {}


def run_many(good: Path, folder: Path, seed: int, numbers: list[int], jobs: int) -> None:
    """Try all numbers in so many processes, each with a place of its own."""
    workers = []
    for worker in range(jobs):
        process = os.fork()
        if process:
            workers.append(process)
            continue
        code = 1
        try:
            fuzz = Fuzz(good, folder / f"place-{worker}", seed)
            for number in numbers[worker::jobs]:
                remember(STATE, {"seed": seed} | fuzz.try_one(number))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    for process in workers:
        _, status = os.waitpid(process, 0)
        assert status == 0, "a worker failed"


def table(lines: list[dict[str, Any]]) -> tuple[str, dict[str, dict[str, int]]]:
    """Return counts of the doors' outcomes by kind."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for line in lines:
        counts[line["kind"]].update(line["doors"].values())
        counts[line["kind"]]["mutations"] += 1
    rows = [[kind, *(f"{counted[name]:,}" for name in ("mutations", *OUTCOMES))] for kind, counted in counts.items()]
    whole = sum(counts.values(), Counter())
    rows.append(["all", *(f"{whole[name]:,}" for name in ("mutations", *OUTCOMES))])
    return markdown(("kind", "mutations", *OUTCOMES), rows), {kind: dict(counted) for kind, counted in counts.items()}


def main() -> int:
    """Parse the arguments, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="Of the mutations only those of these kinds.")
    parser.add_argument("--only", type=int, metavar="NUMBER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = folder / "good"
        make_place(good)
        fuzz = Fuzz(good, folder / "place", options.seed)
        if options.only is not None:
            return int(bool(set(fuzz.try_one(options.only, show=True)["doors"].values()) & set(FAILURES)))
        for kind in KINDS.values():
            for door in (*kind.always, *kind.doors):
                fuzz.result(door, kind.of)  # computed before the fork, so that all processes share it
        done = {line["number"] for line in remembered(STATE) if line["seed"] == options.seed}
        wanted = [list(KINDS).index(kind) for kind in options.kinds.split(",")]
        numbers = [n for n in range(options.mutations) if n not in done and n % len(KINDS) in wanted]
        started, before = time.monotonic(), os.times()
        run_many(good, folder, options.seed, numbers, options.jobs)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{len(numbers)} mutations in {time.monotonic() - started:.0f} s, {spent:.0f} s of CPU", flush=True)
    lines = [line for line in remembered(STATE) if line["seed"] == options.seed and line["number"] < options.mutations]
    text, counts = table(lines)
    save(NAME, {"mutations": len(lines), "seed": options.seed, "outcomes": counts}, text)
    return int(any(counted.get(name) for counted in counts.values() for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
