"""The benchmark: rows of both backends from separate processes, formats, and errors in one line."""

from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference

from engine.bench import side_by_side as module
from engine.bench.backends import BenchCase, BenchSpec, TorchBackend, TransformersBackend, run_case
from engine.bench.side_by_side import bench, cases_for, format_rows
from engine.checkpoint import remote_code
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.skip_tables import SkipTables
from engine.errors import CheckpointError, CompressError, OptionError
from engine.families.table import ARCHITECTURES
from engine.generation.worker import Worker

KEYS = [
    "model",
    "backend",
    "test",
    "tokens_per_second_mean",
    "tokens_per_second_sd",
    "peak_memory_bytes",
    "weights_bytes",
    "kv_cache_bytes",
    "experts_skipped_share",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path)
    SkipTables((torch.ones(1),) * 3, (torch.ones(6, 6),) * 3).save(path / FILE_NAME)
    return path


def spec(directory: Path, **options: Any) -> BenchSpec:
    return BenchSpec(str(directory), threads=1, device="cpu", **options)


@pytest.fixture(scope="module")
def rows(directory: Path) -> list[dict[str, Any]]:
    specs = [spec(directory), spec(directory, skip_threshold=2.0), spec(directory, backend="transformers", batch=2)]
    seen: list[int] = []

    def progress(rounds: Any) -> Any:
        for each in rounds:
            seen.append(each)
            yield each

    result = bench(specs, cases_for(16, 4, 8), repetitions=2, progress=progress)
    assert seen == [0, 1, 2]
    return result


def test_rows_carry_every_key(rows: list[dict[str, Any]]) -> None:
    assert [(row["backend"], row["test"]) for row in rows] == [
        *[("torch", "pp16 @ d8"), ("torch", "tg4 @ d8")] * 2,
        *[("transformers", "pp16 @ d8"), ("transformers", "tg4 @ d8")],
    ]
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
        assert row["tokens_per_second_mean"] > 0
        assert row["tokens_per_second_sd"] >= 0
        assert row["peak_memory_bytes"] > 50e6  # an interpreter with torch
        assert (row["threads"], row["dtype"], row["device"]) == (1, "float32", "cpu")


def test_both_backends_hold_the_same_weights_and_cache(rows: list[dict[str, Any]]) -> None:
    assert len({row["weights_bytes"] for row in rows}) == 1
    assert rows[0]["weights_bytes"] == 4 * rows[0]["parameters"]
    per_position = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, fp32
    assert rows[0]["kv_cache_bytes"] == (8 + 16) * per_position
    assert rows[4]["kv_cache_bytes"] == 2 * (8 + 16) * per_position
    assert rows[1]["kv_cache_bytes"] == (8 + 4) * per_position


def test_states_are_part_of_the_cache_of_both_backends(tmp_path: Path) -> None:
    """The bytes are counted by hand. transformers keeps a fourth input of the convolution."""
    save_reference("qwen3_next", tmp_path)
    tokens = torch.randint(3, 96, (1, 9))
    for kind, inputs in ((TorchBackend, 3), (TransformersBackend, 4)):
        backend = kind(spec(tmp_path, dtype="float32"))
        backend.start(1, 9)
        backend.forward(tokens)
        states = 2 * (4 * 8 * 12 + inputs * 80)  # layers, heads, sizes of a key and a value, channels
        assert backend.kv_cache_bytes == 4 * (states + 9 * 2 * 2 * 16), "and one layer of keys and values"


def test_skipping_is_reported(rows: list[dict[str, Any]]) -> None:
    assert [row["experts_skipped_share"] for row in rows] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    assert all(row["expert_hit_rate"] is row["expert_bytes_read_per_token"] is None for row in rows), "no memory limit"


def test_models_by_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "bench", lambda *arguments: asked.append(arguments) or [])
    module.bench_models(["a", "b"], ["torch", "transformers"], generated_tokens=0, skip_threshold=1.0, batch=3)
    specs, cases, repetitions, _ = asked[0]
    assert [(each.model, each.backend, each.skip_threshold, each.batch) for each in specs] == [
        ("a", "torch", 1.0, 3),
        ("a", "transformers", 0.0, 3),
        ("b", "torch", 1.0, 3),
        ("b", "transformers", 0.0, 3),
    ]
    assert (cases, repetitions) == ([BenchCase("pp", 512)], 5)
    with pytest.raises(OptionError, match="cannot skip"):
        module.bench_models(["a"], ["transformers"], skip_threshold=1.0)


def test_formats(rows: list[dict[str, Any]]) -> None:
    assert json.loads(format_rows(rows, "json")) == {"rows": rows}
    assert [json.loads(line) for line in format_rows(rows, "jsonl").splitlines()] == rows
    read = list(csv.DictReader(io.StringIO(format_rows(rows, "csv"))))
    assert [row["test"] for row in read] == [row["test"] for row in rows]
    assert list(read[0]) == [name for name in rows[0] if name != "tokens_per_second_rounds"], "a list is no cell"
    with pytest.raises(OptionError, match="'xml'"):
        format_rows(rows, "xml")


def test_rows_have_the_rates_of_every_round(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert statistics.median(row["tokens_per_second_rounds"]) == row["tokens_per_second_median"] > 0
        assert statistics.mean(row["tokens_per_second_rounds"]) == pytest.approx(row["tokens_per_second_mean"])


def test_the_table_has_llama_bench_columns() -> None:
    row = dict.fromkeys(KEYS, 0) | {"model": "demo", "backend": "torch", "test": "tg128", "threads": 2}
    row |= {"tokens_per_second_mean": 12.345, "tokens_per_second_sd": 0.5, "peak_memory_bytes": 3 << 29}
    row |= {"weights_bytes": 3 << 19, "parameters": 2_500_000, "experts_skipped_share": 0.25}
    assert format_rows([row, row | {"weights_bytes": 5 << 30, "parameters": 1.3e9}], "md").splitlines() == [
        "| model |     size | params | backend | threads | test  |          t/s | peak memory | skipped |",
        "| ----- | -------: | -----: | ------- | ------: | ----- | -----------: | ----------: | ------: |",
        "| demo  | 1.50 MiB | 2.50 M | torch   |       2 | tg128 | 12.35 ± 0.50 |    1.50 GiB |  25.0 % |",
        "| demo  | 5.00 GiB | 1.30 B | torch   |       2 | tg128 | 12.35 ± 0.50 |    1.50 GiB |  25.0 % |",
    ]
    assert format_rows([], "md").count("\n") == 1
    assert format_rows([], "csv") == ""


def test_both_backends_compute_the_same(directory: Path) -> None:
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    backends = [TorchBackend(spec(directory))]
    for implementation in (None, "eager", "batched_mm", "grouped_mm"):
        own = spec(directory, backend="transformers", experts_implementation=implementation)
        backends.append(TransformersBackend(own))
    generated = []
    for backend in backends:
        backend.start(2, 20)
        generated.append([backend.forward(tokens)])
        for _ in range(6):
            generated[-1].append(backend.forward(generated[-1][-1]))
    ours = torch.cat(generated[0], 1)
    assert all(torch.equal(ours, torch.cat(theirs, 1)) for theirs in generated[1:])


@pytest.mark.parametrize(("case", "lengths"), [(BenchCase("pp", 6, 4), [4, 6]), (BenchCase("tg", 3), [1, 1, 1])])
def test_a_case_reads_what_it_says(
    directory: Path, case: BenchCase, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(spec(directory))
    own, seen = backend.forward, []
    monkeypatch.setattr(backend, "forward", lambda tokens: seen.append(tokens.shape[1]) or own(tokens))
    assert run_case(backend, case, torch.zeros(1, 10, dtype=torch.int64)) > 0
    assert seen == lengths


def test_skips_are_not_counted_while_timed(directory: Path) -> None:
    backend = TorchBackend(spec(directory, skip_threshold=2.0))
    backend.count_skips(False)
    assert all(block.observer is None for block in backend._engine.decoder.moe_blocks)
    backend.count_skips(True)
    assert all(block.observer is not None for block in backend._engine.decoder.moe_blocks)


def test_cases() -> None:
    assert [case.name for case in cases_for()] == ["pp512", "tg128"]
    assert cases_for(0, 5) == [BenchCase("tg", 5)]
    with pytest.raises(OptionError, match="turned off"):
        cases_for(0, 0)
    for arguments in ((-1, 0), (8, 8, -1)):
        with pytest.raises(OptionError, match="cannot be run"):
            cases_for(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "numpy"}, "'numpy' is not known; choose torch, transformers, onnx"),
        ({"batch": 0}, "batch is 0"),
        ({"backend": "transformers", "skip_threshold": 1.0}, "cannot skip"),
        ({"backend": "transformers", "experts_implementation": "fast"}, "'fast' is not known; choose eager, batched_mm"),
        ({"experts_implementation": "eager"}, "has its own experts"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BenchSpec("demo", **options)


def test_repetitions_and_missing_models_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="repetitions is 0"):
        bench([spec(directory)], cases_for(), repetitions=0)
    with pytest.raises(CheckpointError, match="no such directory"):
        bench([spec(tmp_path / "nothing")], cases_for())


def test_a_workers_error_is_passed_on(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="pp512 needs 512 positions and the model has 128"):
        bench([spec(directory)], cases_for(512, 0))
    damaged = Path(shutil.copytree(directory, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        bench([spec(damaged)], cases_for(8, 0))


def test_a_worker_that_dies_is_explained(directory: Path) -> None:
    worker = Worker(spec(directory), "engine.bench.backends")
    with worker:
        worker._process.kill()
        with pytest.raises(CompressError, match="signal 9"):
            worker.ask("memory")
    with Worker(spec(directory), "engine.bench.backends") as worker, pytest.raises(RuntimeError, match="Traceback"):
        worker.ask("run pp")


def test_only_our_own_code_is_run(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    blocks = [{"ffn": {"moe": {"num_local_experts": 6}}}] * 3
    config |= {"auto_map": remote_code.auto_map(), "block_configs": blocks}
    (copy / "config.json").write_text(json.dumps(config))
    options = spec(copy, backend="transformers")
    with pytest.raises(OptionError, match="run code"):
        TransformersBackend(options)
    source = remote_code.render(ARCHITECTURES["mixtral"])
    (copy / remote_code.FILE_NAME).write_text(source + "\n")
    with pytest.raises(OptionError, match="run code"):
        TransformersBackend(options)
    (copy / remote_code.FILE_NAME).write_text(source)
    rows = bench([options], cases_for(8, 2), repetitions=1)
    assert [row["tokens_per_second_sd"] for row in rows] == [0.0, 0.0]
