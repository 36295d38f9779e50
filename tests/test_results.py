"""The pages show what the stored results say, and the results come from the scripts of benchmarks/registry.py."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import registry
import results

STORED = results.results()
PAGES = {path.relative_to(results.ROOT).as_posix(): path.read_text() for path in results.PAGES}
FRACTION = re.compile(r"\d+\.\d+")
SEEDS = range(3)
OPTIONS = {"probability", "router"}
"""Keys of fractions that were given and not measured; they are in the titles of rows."""


@cache
def quotable(name: str) -> Mapping[str, str]:
    """Return the numbers that sentences may quote from a stored result."""
    return results.numbers_of(name, STORED[name]["figures"])


def script_of(name: str) -> Any:
    """Return the module that writes a result."""
    return results._script(name)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_is_stored(page: str) -> None:
    """Whether a result is marked as older than its code depends on the commits since, so that mark is not compared."""
    shown, stored = results.without_age(PAGES[page]), results.without_age(results.with_results(PAGES[page]))
    assert shown == stored, "run: python benchmarks/results.py"


@pytest.mark.parametrize("name", STORED)
def test_every_result_is_on_a_page(name: str) -> None:
    assert any(f"<!-- {name} -->" in text and f"<!-- /{name} -->" in text for text in PAGES.values())


@pytest.mark.parametrize("page", PAGES)
def test_markers_name_results_and_numbers_that_exist(page: str) -> None:
    text = PAGES[page]
    for name in re.findall(r"<!-- /?([\w-]+) -->", text):
        assert registry.benchmark_of(name), f"no benchmark writes {name}"
    quoted = re.findall(r"<!--([\w-]+)\.(\w+)-->", text)
    assert len(quoted) == text.count("<!--/-->"), "a number's mark is not closed"
    for name, key in quoted:
        assert key in quotable(name), f"{name} has no number {key}"


@pytest.mark.parametrize("benchmark", registry.BENCHMARKS, ids=lambda benchmark: benchmark.results[0])
def test_every_benchmark_can_make_its_tables(benchmark: registry.Benchmark) -> None:
    assert (registry.HERE / f"{benchmark.script}.py").is_file()
    assert set(benchmark.results) <= set(script_of(benchmark.results[0]).TABLES)
    assert benchmark.code and all((results.ROOT / path).exists() for path in benchmark.code)


def test_every_result_is_written_by_one_benchmark() -> None:
    written = [name for benchmark in registry.BENCHMARKS for name in benchmark.results]
    assert len(written) == len(set(written)) and set(STORED) <= set(written)
    for path in Path(registry.HERE).glob("*.py"):
        if re.search(r"^    +save\(", path.read_text(), re.MULTILINE) and path.stem != "results":
            assert any(path.stem == benchmark.script for benchmark in registry.BENCHMARKS), f"{path.name} has no row"


@pytest.mark.parametrize("name", STORED)
def test_every_result_says_when_and_where_it_was_measured(name: str) -> None:
    stored = STORED[name]
    assert re.fullmatch(r"[0-9a-f]{10}", stored["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", stored["date"])
    assert ("changes that no commit has" in results.measured(stored, name)) == stored["uncommitted_changes"]
    assert stored["machine"]["processor"] and stored["machine"]["threads"] >= 1 and stored["packages"]["torch"]
    assert all(about["version"] for about in stored["peers"].values())
    assert str(Path("/tmp")) + "/" not in str(stored), "a place on the machine is no figure"


def changed(value: Any, draw: random.Random) -> Any:
    """Return figures with every measured number, fractions and counts of bytes alike, multiplied by its own factor."""
    if isinstance(value, dict):
        return {key: own if isinstance(own, float) and key in OPTIONS else changed(own, draw) for key, own in value.items()}
    if isinstance(value, list):
        return [changed(own, draw) for own in value]
    if isinstance(value, float):
        return value * draw.uniform(1.1, 1.9)
    if isinstance(value, int) and value >= 100_000:
        return round(value * draw.uniform(1.1, 1.9))
    return value


def numbers(name: str, figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (where, number) of each fraction, but those of headers, row titles, commands' output and stored sentences."""
    table = results.table_of(name, figures)
    lines = re.sub(r"```.*?```", "", table, flags=re.DOTALL).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line in figures.get("notes", ()):
            continue
        if not line.startswith("|"):
            yield from ((line, number) for number in FRACTION.findall(line))
        elif not after.startswith("| ---") and not line.startswith("| ---"):
            title, *cells = line.strip("|").split("|")
            yield from ((title.strip(), number) for cell in cells for number in FRACTION.findall(cell))


@pytest.mark.parametrize("name", STORED)
def test_no_number_of_a_table_is_fixed(name: str) -> None:
    """With other figures every number is another one, in at least one of three draws."""
    figures = STORED[name]["figures"]
    shown = list(numbers(name, figures))
    others = [[number for _, number in numbers(name, changed(figures, random.Random(seed)))] for seed in SEEDS]
    assert all(len(other) == len(shown) for other in others)
    fixed = [at for place, at in enumerate(shown) if all(other[place] == at[1] for other in others)]
    assert not fixed


@pytest.mark.parametrize("name", STORED)
def test_no_number_of_a_sentence_is_fixed(name: str) -> None:
    figures = STORED[name]["figures"]
    shown = results.numbers_of(name, figures)
    others = [results.numbers_of(name, changed(figures, random.Random(seed))) for seed in SEEDS]
    measured = {key: text for key, text in shown.items() if FRACTION.search(text) and key != "names"}  # versions in names
    assert not [key for key, text in measured.items() if all(other[key] == text for other in others)]


PART = r"(half|an? (third|quarter|fifth|sixth|eighth|tenth)|(two|three|four) (thirds|quarters|fifths|tenths))"
COUNT = r"(two|three|four|five|six|seven|eight|nine|ten|twenty|fifty|hundred|thousand|several|\d+)"
MEASURED = re.compile(
    r"\d+\.\d+ times|\d[\d,.]* ?(tokens/s|t/s|GB/s|tokens per second)|perplexity (is |of )?\d+\.\d|\d+\.\d+×|\d+\.\d+ ± "
    r"|\d+ of \d{2,} (tokens|equal)|\d+\.\d+ (ms|s|seconds|points|MB/s)\b"
    # Shares of 25, 50 and 75 % are removed, and intervals have 95 %; other percentages were measured.
    r"|\bby \d[\d.]* ?%|(?<![\d.,])(?!(25|50|75|95) ?%)\d[\d.,]* ?%"
    rf"|\b(?i:about|nearly|almost|more than|less than) (twice|{PART})\b"
    rf"|\b(?i:{PART}) of the (divergence|loss|time|reads|bytes|memory|perplexity|speed)\b"
    r"|\b(?i:twice) as (long|fast|far|slow|large)\b"
    rf"|\b(?i:{COUNT}) times (as (long|fast|far|much|many|high|large|slow)|smaller|larger|slower|faster|th(at|ose) of)\b"
)
ALLOWED = {
    "In the paper MoE-KD leads KD by 1.5 to 4.2 points": "figures of the paper",
    "they read 3.1 times as many bytes as one": "computed from the number of experts, for a choice at random",
    "at most 2.5 times its tokens": "the same computation",
    "The estimate is 0.7 times the": "a constant of the code",
    "it is twice as fast. `COMPRESS_KERNELS": "a limit of the code",
    "at 73 % of the speed at which": "a constant of the code",
    "if drafts gain at least 3 %": "a limit of the code",
    "where more than a quarter are others, the graphs are refused": "a limit of the code",
    "gives about a tenth to each of the two": "a constant of the code",
    "differ by less than 1 % of their norm": "a limit that tests hold",
    "the 2 % most important tokens": "a setting of the paper",
    "98 % quantile": "the same setting",
    "of 8 to 100 % of its area": "the usual augmentation",
    "a mirror image half of the time": "the same augmentation",
    "a half to an eighth of the bytes": "computed from the bits",
    "it is a fifth of the bytes that a token reads": "computed from the sizes of a shape",
    "in the dtype of the embeddings, about twice as large": "computed from the bytes of the dtypes",
    "about half of the second experts are below the median, so about a quarter": "what a median is",
}


def prose(text: str) -> Iterator[str]:
    """Yield each paragraph and item of a page as one line, without code, tables, what results wrote, and marked numbers."""
    text = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--[\w-]+\.\w+-->[^<]*<!--/-->", "…", text)
    lines = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ")))
    yield from (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*[-*>] )", lines))


def typed(text: str) -> list[str]:
    """Return the measured numbers that a page has in prose, with the words before them, but for those that are allowed."""
    found = []
    for part in prose(text):
        for allowed in ALLOWED:
            part = part.replace(allowed, "")
        found += [part[max(0, match.start() - 60) : match.end()] for match in MEASURED.finditer(part)]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/LOG.md"])
def test_no_measured_number_is_typed(page: str) -> None:
    assert not typed(PAGES[page]), "take it from a result's IN_TEXT"


FOUND = [
    *("It is 2.59 times as fast.", "It reads 300 tokens/s.", "It ends at perplexity 9.41.", "It is at 94.86 ± 1.30."),
    *("It was 30 % before,", "and 58 % after.", "It saves memory by 25 %.", "8 bits had 81 %.", "It is 12.5% faster."),
    *("It costs about half of that.", "It takes about eight times as long.", "It removes a quarter of the divergence."),
    *("It causes three quarters\nof the divergence.", "It makes up for a sixth to two thirds of the loss."),
    *("It is twice as fast.", "It drifts a thousand times as far.", "They were several times\nslower."),
]
NOT_FOUND = [
    *("It is <!--a.b-->2.59<!--/--> times as fast.", "It has <!--a.b-->73%<!--/-->.", "| 2.59× |", "    takes 30 %"),
    *("Perplexity after 25, 50 and 75 % of the experts", "The best at 50 %", "`--sparsity 0.3`", "an interval of 95 %"),
    *("Four times the experts", "half of the documents", "a third pass", "drawn 2,000 times", "on half as many windows"),
]


@pytest.mark.parametrize("text", FOUND)
def test_typed_numbers_are_found(text: str) -> None:
    assert typed(text)


@pytest.mark.parametrize("text", NOT_FOUND)
def test_other_numbers_may_be_typed(text: str) -> None:
    assert not typed(text)


def test_allowed_numbers_are_there() -> None:
    shown = "\n".join(part for text in PAGES.values() for part in prose(text))
    assert all(part in shown for part in ALLOWED), "an allowed line is gone"


def test_a_number_in_a_sentence_is_written_from_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "results", lambda: {"startup": {"figures": {}}})
    monkeypatch.setattr(results, "numbers_of", lambda name, figures: {"first": "1.25", "second": "0.5"})
    page = "It takes <!--startup.first-->9<!--/--> s, then <!--startup.second-->9<!--/--> s.\n"
    shown = "It takes <!--startup.first-->1.25<!--/--> s, then <!--startup.second-->0.5<!--/--> s.\n"
    assert results.with_results(page) == shown


BEFORE = """
import torch
from typing import Any
def twice(x: Any) -> Any:
    # a comment
    return 2 * torch.as_tensor(x)
"""
AGAIN = """
import torch
from collections.abc import Sequence
def twice(x: Sequence[int]) -> torch.Tensor:
    "Return it twice."
    return 2 * torch.as_tensor(x)
"""


def test_words_are_not_code() -> None:
    """Docstrings, comments, types and the imports for types do not run; a field's type may."""
    assert results.code_of(BEFORE) == results.code_of(AGAIN)
    assert results.code_of(BEFORE) != results.code_of(BEFORE.replace("2 *", "3 *"))
    assert results.code_of(BEFORE) != results.code_of(BEFORE.replace("import torch", "import numpy as torch"))
    assert results.code_of("class A:\n    x: int = 1\n") != results.code_of("class A:\n    x: float = 1\n")
    said = "def f(x):\n    if x:\n        raise ValueError('one')\n    return option(1, help='one')\n"
    assert results.code_of(said) == results.code_of(said.replace("one", "another"))
    assert results.code_of(said) != results.code_of(said.replace("ValueError", "KeyError"))


ADDED = [
    BEFORE + "import numpy\n\ndef thrice(x):\n    return numpy.add(x, 2 * x)\n",
    "LIMIT = 3\n" + BEFORE,
    BEFORE.replace("import torch", "import torch\nfrom a import b").replace("def", "c = b\ndef"),
]
CHANGED = [
    BEFORE + "print(twice(1))\n",
    BEFORE + "def twice(x):\n    return 3 * x\n",
    BEFORE + "torch.flag = True\n",
    BEFORE.replace("2 *", "3 *"),
    "import torch\n",
]


@pytest.mark.parametrize("after", ADDED)
def test_names_that_nothing_used_before_change_no_figure(after: str) -> None:
    assert results.only_adds(results.code_of(BEFORE), results.code_of(after))


@pytest.mark.parametrize("after", CHANGED)
def test_other_statements_may_change_figures(after: str) -> None:
    assert not results.only_adds(results.code_of(BEFORE), results.code_of(after))


def changed_file(monkeypatch: pytest.MonkeyPatch, path: str, *blobs: str) -> None:
    """Let git say that one file has changed, from the first of these contents to the second."""
    results._code_in.cache_clear()
    line = f":100644 100644 0 1 M\t{path}"
    monkeypatch.setattr(results, "_git", lambda *words: line if words[0] == "diff" else blobs[int(words[2])])


def test_a_result_that_is_older_than_its_code_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_file(monkeypatch, "engine/a.py", BEFORE, AGAIN)
    assert not results.is_older_than_its_code(STORED["startup"], "startup")
    for path, after in (("engine/a.py", BEFORE.replace("2 *", "3 *")), ("engine/a.json", AGAIN)):
        changed_file(monkeypatch, path, BEFORE, after)
        assert results.is_older_than_its_code(STORED["startup"], "startup")
    results._code_in.cache_clear()
    line = results.measured(STORED["startup"], "startup")
    assert results.STALE in line and STORED["startup"]["date"] in line and STORED["startup"]["commit"][:7] in line
    monkeypatch.setattr(results, "_git", lambda *words: "")
    assert results.measured(STORED["startup"], "startup") == results.without_age(line)


def test_code_of_a_gpu_ages_figures_of_a_gpu_alone() -> None:
    for name, on_gpu in (("decode", False), ("gpu_decode", True)):
        paths = results._git("ls-files", "--", *registry.benchmark_of(name).measured).splitlines()
        assert "engine/decoder/model.py" in paths
        assert ("engine/decoder/gpu/step.py" in paths) == on_gpu


def test_figures_are_as_old_as_the_oldest_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on from lines of an earlier commit is stored with that commit and its date."""
    history = {"0" * 10: 7, "1" * 10: 3, "2" * 10: 5}
    monkeypatch.setattr(results, "_git", lambda *words: str(history[words[-1]]))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "table_of", lambda name, figures: "")
    states = [{"commit": one, "uncommitted_changes": False, "date": f"2026-01-0{day}"} for day, one in enumerate(history, 1)]
    lines, names = tmp_path / "lines.jsonl", ("first", "second")
    for name, state in zip(names, states[1:], strict=True):
        monkeypatch.setattr(results, "_BEGUN", state)
        results.remember(lines, {"name": name})
    for begun, read, expected in ((states[0], True, states[1]), (states[0], False, states[0]), (states[1], True, states[1])):
        monkeypatch.setattr(results, "_BEGUN", begun)
        monkeypatch.setattr(results, "_WENT_ON", [])
        assert not read or results.remembered(lines) == [{"name": name} for name in names]
        results.save("startup", {})
        stored = results.results()["startup"]
        assert {key: stored[key] for key in expected} == expected


def test_what_a_machine_lacks_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The others go on, and a script that fails is named with its arguments."""
    for name, status in (("lacks", results.NOT_POSSIBLE_HERE), ("fails", 1), ("works", 0)):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit({status})\n")
    monkeypatch.setattr(registry, "HERE", tmp_path)
    rows = [registry.Benchmark(name, (), (), trial=("--layers", "1"), needs="a GPU") for name in ("lacks", "fails", "works")]
    assert registry.run(rows, {}, is_trial=True) == ["fails --layers 1"]
    assert "not possible here: needs a GPU" in capsys.readouterr().err


def test_a_benchmark_without_a_peer_of_its_table_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It would replace the table by one without the peer. A run of seconds keeps nothing, and takes what is there."""
    (tmp_path / "peers.py").write_text(
        "import pathlib, sys\npathlib.Path(__file__).with_name('ran').write_text(str(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(registry, "HERE", tmp_path)
    row = registry.Benchmark("peers", (), (), ("--full",), ("--short",), inputs={"": "MIXTURE_SPLIT", **registry.VLLM})
    monkeypatch.setenv("MIXTURE_SPLIT", "mixture")
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert registry.run([row], {}, is_trial=False) == [] and not (tmp_path / "ran").exists()
    assert "set VLLM_PYTHON, the Python of an environment with vLLM\n" in capsys.readouterr().err
    assert registry.run([row], {}, is_trial=True) == []
    assert (tmp_path / "ran").read_text() == "['mixture', '--short']"
    monkeypatch.setenv("VLLM_PYTHON", "python")
    assert registry.run([row], {}, is_trial=False) == []
    assert (tmp_path / "ran").read_text() == "['mixture', '--vllm-python', 'python', '--full']"


def test_every_variable_of_an_input_is_explained() -> None:
    assert {name for row in registry.BENCHMARKS for name in row.inputs.values()} == set(registry.VARIABLES)


def test_ratios_come_with_the_range_of_paired_rounds() -> None:
    assert results.times(2.0) == "2.00×"
    assert results.times(2.0, [10.0], [5.0]) == "2.00×"
    assert results.times(2.0, [10.0, 9.0, 12.0], [5.0, 5.0, 5.0]) == "2.00× (1.80 to 2.40)"
    assert results.times(2.0, [10.0, 9.0], [5.0, 5.0, 5.0]) == "2.00×"


def test_a_search_compares_each_rate_with_all_seed_by_seed() -> None:
    """Differences are taken within a seed, so seeds of different difficulty do not hide them. Computed by hand.

    The first seed chooses the rates that run with others, so it is no evidence for them.
    """
    common = {"samples": None, "probability": None, "experts": None, "rouge_l_before": 0.5}
    every = [
        {"recipe": "all", "router": None, "rouge_l": value, "router_drift_mean_per_layer": None} for value in (0.9, 0.6, 0.7)
    ]
    sar = [
        {"recipe": "sar", "router": 1e-4, "rouge_l": value, "router_drift_mean_per_layer": [0.001, 0.5, last]}
        for value, last in ((0.5, 0.03), (0.61, 0.02), (0.73, 0.04))
    ]
    lines = [common | line | {"seed": seed} for own in (every, sar) for seed, line in enumerate(own)]
    figures = {"steps": 8, "batch_size": 4, "threads": 1, "prompts": 16, "lines": lines}
    shown = script_of("distill_sar").TABLES["distill_sar"](figures).splitlines()
    assert [cell.strip() for cell in shown[-1].split("|")[1:-1]] == [
        *("sar, router at 0.0001", "61.33 ± 11.50", "+2.00 ± 1.00", "2 of 2", "0.001", "0.03"),
    ]
    assert "3 seeds" in shown[0] and shown[-2].startswith("| all | 73.33")
