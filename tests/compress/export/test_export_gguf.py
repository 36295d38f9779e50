"""`compress export --format gguf`: files that hold the model's own numbers, in the form that llama.cpp reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from artifacts_for_tests import make_pruned, make_workplace
from click.testing import CliRunner
from conftest import others_slow, save_reference
from family_matrix import own_logits
from float_models_for_tests import save_mxfp4, save_nvfp4
from gguf_for_tests import write_gguf
from gguf_models_for_tests import ARCHITECTURES, FURTHER_SIZES, QUICK, gguf_metadata, gguf_tensors
from safetensors.torch import load_file, save_file

import cli
from compress.export import gguf as exporting
from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.plans.apply import apply
from compress.plans.mixed_model import write_mixed_widths
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import writer
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import CheckpointError, CompressError, ExportError, OptionError, OutputError, UnsupportedError
from engine.families.experts import DOWN, GATE, UP
from engine.families.tensor_names import expert_tensor
from engine.files.gguf_file import GgufFile

SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "olmoe": {"num_key_value_heads": 4},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    **FURTHER_SIZES,
}
"""Sizes that llama.cpp has, where those of the tiny models are others."""
ALIGNED = {"hidden_size": 64, "intermediate_size": 64}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 32}
TEXTS = ("The quick brown fox, don't!", "héllo\n\n  12345 🚀", "<s>a</s>", "")


def make(tmp_path: Path, family: str = "mixtral", **sizes: Any) -> Checkpoint:
    save_reference(family, tmp_path / "model", **SIZES.get(family, {}) | sizes)
    return Checkpoint(tmp_path / "model")


def in_bfloat16(directory: Path) -> Checkpoint:
    path = directory / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    return Checkpoint(directory)


def written(tmp_path: Path, **changes: Any) -> Checkpoint:
    given = {"model": str(tmp_path / "model"), "output": tmp_path / "m.gguf"} | changes
    export_gguf(GgufExportOptions(**given))
    return Checkpoint(given["output"])


@pytest.mark.parametrize("family", others_slow(ARCHITECTURES, *QUICK))
def test_a_file_in_bfloat16_gives_the_logits_of_the_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    own = in_bfloat16(tmp_path / "model")
    read = written(tmp_path)
    assert torch.equal(own_logits(read), own_logits(own))
    assert all(torch.equal(read.tensor(name), own.tensor(name).to(read.dtype(name))) for name in own.shapes)


@pytest.mark.parametrize("family", others_slow(ARCHITECTURES, *QUICK))
def test_names_and_hyperparameters_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    own = make(tmp_path, family)
    file = GgufFile(written(tmp_path, type="f32").directory)
    expected = {name: tensor.float() for name, tensor in gguf_tensors(own).items()}
    assert file.entries.keys() == expected.keys()
    assert all(torch.equal(file.tensor(name).view(tensor.shape), tensor) for name, tensor in expected.items())
    said = {key: value for key, value in gguf_metadata(own).items() if value not in ("none", 8)}
    for key, value in said.items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key
        assert type(file.metadata[key]) is type(value), key


@pytest.mark.parametrize(
    ("family", "type_"), [*(("mixtral", each) for each in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")), ("deepseek_v2", "q8_0")]
)
def test_blocks_are_those_of_the_package_gguf(family: str, type_: str, tmp_path: Path) -> None:
    """Routers, norms and biases stay in float32, and the head of a low-bit file has eight bits."""
    own = make(tmp_path, family, **ALIGNED, **(LATENT if family == "deepseek_v2" else {}))
    file = GgufFile(written(tmp_path, type=type_).directory)
    kinds = {tensor.type.name for tensor in file.tensors.values()}
    assert kinds == {type_.upper(), "Q8_0", "F32"}
    for name, tensor in gguf_tensors(own).items():
        kind = gguf.GGMLQuantizationType[file.tensors[name].type.name]
        assert bytes(file.raw(name)) == gguf.quants.quantize(tensor.float().numpy(), kind).tobytes()
        is_kept = any(part in name for part in ("_norm", "_inp", "bias"))
        assert file.tensors[name].type.name == ("F32" if is_kept else "Q8_0" if name == "output.weight" else type_.upper())
    assert file.metadata["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{type_.upper()}"]


@pytest.mark.parametrize(
    "type_", ["q4_k", *(pytest.param(each, marks=pytest.mark.slow) for each in ("q2_k", "q3_k", "q5_k_m", "q6_k"))]
)
def test_k_types_are_read_as_written(type_: str, tmp_path: Path) -> None:
    """The logits are compared when the file is written; the weights are close to the model's."""
    own = make(tmp_path, **dict.fromkeys(ALIGNED, 256), vocab_size=32)
    read = written(tmp_path, type=type_)
    assert read.gguf is not None and f"{type_[:4].upper()}" in read.gguf.block_types
    for name in own.shapes:
        off, whole = read.tensor(name, torch.float32) - own.tensor(name), own.tensor(name).float()
        assert float(off.square().mean()) <= 0.1 * float(whole.square().mean()) + 1e-12


def test_rows_that_blocks_do_not_divide_are_in_float16(tmp_path: Path) -> None:
    make(tmp_path, intermediate_size=48)
    file = GgufFile(written(tmp_path, type="q4_0").directory)
    assert file.tensors["blk.0.ffn_down_exps.weight"].type.name == "F16"
    assert file.tensors["blk.0.ffn_up_exps.weight"].type.name == "Q4_0"


def test_one_expert_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, num_local_experts=40, vocab_size=8)
    whole, sizes = writer.encoded, list[int]()

    def counted(numbers: torch.Tensor, *others: Any) -> Any:
        sizes.append(numbers.numel())
        return whole(numbers, *others)

    monkeypatch.setattr(writer, "encoded", counted)
    written(tmp_path, type="f32")
    assert max(sizes) == 32 * 48


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, which has a tokenizer, and `pruned`, whose layers differ."""
    path = tmp_path_factory.mktemp("gguf-export")
    make_workplace(path)
    make_pruned(path)
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, arguments, catch_exceptions=False)


def test_the_command_writes_one_file_with_its_tokenizer(workplace: Path, tmp_path: Path) -> None:
    output, own = tmp_path / "m.gguf", load_tokenizer(Checkpoint(workplace / "model"))
    done = run("export", str(workplace / "model"), "--format", "gguf", "--type", "q8_0", "-o", str(output), "--json")
    figures = json.loads(done.stdout)
    assert figures["artifact"] == str(output) and figures["bytes"] == output.stat().st_size
    assert figures["type"] == "q8_0" and figures["tokenizer_problem"] is None
    assert figures["max_abs_logit_difference"] <= 1e-4
    read = load_tokenizer(Checkpoint(output))
    assert [read(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]
    assert GgufFile(output).metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("type_", ["bf16", "q8_0"])
def test_a_file_that_is_exported_again_stays_as_it_is(type_: str, workplace: Path, tmp_path: Path) -> None:
    first, then = tmp_path / "m.gguf", tmp_path / "again" / "m.gguf"
    then.parent.mkdir()
    for model, output in ((workplace / "model", first), (first, then)):
        export_gguf(GgufExportOptions(model=str(model), output=output, type=type_))
    one, other = GgufFile(first), GgufFile(then)
    assert one.metadata.keys() == other.metadata.keys()
    assert [key for key in one.metadata if one.metadata[key] != other.metadata[key]] == ["general.name"]
    assert one.entries.keys() == other.entries.keys()
    assert all(bytes(one.raw(name)) == bytes(other.raw(name)) for name in one.entries)


def test_a_tokenizer_without_a_name_in_gguf_is_left_out_and_said(tmp_path: Path) -> None:
    make(tmp_path, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((DEMO_DIRECTORY / name).read_bytes())
    figures = export_gguf(GgufExportOptions(model=str(tmp_path / "model"), output=tmp_path / "m.gguf"))
    assert "no name in GGUF files" in figures["tokenizer_problem"]
    assert GgufFile(tmp_path / "m.gguf").metadata["tokenizer.ggml.model"] == "none"


def normalized(workplace: Path, directory: Path, normalizer: Any, config: dict[str, Any] | None = None) -> Path:
    """Make a copy of the workplace's model whose tokenizer has a normalizer, and return its directory."""
    shutil.copytree(workplace / "model", directory)
    for name, changes in (("tokenizer.json", {"normalizer": normalizer}), ("config.json", config or {})):
        (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | changes))
    return directory


@pytest.mark.parametrize("normalizer", [{"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}])
def test_normalization_by_nfc_is_kept_in_the_name(normalizer: Any, workplace: Path, tmp_path: Path) -> None:
    own = load_tokenizer(Checkpoint(normalized(workplace, tmp_path / "model", normalizer)))
    read = written(tmp_path)
    assert GgufFile(read.directory).metadata["tokenizer.ggml.pre"] == "olmo"
    assert load_tokenizer(read)("e\u0301")["input_ids"] == own("e\u0301")["input_ids"] == own("\u00e9")["input_ids"]


def test_a_tokenizer_that_normalizes_otherwise_is_left_out(workplace: Path, tmp_path: Path) -> None:
    directory = normalized(workplace, tmp_path / "model", {"type": "Lowercase"})
    figures = export_gguf(GgufExportOptions(model=str(directory), output=tmp_path / "m.gguf"))
    assert "Lowercase" in figures["tokenizer_problem"]
    assert GgufFile(tmp_path / "m.gguf").metadata["tokenizer.ggml.model"] == "none"


def test_ids_that_stand_for_no_token_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, eos_token_id=[-1, 7], pad_token_id=-1, bos_token_id=-1)
    metadata = GgufFile(written(tmp_path).directory).metadata
    ids = {key: value for key, value in metadata.items() if key.endswith("_token_id")}
    assert ids == {"tokenizer.ggml.eos_token_id": 7}


def test_a_file_whose_tokenizer_is_not_known_is_exported_without_it(workplace: Path, tmp_path: Path) -> None:
    own = Checkpoint(workplace / "model")
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard-of", "tokenizer.ggml.tokens": ["a", "b"]}
    first = write_gguf(tmp_path / "first.gguf", gguf_metadata(own) | vocabulary | ids, gguf_tensors(own))
    figures = export_gguf(GgufExportOptions(model=str(first), output=tmp_path / "m.gguf"))
    assert figures["tokenizer_problem"].startswith(f"{first}: tokenizer.ggml.pre is 'unheard-of'")
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "none" and ids.items() <= metadata.items()


def test_sentencepiece_merges_become_scores(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    special, pieces = ["<unk>", "<s>", "</s>"], ["▁", "t", "h", "e", "a", "n"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("a", "n"), ("▁", "an"), ("h", "e")]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make(tmp_path, vocab_size=280, pad_token_id=None)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "model")
    own, read = load_tokenizer(Checkpoint(tmp_path / "model")), load_tokenizer(written(tmp_path))
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    for text in ("the than an he", "héllo", "", " the"):
        assert read(text)["input_ids"] == own(text)["input_ids"]


def non_uniform(tmp_path: Path) -> None:
    checkpoint = make(tmp_path)
    (tmp_path / "model").rename(tmp_path / "full")
    (tmp_path / "model").mkdir()
    kept = {0: [0, 1], 1: [0, 1, 2], 2: [3, 4, 5]}
    apply(pruning_plan(kept), Checkpoint(tmp_path / "full"), tmp_path / "model")
    assert checkpoint.config.moe_layers == (0, 1, 2)


REFUSED: list[tuple[Any, dict[str, Any], type[CompressError], str]] = [
    (make, {"type": "iq4_xs"}, OptionError, "'iq4_xs' is not written; take one of bf16, .*llama-quantize"),
    (make, {"output": Path("m.bin")}, OptionError, r"ends in \.gguf"),
    (non_uniform, {}, UnsupportedError, r"several numbers of experts \(2, 3\).*--uniform"),
    (lambda path: make(path, "phimoe"), {}, UnsupportedError, "a phimoe is not written as GGUF; written are mixtral"),
    (lambda path: make(path, sliding_window=8), {}, UnsupportedError, "cannot say its layers"),
    (lambda path: make(path, "olmoe", num_key_value_heads=2), {}, UnsupportedError, "share key heads"),
    (
        lambda path: make(path, "deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2),
        {},
        UnsupportedError,
        "scores groups of experts",
    ),
    (
        lambda path: make(path, "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        {},
        UnsupportedError,
        "scaled by 'dynamic'",
    ),
]


@pytest.mark.parametrize(("prepare", "changes", "error", "says"), REFUSED, ids=[str(row[3])[:20] for row in REFUSED])
def test_what_a_file_cannot_say_is_refused_before_any_work(
    prepare: Any, changes: dict[str, Any], error: type[CompressError], says: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=says) as caught:
        written(tmp_path, **changes)
    assert "\n" not in str(caught.value) and sorted(tmp_path.iterdir()) == before


def test_numbers_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][3, 3] = 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"model: tensor output\.weight has .* too large for F16; write it as bf16"):
        written(tmp_path, type="f16")
    assert not list(tmp_path.glob("*m.gguf*"))


def test_divisors_of_frequencies_are_written(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own = make(tmp_path, rope_parameters=scaled | {"original_max_position_embeddings": 8192})
    read = written(tmp_path, type="f32")
    torch.testing.assert_close(own_logits(read), own_logits(own), rtol=1e-5, atol=1e-5)
    assert GgufFile(read.directory).tensors["rope_freqs.weight"].type.name == "F32"


@pytest.mark.parametrize("type_", ["bf16", "q8_0", "q4_0", "f32"])
def test_numbers_that_are_not_finite_are_damage(type_: str, tmp_path: Path) -> None:
    make(tmp_path, **ALIGNED)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.v_proj.weight"][3, 3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model: tensor blk\.0\.attn_v\.weight holds NaN or infinity; the model"):
        written(tmp_path, type=type_)
    assert not list(tmp_path.glob("*m.gguf*"))


@pytest.mark.parametrize("flag", ["-o", "--imatrix-output"])
def test_a_file_of_the_model_is_never_replaced(flag: str, workplace: Path, tmp_path: Path) -> None:
    path, link = tmp_path / "m.gguf", tmp_path / "link.gguf"
    export_gguf(GgufExportOptions(model=str(workplace / "model"), output=path))
    link.symlink_to(path)
    before, text = path.read_bytes(), ("--data", str(workplace / "model" / "tokenizer.json"), "--samples", "1")
    for output in (path, link):
        others = () if flag == "-o" else ("-o", str(tmp_path / "other.gguf"), *text)
        done = run("export", str(path), "--format", "gguf", flag, str(output), *others, "--overwrite")
        assert done.exit_code == 1 and "is a file of the model itself" in done.stderr
        assert path.read_bytes() == before and link.is_symlink() and not (tmp_path / "other.gguf").exists()


def test_an_existing_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    output = tmp_path / "m.gguf"
    output.write_text("earlier")
    with pytest.raises(OutputError, match="exists already"):
        written(tmp_path)
    right = writer.paired
    monkeypatch.setattr(writer, "paired", lambda rows, heads: rows)
    with pytest.raises(ExportError, match=r"m\.gguf: the file differs from the engine: .*it was removed") as caught:
        written(tmp_path, overwrite=True)
    assert "partial" not in str(caught.value)
    assert output.read_text() == "earlier" and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(writer, "paired", right)
    assert written(tmp_path, overwrite=True).config.moe_layers


def test_a_tokenizer_that_reads_otherwise_is_found(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = exporting.tokenizer_metadata
    changed = {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}
    monkeypatch.setattr(exporting, "tokenizer_metadata", lambda checkpoint: metadata(checkpoint) | changed)
    with pytest.raises(ExportError, match="its tokenizer gives the text"):
        written(tmp_path, model=str(workplace / "model"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--format", "gguf", "--precision", "int8"), "--precision is for ONNX graphs"),
        (("--format", "onnx", "--type", "q8_0"), "--type is for GGUF files"),
    ],
)
def test_options_of_the_other_format_are_refused(arguments: tuple[str, ...], says: str, workplace: Path) -> None:
    done = run("export", str(workplace / "model"), *arguments)
    assert done.exit_code == 1 and says in done.output


@pytest.mark.parametrize(("size", "types"), [(256, ("Q2_K", "Q3_K", "Q4_0")), (64, ("Q4_0", "Q4_0", "Q4_0"))])
def test_matrices_are_written_in_the_types_of_their_bits(size: int, types: tuple[str, ...], tmp_path: Path) -> None:
    """Rows that blocks of 256 do not divide get the next wider type. Weights of 4 bits keep their integers."""
    full = make(tmp_path, hidden_size=size, intermediate_size=size)
    places = {(layer, expert) for layer, count in full.config.experts_by_layer.items() for expert in range(count)}
    widths = {(*place, part): bits for place in places for part, bits in ((GATE, 2), (UP, 3), (DOWN, 4))}
    write_mixed_widths(full, tmp_path / "mixed", widths, others=8)
    mixed = Checkpoint(tmp_path / "mixed")
    figures = export_gguf(GgufExportOptions(model=str(mixed.directory), output=tmp_path / "m.gguf", type="stored"))
    read = GgufFile(tmp_path / "m.gguf")
    named = dict(zip(("gate", "up", "down"), types, strict=True)) | {"attn": "Q8_0"}
    for name, tensor in read.tensors.items():
        if name.startswith("blk.") and "norm" not in name and "gate_inp" not in name:
            part = "attn" if ".attn_" in name else name.split("ffn_")[1].split("_")[0]
            assert tensor.type.name == named[part], name
    back = Checkpoint(tmp_path / "m.gguf")
    down = expert_tensor(full.config.architecture, 0, 0, DOWN)
    assert torch.allclose(back.tensor(down, torch.float32), mixed.tensor(down, torch.float32), rtol=1e-3, atol=1e-6)
    for part, most in ((GATE, 0.2), (UP, 0.1)):
        name = expert_tensor(full.config.architecture, 1, 2, part)
        one, other = (each.tensor(name, torch.float32) for each in (back, mixed))
        assert float((one - other).norm() / other.norm()) < most
    assert figures["type"] == "stored"


def test_packed_floats_keep_their_numbers(tmp_path: Path) -> None:
    """GPT-OSS as published: blocks of MXFP4 hold the same numbers in both files, and everything else is bf16 or wider."""
    save_mxfp4(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"swiglu_limit": 7.0}))
    source = Checkpoint(tmp_path / "model")
    figures = export_gguf(GgufExportOptions(model=str(source.directory), output=tmp_path / "m.gguf", type="stored"))
    packed = {name for name, tensor in GgufFile(tmp_path / "m.gguf").tensors.items() if tensor.type.name == "MXFP4"}
    assert packed == {f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(3) for part in ("gate", "up", "down")}
    assert figures["tensors_by_type"].keys() == {"MXFP4", "BF16", "F32"}
    back = Checkpoint(tmp_path / "m.gguf")
    for part in (GATE, UP, DOWN):
        name = expert_tensor(source.config.architecture, 1, 2, part)
        assert torch.equal(back.tensor(name, torch.float32), source.tensor(name, torch.float32))


def test_nvfp4_is_no_mxfp4(tmp_path: Path) -> None:
    """Its numbers are in no type of a GGUF file, and `stored` rounds nothing."""
    save_nvfp4(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="has no low-bit weights"):
        export_gguf(GgufExportOptions(model=str(tmp_path / "model"), output=tmp_path / "m.gguf", type="stored"))


def test_a_stack_of_several_widths_is_refused_with_what_works(tmp_path: Path) -> None:
    full = make(tmp_path, **ALIGNED)
    write_mixed_widths(full, tmp_path / "mixed", {(0, 0, UP): 4, (0, 1, UP): 2})
    given = {"model": str(tmp_path / "mixed"), "output": tmp_path / "m.gguf"}
    with pytest.raises(UnsupportedError, match=r"blk.0.ffn_up_exps.weight stacks matrices of 2 bits and 4 bits and bf16"):
        export_gguf(GgufExportOptions(**given, type="stored"))
    assert not (tmp_path / "m.gguf").exists()
    assert export_gguf(GgufExportOptions(**given, type="q8_0"))["bytes"] > 0
    with pytest.raises(UnsupportedError, match="has no low-bit weights"):
        export_gguf(GgufExportOptions(model=str(full.directory), output=tmp_path / "m.gguf", type="stored", overwrite=True))
