"""GGUF files whose rounding is weighed by the inputs of a text, and importance matrices for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from click.testing import CliRunner
from conftest import save_reference
from gguf_models_for_tests import DELTA_SIZES

import cli
from calibrate.batches import calibration_texts
from calibrate.options import CalibrationOptions
from calibrate.product_inputs import InputSums, collect_inputs
from compress.export import gguf as exporting
from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.imatrix_file import write_imatrix
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import ExportError, OptionError, OutputError
from engine.families.gguf.description import described

LARGE = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 3, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf-weights")
    make_workplace(path, **LARGE)
    return path


def options(workplace: Path, output: Path, **changes: Any) -> GgufExportOptions:
    text = CalibrationOptions(data=str(workplace / "text.txt"), samples=4, sequence_length=16, evaluation_samples=0)
    given = {"model": str(workplace / "model"), "output": output, "type": "q4_k_s", "calibration": text} | changes
    return GgufExportOptions(**given)


def sums(workplace: Path) -> InputSums:
    checkpoint = Checkpoint(workplace / "model")
    filled = options(workplace, Path("m.gguf")).calibration.filled(checkpoint)
    tokens_SL, _ = calibration_texts(filled, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
    return collect_inputs(checkpoint, tokens_SL, dtype=checkpoint.model_dtype)


def weighted_errors(workplace: Path, file: Path, found: InputSums) -> dict[str, float]:
    """Return Σ w·δ² of every matrix that is rounded, by its name."""
    own, read = Checkpoint(workplace / "model"), Checkpoint(file)
    offs = {name: read.tensor(name, torch.float32) - own.tensor(name, torch.float32) for name in found.squares}
    return {name: float((found.squares[name] * off**2).sum()) for name, off in offs.items() if bool(off.any())}


@pytest.mark.parametrize(
    "type_", ["q4_k_s", *(pytest.param(each, marks=pytest.mark.slow) for each in ("q2_k", "q3_k", "q6_k"))]
)
def test_a_text_lowers_the_errors_of_products(type_: str, workplace: Path, tmp_path: Path) -> None:
    plain = GgufExportOptions(model=str(workplace / "model"), output=tmp_path / "plain.gguf", type=type_)
    assert export_gguf(plain)["calibration_tokens"] == 0
    figures = export_gguf(options(workplace, tmp_path / "weighted.gguf", type=type_))
    assert figures["calibration_tokens"] == 4 * 16 and figures["imatrix"] is None
    assert figures["max_abs_logit_difference"] <= 1e-4
    found = sums(workplace)
    before, after = (weighted_errors(workplace, tmp_path / f"{name}.gguf", found) for name in ("plain", "weighted"))
    assert before.keys() == after.keys() and any(".experts." in name for name in before) and "lm_head.weight" in before
    assert all(after[name] < before[name] for name in before)


def test_the_command_writes_an_importance_matrix(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `gguf` reads the sums, with one row for each expert, and zeros where no token chose one."""
    monkeypatch.chdir(workplace)
    output, matrix = tmp_path / "m.gguf", tmp_path / "imatrix.gguf"
    arguments = ["export", "model", "--format", "gguf", *CALIBRATION, "-o", str(output), "--imatrix-output", str(matrix)]
    done = CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False)
    figures = json.loads(done.stdout)
    assert figures["imatrix"] == str(matrix) and sorted(tmp_path.iterdir()) == [matrix, output]
    reader, found = gguf.GGUFReader(matrix), sums(workplace)
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["text.txt"]
    assert [reader.get_field(f"imatrix.chunk_{name}").contents() for name in ("count", "size")] == [4, 16]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    stored = described(Checkpoint(workplace / "model").config).tensors
    matrices = [tensor for tensor in stored if tensor.sources[0] in found.squares]
    assert {f"{tensor.name}.{part}" for tensor in matrices for part in ("in_sum2", "counts")} == tensors.keys()
    assert {"blk.0.attn_output.weight", "blk.0.ffn_down_exps.weight", "output.weight"} <= {each.name for each in matrices}
    for tensor in matrices:
        rows = [found.squares[source].numpy() for source in tensor.sources]
        np.testing.assert_array_equal(tensors[f"{tensor.name}.in_sum2"].data, np.stack(rows))
        counts = [[float(found.tokens[source])] for source in tensor.sources]
        assert tensors[f"{tensor.name}.counts"].data.tolist() == counts
        assert sum(own for (own,) in counts) == 4 * 16 * (2 if "_exps" in tensor.name else 1)


def test_experts_without_a_token_have_zeros(workplace: Path, tmp_path: Path) -> None:
    description = described(Checkpoint(workplace / "model").config)
    down = next(tensor for tensor in description.tensors if tensor.name == "blk.0.ffn_down_exps.weight")
    write_imatrix(tmp_path / "m.gguf", description, {down.sources[1]: torch.ones(256)}, {down.sources[1]: 5}, "a", 1, 7)
    tensors = {tensor.name: tensor.data.tolist() for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors == {f"{down.name}.in_sum2": [[0] * 256, [1] * 256, [0] * 256], f"{down.name}.counts": [[0], [5], [0]]}


def test_sums_are_in_the_order_of_stored_columns(tmp_path: Path) -> None:
    """Files of Qwen3.5 have every first head of a key head's values before every second one; the model, by key head."""
    save_reference("qwen3_5_moe_text", tmp_path / "model", **DELTA_SIZES["qwen3_5_moe_text"])
    description, sums_I = described(Checkpoint(tmp_path / "model").config), torch.arange(32.0)
    write_imatrix(tmp_path / "i.gguf", description, {"model.layers.0.linear_attn.out_proj.weight": sums_I}, {}, "a", 1, 7)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    key_heads, heads, size = 2, 2, 8
    order = [(key * heads + head) * size + row for head in range(heads) for key in range(key_heads) for row in range(size)]
    assert tensors["blk.0.ssm_out.weight.in_sum2"].tolist() == [order]


def test_absorbed_keys_and_values_are_left_out(tmp_path: Path) -> None:
    make_workplace(tmp_path, "deepseek_v3", kv_lora_rank=32, q_lora_rank=32, v_head_dim=32, qk_nope_head_dim=32)
    figures = export_gguf(options(tmp_path, tmp_path / "m.gguf", type="q4_0", imatrix_output=tmp_path / "i.gguf"))
    assert figures["max_abs_logit_difference"] <= 1e-4
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    assert {"blk.0.attn_kv_a_mqa.weight.in_sum2", "blk.1.ffn_up_shexp.weight.counts"} <= names
    assert not any("attn_k_b" in name or "attn_v_b" in name for name in names)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"imatrix_output": Path("i.bin")}, OptionError, r"ends in \.gguf; give another --imatrix-output"),
    ({"imatrix_output": Path("m.gguf"), "output": Path("m.gguf")}, OptionError, "is the model and the importance matrix"),
    ({"imatrix_output": Path("there.gguf")}, OutputError, "exists already"),
]


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED)
def test_outputs_are_checked_before_any_work(
    changes: dict[str, Any],
    error: type[Exception],
    says: str,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.gguf").write_text("earlier")
    monkeypatch.setattr(exporting, "collect_inputs", None)
    with pytest.raises(error, match=says):
        export_gguf(options(workplace, **{"output": Path("m.gguf")} | changes))
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]


def test_neither_file_is_left_where_the_model_differs(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*given: Any) -> float:
        raise ExportError("other logits")

    monkeypatch.setattr(exporting, "_compare", differs)
    with pytest.raises(ExportError, match="other logits; it was removed"):
        export_gguf(options(workplace, tmp_path / "m.gguf", imatrix_output=tmp_path / "i.gguf"))
    assert not list(tmp_path.iterdir())


def test_other_formats_refuse_an_importance_matrix(workplace: Path) -> None:
    done = CliRunner().invoke(cli.main, ["export", str(workplace / "model"), "--imatrix-output", "i.gguf"])
    assert done.exit_code == 1 and "--imatrix-output is for GGUF files" in done.output
