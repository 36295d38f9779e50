"""`compress prune` of a GGUF file to a GGUF file: figures, refusals, and what an error leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import make_workplace, refused, run
from click.testing import CliRunner
from family_matrix import own_logits

import cli
from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.plans.gguf_plan import planned_file
from engine.checkpoint.checkpoint import Checkpoint
from engine.files.gguf_file import GgufFile

TEXT = ["--data", "text.txt", "--samples", "8", "--sequence-length", "16", "--evaluation-samples", "2"]
EXPERTS = ["--sparsity", "0.5", "--method", "frequency", "--uniform"]
UNITS = ["--sparsity", "0.5", "--method", "unit-magnitude", "--uniform"]
PRUNE = ["prune", "m.gguf", *TEXT, "-o", "out.gguf"]


@pytest.fixture(name="models", scope="module")
def made_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    make_workplace(path, hidden_size=64, intermediate_size=128)
    export_gguf(GgufExportOptions(model=str(path / "model"), output=path / "m.gguf", type="q4_0"))
    return path


@pytest.fixture(name="place")
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_whole_experts_leave_and_blocks_stay(place: Path) -> None:
    figures = run(*PRUNE, *EXPERTS, "--plan-output", "plan-made.json", "--memory-limit", "2GB")
    assert figures["artifact"] == "out.gguf" and figures["experts_per_layer"] == [3, 3, 3] and "plots" not in figures
    assert figures["perplexity_after"] > 0 and figures["bytes_after"] < figures["bytes_before"]
    source, result = GgufFile(place / "m.gguf"), GgufFile(place / "out.gguf")
    assert {one.type.name for one in result.tensors.values()} == {"Q4_0", "Q8_0", "F32"}
    kept = {bytes(one) for one in result.tensor("blk.2.ffn_up_exps.weight").numpy()}
    assert len(kept) == 3 and kept <= {bytes(one) for one in source.tensor("blk.2.ffn_up_exps.weight").numpy()}
    again = run("prune", "m.gguf", *TEXT, "--plan", "plan-made.json", "-o", "again.gguf")
    assert (place / "again.gguf").read_bytes() == (place / "out.gguf").read_bytes() and again["experts_after"] == 9
    assert not list(place.glob(".*partial*")) and not list(place.glob(".*work*"))


def test_units_leave_and_the_refit_is_rounded_to_the_same_type(place: Path) -> None:
    figures = run(*PRUNE, *UNITS)
    assert figures["widths_per_layer"] == [[64] * 6] * 3 and figures["refit"]["error_per_layer"]
    plain = run("prune", "m.gguf", *TEXT, *UNITS, "--no-refit", "-o", "plain.gguf")
    assert plain["refit"] is None
    fitted, kept = GgufFile(place / "out.gguf"), GgufFile(place / "plain.gguf")
    changed = {name for name in fitted.entries if not torch.equal(fitted.tensor(name), kept.tensor(name))}
    assert changed == {name for name in fitted.entries if "ffn_down_exps" in name}
    assert own_logits(Checkpoint(place / "out.gguf")).isfinite().all()


def test_the_result_is_exported_and_pruned_again(place: Path) -> None:
    run(*PRUNE, *EXPERTS)
    assert run("prune", "out.gguf", *TEXT, *UNITS, "-o", "twice.gguf")["units_after"] == 9 * 64
    assert (
        run("export", "twice.gguf", "--format", "gguf", "--type", "bf16", "-o", "wide.gguf")["max_abs_logit_difference"] == 0
    )


REFUSED = [
    ([*PRUNE, "--sparsity", "0.5", "--method", "frequency"], "add --uniform"),
    ([*PRUNE, "--sparsity", "0.5", "--method", "unit-magnitude"], "add --uniform"),
    ([*PRUNE, "--plan", "plan.json"], "m.gguf: the model has several numbers of experts (2, 3, 5), and a GGUF file has one"),
    ([*PRUNE, *UNITS, "--unit-multiple", "16"], "do not fill whole groups; take --unit-multiple 32, or another --output"),
    ([*PRUNE, *EXPERTS, "--merge", "cka"], "as stored, not merged; give a directory, and then `compress export"),
    ([*PRUNE, *EXPERTS, "--distill-steps", "2"], "as stored, not trained; give a directory"),
    ([*PRUNE, *EXPERTS, "--bits", "8"], "leave out --bits"),
    ([*PRUNE[:-1], "m.gguf", *EXPERTS], "m.gguf: exists already"),
    ([*PRUNE[:-1], "m.gguf", *EXPERTS, "--overwrite"], "m.gguf: is a file of the model itself"),
    ([*PRUNE[:-1], "s-00001-of-00002.gguf", *EXPERTS], "is the name of a part of a split model"),
    ([*PRUNE, *EXPERTS, "--plan-output", "out.gguf"], "out.gguf: is the model or the result itself"),
    ([*PRUNE, *EXPERTS, "--plan-output", "m.gguf", "--overwrite"], "m.gguf: is the model or the result itself"),
    (["prune", "model", *PRUNE[2:], *EXPERTS], "out.gguf: a GGUF file is made of a GGUF file, and model is none"),
    ([*PRUNE, "--sparsity", "0.5,0.25", "--method", "frequency"], "out.gguf: a sweep writes a directory"),
    (["quantize", "model", "--bits", "8", *TEXT, "-o", "out.gguf"], "out.gguf: the result is a directory"),
    (["merge", "m.gguf", *TEXT, "--experts", "4", "-o", "out.gguf"], "out.gguf: the result is a directory"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_refusals_write_nothing(arguments: list[str], said: str, place: Path) -> None:
    refused(place, arguments, said)


def test_nothing_is_left_of_a_result_that_differs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another(*given: Any) -> Any:
        planned = planned_file(*given)
        object.__setattr__(planned, "config", Checkpoint(place / "model").config)
        return planned

    monkeypatch.setattr("compress.run.result.planned_file", of_another)
    before = {path.name for path in place.iterdir()}
    outcome = CliRunner().invoke(cli.main, [*PRUNE, *EXPERTS])
    assert outcome.exit_code == 1 and "reads back with another" in outcome.stderr
    assert {path.name for path in place.iterdir()} - before <= {".out.gguf.lock"}
