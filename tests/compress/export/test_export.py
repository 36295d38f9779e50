"""`compress export`: the files that it writes, the programs that run them, and that a wrong export leaves no files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from artifacts_for_tests import make_pruned, make_workplace
from click.testing import CliRunner
from conftest import save_reference
from safetensors.torch import load_file, save_file

import cli
from compress.export.decoder import export
from compress.options.export import ExportOptions
from compress.options.quantize import QuantiserOptions
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan, same_plan
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.skip_tables import SkipTables
from engine.errors import CheckpointError, ExportError, OptionError, OutputError, UnsupportedError
from engine.generation.generate import Engine
from engine.kernels.stored.quantized_weight import quantise

KEYS = {"artifact", "format", "max_abs_logit_difference", "bytes"}
PROMPTS = ["the quick brown", "a"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, `pruned` (non-uniform, with skip tables) and `onnx`, its export."""
    path = tmp_path_factory.mktemp("export")
    make_workplace(path, hidden_size=64)
    make_pruned(path)
    run(path, "export", "{here}/pruned", "-o", "{here}/onnx")
    return path


def run(place: Path, *arguments: str) -> dict[str, Any]:
    """Run a command with --json."""
    filled = [argument.format(here=place) for argument in arguments]
    result = CliRunner().invoke(cli.main, [*filled, "--json", "--threads", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def options(place: Path, **changes: Any) -> ExportOptions:
    return ExportOptions(**{"model": str(place / "pruned"), "output": place / "out", "threads": 1} | changes)


def test_the_command_writes_an_artifact_and_says_how_close_it_is(place: Path, tmp_path: Path) -> None:
    figures = run(place, "export", "{here}/pruned", "-o", str(tmp_path / "out"))
    assert set(figures) >= KEYS and figures["format"] == "onnx" and figures["experts_per_layer"] == [3, 5, 2]
    assert 0 < figures["max_abs_logit_difference"] <= 1e-4
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json", "compression.json"}
    provenance = read_provenance(tmp_path / "out")
    assert provenance is not None and set(provenance["files"]) == written - {"compression.json"}
    assert provenance["figures"]["max_abs_logit_difference"] == figures["max_abs_logit_difference"]
    onnx.checker.check_model(tmp_path / "out" / "model.onnx")
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_weights_are_in_the_data_file_once_and_the_graph_is_small(place: Path) -> None:
    stored = sum(
        tensor.numel() * 4 for tensor in map(Checkpoint(place / "pruned").tensor, Checkpoint(place / "pruned").shapes)
    )
    graph = onnx.load(place / "onnx" / "model.onnx", load_external_data=False).graph
    lengths = {
        tensor.name: next(int(entry.value) for entry in tensor.external_data if entry.key == "length")
        for tensor in graph.initializer
        if tensor.external_data
    }
    tables = sum(length for name, length in lengths.items() if name.startswith("rotary."))
    assert sum(lengths.values()) == stored + tables
    assert (place / "onnx" / "model.onnx").stat().st_size < 60_000


def test_generate_bench_evaluate_and_inspect_take_an_export(place: Path) -> None:
    generated = run(place, "generate", "{here}/onnx", "-p", PROMPTS[0], "-p", PROMPTS[1], "-n", "12", "--checksums")
    engine = Engine.open(place / "pruned", dtype="float32")
    assert generated["text"] == [each.text for each in engine.generate(PROMPTS, max_new_tokens=12)]
    assert generated["generated_tokens"] == engine.report().generated_tokens and generated["peak_memory_bytes"] > 0
    (row,) = run(place, "bench", "{here}/onnx", "-p", "0", "-n", "3", "-r", "1", "--depth", "5")["rows"]
    assert (row["backend"], row["test"], row["dtype"]) == ("onnx", "tg3 @ d5", "float32")
    assert row["weights_bytes"] == (place / "onnx" / "model.onnx.data").stat().st_size and row["kv_cache_bytes"] > 0
    text = ["--data", "{here}/text.txt", "--samples", "3", "--sequence-length", "32"]
    values = [run(place, "evaluate", model, *text)["value"] for model in ("{here}/pruned", "{here}/onnx")]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    inspected = run(place, "inspect", "{here}/onnx", "--checksums")
    assert (inspected["kind"], inspected["experts_per_layer"], inspected["valid"]) == ("onnx", [3, 5, 2], True)
    assert inspected["parameters"] == Checkpoint(place / "pruned").parameters


def test_perplexity_in_pieces_is_that_of_the_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ["--data", "{here}/text.txt", "--samples", "2", "--sequence-length", "32"]
    whole = run(place, "evaluate", "{here}/onnx", *text)["value"]
    monkeypatch.setattr("compress.run.perplexity.PIECE", 7)
    assert run(place, "evaluate", "{here}/onnx", *text)["value"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("experts", ["moe", "portable"])
def test_skipping_can_be_baked_in(place: Path, tmp_path: Path, experts: str) -> None:
    export(options(place, output=tmp_path / "out", skip_threshold=1.0, experts=experts))
    skipping = Engine.open(place / "pruned", dtype="float32", skip_threshold=1.0)
    expected = skipping.generate(PROMPTS, max_new_tokens=12)
    assert skipping.report().experts_skipped_share > 0.1
    found = Engine.open(tmp_path / "out")
    assert found.generate(PROMPTS, max_new_tokens=12) == expected
    for name in ("experts_skipped_share", "experts_skipped_share_per_layer", "experts_read", "kv_cache_bytes"):
        assert getattr(found.report(), name) == getattr(skipping.report(), name), name


@pytest.mark.parametrize(
    ("precision", "experts", "bits", "tolerance"),
    [
        ("float16", "moe", None, 1e-2),
        ("float16", "portable", None, 1e-2),
        ("int8", "moe", 8, 8e-2),
        ("int4", "moe", 4, 8e-2),
    ],
)
def test_low_precision(
    place: Path, tmp_path: Path, precision: str, experts: str, bits: int | None, tolerance: float
) -> None:
    """Logits equal those of the engine with the same rounded weights, up to the rounding of activations."""
    figures = export(options(place, output=tmp_path / "out", precision=precision, experts=experts))
    checkpoint = Checkpoint(place / "pruned")

    def rounded(name: str) -> torch.Tensor:
        weight = checkpoint.tensor(name).float()
        if bits is None or weight.dim() == 1 or "gate.weight" in name:
            return weight
        outer = "embed_tokens" in name or "lm_head" in name
        # 48 inputs of the down projection are blocks of 16, and an expert's operator has one size for all.
        block = 32 if outer or "self_attn" in name else 16
        return quantise(weight, 8 if outer else bits, block).dequantised(torch.float32)

    from engine.decoder.model import Decoder

    tokens_BL = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = Decoder(checkpoint.config, rounded)(tokens_BL)
        found = Engine.open(tmp_path / "out").decoder(tokens_BL).float()
    assert float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()) <= tolerance
    whole = (place / "onnx" / "model.onnx.data").stat().st_size
    # A block of 16 has at least 16 bits of its own: with its scale 6 to 10 bits of 32 a weight. Some weights stay unchanged.
    assert figures["weights_bytes"] < {"float16": 0.51, "int8": 0.36, "int4": 0.27}[precision] * whole


def test_a_model_of_few_bits_keeps_them(tmp_path: Path) -> None:
    """Packed weights go to the graph unchanged, even if another rule than ours has rounded them."""
    make_workplace(tmp_path, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    full, small = Checkpoint(tmp_path / "model"), tmp_path / "small"
    apply(same_plan(full.config.experts_by_layer), full, small, quantiser=Quantiser(QuantiserOptions(4)))
    stored = load_file(small / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith("_packed"):  # the largest of a group is then the highest value instead of the lowest
            values = tensor.view(torch.uint8)
            low, high = ((16 - part).clamp_max(15) for part in (values & 15, values >> 4))
            stored[name] = (low | high << 4).view(torch.int32)
        elif name.endswith("_scale"):
            stored[name] = -tensor
    save_file(stored, small / "model.safetensors")
    for precision in ("float32", "int8", "int4"):
        figures = export(options(tmp_path, model=str(small), output=tmp_path / precision, precision=precision))
        assert precision != "float32" or figures["max_abs_logit_difference"] <= 1e-4
        assert "quantization_config" not in json.loads((tmp_path / precision / "config.json").read_text())
    graph = onnx.load(tmp_path / "int4" / "model.onnx").graph
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    checkpoint, block = Checkpoint(small), "model.layers.1.block_sparse_moe.experts"

    def packed(name: str) -> tuple[Any, Any]:
        weight = checkpoint.stored(f"{name}.weight")
        return weight.packed_OB.numpy(), weight.scales_OC.numpy()

    for part, own in zip(("values", "scales"), packed("model.layers.1.self_attn.q_proj"), strict=True):
        assert (tensors[f"model.layers.1.self_attn.q_proj.weight.{part}"] == own).all()
    for expert in range(6):
        gate, up, down = (packed(f"{block}.{expert}.{name}") for name in ("w1", "w3", "w2"))
        for index, part in enumerate(("values", "scales")):
            assert (tensors[f"{block}.down.{part}"][expert] == down[index]).all()
            both = tensors[f"{block}.gate_up.{part}"][expert]
            assert (both[::2] == gate[index]).all() and (both[1::2] == up[index]).all()


def test_perplexity_of_the_demo_model_in_few_bits(tmp_path: Path) -> None:
    """Perplexity is within 1 % of float32 with 8 bits and within 5 % with 4. Sizes are those of blocks of 32."""
    text = ["--samples", "8", "--sequence-length", "256"]
    whole = run(tmp_path, "evaluate", "demo", "--dtype", "float32", *text)["value"]
    for precision, bits, most in (("int8", 9, 1.01), ("int4", 5, 1.05)):
        out = str(tmp_path / precision)
        figures = run(tmp_path, "export", "demo", "--precision", precision, "-o", out)
        assert whole * 0.99 < run(tmp_path, "evaluate", out, *text)["value"] < whole * most
        config = Checkpoint(DEMO_DIRECTORY).config
        outer = config.vocabulary_size * config.hidden_size
        exact = sum(config.hidden_size * (experts + 2) for experts in config.experts_per_layer) + config.hidden_size
        tables = config.max_positions * config.head_dimension
        inner = figures["parameters"] - outer - exact
        assert figures["weights_bytes"] == outer * 9 // 8 + inner * bits // 8 + 4 * (exact + tables)


UNEVEN = {0: [1, 2, 3, 5], 1: [1, 2, 3, 4], 2: [0, 1, 3], 3: [1, 3, 4, 5, 7], 4: [2, 7], 5: [0, 1, 2, 4, 5, 7]}
"""Half of the demo model's 48 experts, as gate Fisher chooses them."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of the demo model with half of its experts (`half`), and its onnxruntime-genai form (`genai`)."""
    path = tmp_path_factory.mktemp("genai")
    (path / "half").mkdir()
    apply(pruning_plan(UNEVEN), Checkpoint(DEMO_DIRECTORY), path / "half")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_DIRECTORY / name, path / "half")
    return path


@pytest.mark.parametrize("skip_threshold", [0.0, 1.0])
def test_onnxruntime_genai_generates_the_engines_tokens(half: Path, tmp_path: Path, skip_threshold: float) -> None:
    """The test generates 64 greedy tokens, with a cache that is read and written in the same memory."""
    import onnxruntime_genai

    counts = [len(kept) for kept in UNEVEN.values()]
    ranks = [min(2, count) - 1 for count in counts]
    tables = [torch.ones(count, count) for count in counts]
    SkipTables(tuple(torch.full((rank,), 0.5) for rank in ranks), tuple(tables)).save(half / "half" / FILE_NAME)
    out = tmp_path / "genai"
    export(ExportOptions(model=str(half / "half"), output=out, format="onnx-genai", skip_threshold=skip_threshold))
    engine = Engine.open(half / "half", dtype="float32", skip_threshold=skip_threshold)
    prompt = "def main():\n    "
    ids = engine.encode(prompt)
    (expected,) = engine.generate(prompt, max_new_tokens=64)
    assert len(expected.token_ids) == 64 and len(set(expected.token_ids)) > 8
    if skip_threshold:
        assert engine.report().experts_skipped_share > 0.05
    model = onnxruntime_genai.Model(str(out))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + 64)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    assert generator.get_sequence(0).tolist() == [*ids, *expected.token_ids]
    (again,) = Engine.open(out).generate(prompt, max_new_tokens=64)
    assert again == expected, "our engine runs the same directory"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"experts": "portable"}, OptionError, "leave out --experts portable"),
        ({"model": "{here}/narrow"}, UnsupportedError, "its heads have 8 dimensions"),
    ],
)
def test_what_onnxruntime_genai_cannot_run_is_refused(
    place: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    save_reference("mixtral", place / "narrow")
    filled = {key: value.format(here=place) for key, value in changes.items()}
    with pytest.raises(error, match=message):
        export(options(place, **{"output": tmp_path / "out", "format": "onnx-genai"} | filled))
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.options.export.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"an export needs onnx and onnxruntime; .*moe-compress\[onnx\]"):
        options(place)


def test_a_graph_that_differs_is_removed_and_the_step_is_named(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The decoder's graph has another epsilon in its norms."""
    import engine.onnx.decoder

    write = engine.onnx.decoder.write_decoder

    def write_wrong(checkpoint: Checkpoint, *arguments: Any, **keywords: Any) -> Any:
        from dataclasses import replace

        wrong = Checkpoint(checkpoint.directory)
        wrong.config = replace(checkpoint.config, norm_epsilon=0.1)
        return write(wrong, *arguments, **keywords)

    monkeypatch.setattr(engine.onnx.decoder, "write_decoder", write_wrong)
    with pytest.raises(ExportError, match=r"output logits at prefill of a random prompt of 1 tokens is off by .* removed"):
        export(options(place, output=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_cache_that_is_wrong_is_found_at_a_step(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Forgotten keys do not show in a prefill."""
    from engine.onnx.runtime import OnnxDecoder

    logits = OnnxDecoder._logits

    def forgetful(self: OnnxDecoder, tokens_BL: Any, real_BP: Any, cache: Any, keep: int) -> Any:
        if cache.length:
            cache.stored.keys[1][:, :, 0] = 0.0
        return logits(self, tokens_BL, real_BP, cache, keep)

    monkeypatch.setattr(OnnxDecoder, "_logits", forgetful)
    with pytest.raises(ExportError, match="output logits at step 1 of a random prompt of 1 tokens"):
        export(options(place, output=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_an_altered_export_is_refused_with_checksums(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "onnx", tmp_path / "onnx")
    data = tmp_path / "onnx" / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.onnx\.data: checksum differs"):
        Engine.open(tmp_path / "onnx", checksums=True)
    data.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"model\.onnx\.data: has \d+ bytes, was written with"):
        Engine.open(tmp_path / "onnx")


def test_a_damaged_graph_is_refused_in_one_line(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "onnx", tmp_path / "onnx")
    (tmp_path / "onnx" / "compression.json").unlink()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=r"model\.onnx: onnxruntime cannot load it"):
        Engine.open(tmp_path / "onnx")


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"vocab_size": 270}])
def test_a_graph_of_another_model_is_refused(place: Path, tmp_path: Path, changes: dict[str, int]) -> None:
    shutil.copytree(place / "onnx", tmp_path / "onnx")
    (tmp_path / "onnx" / "compression.json").unlink()
    config = json.loads((tmp_path / "onnx" / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "block_configs"} | changes
    (tmp_path / "onnx" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="are not those of the model"):
        Engine.open(tmp_path / "onnx")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "gguf"}, OptionError, "format is 'gguf'; it must be"),
        ({"precision": "int3"}, OptionError, "precision is 'int3'; it must be"),
        ({"experts": "all"}, OptionError, "experts is 'all'; it must be moe or portable"),
        ({"precision": "int4", "experts": "portable"}, OptionError, "leave out --experts portable"),
        ({"skip_threshold": -1.0}, OptionError, "skip threshold is -1.0"),
        ({"output": Path("/proc/nowhere/out")}, OutputError, "cannot be"),
        ({"model": "{here}/onnx"}, UnsupportedError, "is an ONNX export"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    filled = {key: value.format(here=place) if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(error, match=message):
        export(options(place, **{"output": tmp_path / "out"} | filled))
    assert not list(tmp_path.iterdir())


def test_sizes_that_have_no_blocks_are_refused(tmp_path: Path) -> None:
    make_workplace(tmp_path, hidden_size=64, intermediate_size=40)
    with pytest.raises(UnsupportedError, match="expert width 40 is not a multiple"):
        export(ExportOptions(model=str(tmp_path / "model"), output=tmp_path / "out", precision="int8"))


def test_backends_that_do_not_fit_are_refused(place: Path) -> None:
    with pytest.raises(OptionError, match="runs exported models only"):
        Engine.open(place / "pruned", backend="onnx")
    with pytest.raises(UnsupportedError, match="is an ONNX export"):
        Engine.open(place / "onnx", backend="torch")
    with pytest.raises(OptionError, match="give the skip threshold to the export"):
        Engine.open(place / "onnx", skip_threshold=1.0)
    with pytest.raises(OptionError, match=r"was exported in torch\.float32"):
        Engine.open(place / "onnx", dtype="bfloat16")
    with pytest.raises(OptionError, match="runs on the cpu"):
        Engine.open(place / "onnx", device="cuda")


def test_an_existing_result_is_replaced_only_when_asked(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "onnx", tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        export(options(place, output=tmp_path / "out"))
    export(options(place, output=tmp_path / "out", overwrite=True, experts="portable"))
    provenance = read_provenance(tmp_path / "out")
    assert provenance is not None and provenance["figures"]["experts"] == "portable"
