"""Other files of a model directory: no code is run, no path leads outside, and only files that were written are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, PRUNE, kill_while_it_trains, make_workplace, refused, run
from classifiers_for_tests import classifier
from click.testing import CliRunner
from packages_for_tests import needs_lm_eval
from safetensors.torch import load_file, save_file
from shape import source_files
from test_encoder_decoder import make_model

import cli
from engine.checkpoint.artifact import compare_checksums, write_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.remote_code import own_class
from engine.errors import CheckpointError, CompressError, OptionError
from engine.files import model_files
from engine.files.mapped_file import SAMPLE_BYTES, SMALL_BYTES
from engine.files.safetensors_file import SafetensorsFile
from engine.transformers_models.classifier import ClassifierCheckpoint
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint
from engine.transformers_models.transformers_model import load_decoder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `model`, and `artifact` made from it, which has a file of model code."""
    path = tmp_path_factory.mktemp("made")
    make_workplace(path)
    arguments = ["prune", "model", "--plan", "plan.json", *CALIBRATION, "--evaluation-samples", "0", "-o", "artifact"]
    with chdir(path):
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy that may be damaged, as the working directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Code


def test_nothing_of_a_directory_is_run(place: Path) -> None:
    (place / "artifact" / "custom_generate").mkdir()
    (place / "artifact" / "custom_generate" / "generate.py").write_text(f"open({str(place / 'pwned')!r}, 'w')\n")
    entries = (
        ["bench", "artifact", "--backend", "transformers", "-p", "8", "-n", "2"],
        ["inspect", "artifact", "--checksums"],
    )
    for entry in (*entries, ["evaluate", "artifact", "--tasks", "arc_easy"], ["generate", "artifact", "-p", "the"]):
        refused(place, entry, "custom_generate", "is code")
    (place / "artifact" / "compression.json").unlink()  # without it, this is a plain checkpoint, which our own engine reads
    assert run("generate", "artifact", "-p", "the", "-n", "2")["generated_tokens"] == 2
    refused(place, entries[0], "custom_generate", "trust_remote_code")
    assert not (place / "pwned").exists()


def test_transformers_is_given_our_class_and_never_the_directorys_file(place: Path) -> None:
    checkpoint = Checkpoint(place / "artifact")
    theirs = load_decoder(checkpoint.directory, checkpoint.raw_config, torch.float32)
    assert type(theirs) is own_class(checkpoint.config.architecture)
    assert not any(name.startswith("transformers_modules") for name in type(theirs).__module__.split("."))
    with torch.no_grad():
        assert theirs(torch.arange(8)[None]).logits.isfinite().all()
    assert [layer.mlp.gate.weight.shape[0] for layer in theirs.model.layers] == [3, 5, 2]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_of_the_hub_are_refused(place: Path, key: str) -> None:
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: {"": "someone/kernel"}}))
    with pytest.raises(OptionError, match=f"{key}.*hub"):
        load_decoder(place / "model", {"model_type": "mixtral"})


def test_the_flag_is_passed_nowhere() -> None:
    for path in source_files():
        passed = [line for line in path.read_text().splitlines() if "trust_remote_code=" in line and '"' not in line]
        assert all("trust_remote_code=False" in line or "`" in line for line in passed), path


def test_a_classifier_with_code_is_refused(tmp_path: Path) -> None:
    classifier("bert", tmp_path)
    (tmp_path / "modeling_bert.py").write_text("raise SystemExit('ran')")
    with pytest.raises(OptionError, match=r"modeling_bert\.py: is code"):
        ClassifierCheckpoint(tmp_path).load()


def test_a_classifier_far_larger_than_its_file_takes_no_memory(tmp_path: Path) -> None:
    classifier("bert", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 1 << 24, "hidden_size": 1 << 20}))
    with pytest.raises(CheckpointError, match=r"describes [0-9]+ numbers and the files hold"):
        ClassifierCheckpoint(tmp_path).load()


@pytest.mark.slow
@needs_lm_eval
def test_tasks_have_the_results_of_a_path(place: Path) -> None:
    import lm_eval

    (place / "rows.json").write_text(json.dumps([{"q": "the quick", "a": number % 2} for number in range(6)]))
    task = {"task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": str(place / "rows.json")}}
    task |= {"test_split": "train", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    task |= {"doc_to_choice": [" brown fox", " dog"], "metric_list": [{"metric": "acc"}]}
    (place / "own.yaml").write_text(json.dumps(task))
    ours = run("evaluate", "model", "--tasks", str(place / "own.yaml"))["value"]
    theirs = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(place / "model")}, tasks=[str(place / "own.yaml")], device="cpu"
    )["results"]
    assert ours == theirs


# Files that were not written


@pytest.mark.parametrize("name", ["notes.txt", "chat_template.jinja", "additional_chat_templates/default.jinja", ".hidden"])
def test_checksums_fail_on_what_is_not_listed(place: Path, name: str) -> None:
    (place / "artifact" / name).parent.mkdir(exist_ok=True)
    (place / "artifact" / name).write_text("x")
    refused(place, ["inspect", "artifact", "--checksums"], name, "is not part of this artifact")
    refused(place, ["generate", "artifact", "-p", "the", "--checksums"], name)
    assert run("inspect", "artifact")["valid"]


def test_what_clients_of_the_hub_leave_is_no_part_and_no_harm(place: Path) -> None:
    (place / "artifact" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    left = place / "artifact" / ".cache" / "huggingface" / "download"
    left.mkdir(parents=True)
    (left / "config.json.metadata").write_text("0\n")
    assert run("inspect", "artifact", "--checksums")["checksums_compared"]
    (left / "evil.pyc").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"evil\.pyc: is code"):
        compare_checksums(place / "artifact")
    (left / "evil.pyc").unlink()
    (place / "artifact" / ".gitattributes").unlink()
    (place / "artifact" / ".gitattributes").symlink_to("config.json")
    with pytest.raises(CheckpointError, match="gitattributes: is not part"):
        compare_checksums(place / "artifact")


def test_a_manifest_cannot_list_code(place: Path) -> None:
    (place / "artifact" / "evil.py").write_text("raise SystemExit('ran')")
    values = json.loads((place / "artifact" / "compression.json").read_text())
    write_provenance(place / "artifact", {key: value for key, value in values.items() if key != "files"})
    refused(place, ["inspect", "artifact", "--checksums"], "evil.py", "is code")


# Paths that lead outside


def decoder(path: Path) -> Callable[[], Any]:
    shutil.copytree("model", path, dirs_exist_ok=True)
    return lambda: Checkpoint(path)


def texts(path: Path) -> Callable[[], Any]:
    classifier("bert", path)
    return lambda: ClassifierCheckpoint(path)


def encoder_decoder(path: Path) -> Callable[[], Any]:
    make_model(path)
    return lambda: EncoderDecoderCheckpoint(path)


KINDS = (decoder, texts, encoder_decoder)
COMPANIONS = ("merges.txt", "preprocessor_config.json", "tokenizer.json", "config.json", "chat_template.jinja", "a/b.json")


@pytest.mark.parametrize("make", KINDS)
def test_no_file_links_out_of_a_directory(place: Path, make: Callable[[Path], Callable[[], Any]]) -> None:
    open_it = make(place / "own")
    (place / "secret").write_text("{}")
    for name in COMPANIONS:
        path, aside = place / "own" / name, place / "aside"
        path.parent.mkdir(exist_ok=True)
        there = path.exists() and path.rename(aside)
        for target in (place / "secret", place / "nothing"):
            path.symlink_to(target)
            with pytest.raises(CheckpointError, match="link leads out of the checkpoint directory"):
                open_it()
            path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="neither a regular file nor a directory"):
            open_it()
        path.unlink()
        if there:
            aside.rename(path)
    (place / "own" / "merges.txt").symlink_to("config.json")  # a link within the directory is allowed
    open_it()


def test_a_link_is_not_copied_into_a_result(place: Path) -> None:
    (place / "secret").write_text("#version: 0.2\n")
    (place / "model" / "merges.txt").symlink_to("../secret")
    refused(place, [*PRUNE, "-o", "out"], "merges.txt", "link leads out")


def test_links_of_the_hubs_cache_are_followed(place: Path) -> None:
    snapshot, blobs = place / "cache" / "snapshots" / "0", place / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (place / "model").iterdir():
        shutil.copy(path, blobs / f"of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/of-{path.name}")
    assert Checkpoint(snapshot).fingerprint() == Checkpoint(place / "model").fingerprint()
    shutil.copytree(snapshot, place / "cache" / "elsewhere" / "0", symlinks=True)
    with pytest.raises(CheckpointError, match="link leads out"):
        Checkpoint(place / "cache" / "elsewhere" / "0")


def test_so_many_entries_are_looked_at(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_ENTRIES", 20)
    for number in range(20):
        (place / "model" / f"{number}.log").touch()
    refused(place, ["inspect", "model"], "more than 20 files")


def test_names_with_line_ends_are_said_on_one_line(place: Path) -> None:
    (place / "model" / "a\nb").symlink_to("/etc/hostname")
    refused(place, ["inspect", "model"], "'a\\nb'", "link leads out")


# Identity of the model


def change(path: Path, name: str, edit: Callable[[torch.Tensor], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors[name])
    before = (path / "model.safetensors").stat()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    os.utime(path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_a_fingerprint_covers_experts_and_is_that_of_a_copy(place: Path) -> None:
    right = Checkpoint(place / "model")
    shutil.copytree(place / "model", place / "copy")
    os.utime(place / "copy" / "model.safetensors", ns=(1, 1))
    copy = Checkpoint(place / "copy")
    assert copy.fingerprint() == right.fingerprint()
    assert copy.identity()["state"] != right.identity()["state"]
    change(place / "copy", EXPERT, lambda tensor: tensor.zero_())
    assert Checkpoint(place / "copy").fingerprint() != right.fingerprint()


def test_samples_lie_within_their_tensors(tmp_path: Path) -> None:
    sizes = {"small": SMALL_BYTES, "large": SMALL_BYTES + 1, "larger": 1 << 20, "none": 0}
    tensors = {name: torch.randint(0, 255, (size,), dtype=torch.uint8) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    samples = dict(SafetensorsFile(tmp_path / "x.safetensors").samples())
    assert {name: len(sample) for name, sample in samples.items()} == {
        "small": SMALL_BYTES,
        "large": SAMPLE_BYTES,
        "larger": SAMPLE_BYTES,
        "none": 0,
    }
    assert all(sample in tensors[name].numpy().tobytes() for name, sample in samples.items())


def test_an_encoder_decoders_fingerprint_covers_experts(tmp_path: Path) -> None:
    make_model(tmp_path)
    right = EncoderDecoderCheckpoint(tmp_path).fingerprint()
    name = next(name for name in load_file(tmp_path / "model.safetensors") if "expert_1.wi" in name)
    change(tmp_path, name, lambda tensor: tensor.zero_())
    assert EncoderDecoderCheckpoint(tmp_path).fingerprint() != right


def test_a_finished_run_is_not_resumed_for_other_weights(place: Path) -> None:
    command = [*PRUNE, "-o", "out"]
    run(*command)
    assert run(*command, "--resume")["experts_after"] == 9
    os.utime(place / "model" / "model.safetensors", ns=(1, 1))  # the same bytes, written again
    refused(place, [*command, "--resume"], "out", "exists already")
    change(place / "model", EXPERT, lambda tensor: tensor.zero_())
    refused(place, [*command, "--resume"], "out", "exists already")


def test_an_interrupted_run_is_not_resumed_for_other_weights(place: Path) -> None:
    command = ["distill", "--teacher", "model", "--student", "model", "--data", "text.txt", "--sequence-length", "16"]
    command += ["--samples", "4", "--steps", "4000", "--evaluation-samples", "0", "--save-every", "1", "-o", "out"]
    kill_while_it_trains(place, command)
    os.utime(place / "model" / "model.safetensors", ns=(1, 1))
    refused(place, [*command, "--resume"], "other options, model or text")


# Numbers and tokens


NUMBERS = (0, -1, 2**31, 10**30, 1.5, 1e300, "x", [], [[[1]]], {}, True)
SETTINGS = [
    *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "vocab_size", "eos_token_id"),
]


@pytest.mark.parametrize("key", SETTINGS)
def test_any_value_is_taken_or_refused(made: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(made / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    for value in NUMBERS:
        path.write_text(json.dumps(values | {key: value}))
        result = CliRunner().invoke(cli.main, ["inspect", str(tmp_path / "model")])
        assert result.exit_code in (0, 1) and isinstance(result.exception, SystemExit | None), (key, value, result)
        assert result.exit_code == 0 or result.stderr.count("\n") == 1, (key, value, result.stderr)


@pytest.mark.parametrize(
    ("file", "values", "says"),
    [
        ("generation_config.json", {"eos_token_id": 10**9}, "eos_token_id"),
        ("generation_config.json", {"pad_token_id": [1, 264]}, "pad_token_id"),
        ("config.json", {"bos_token_id": 264}, "bos_token_id"),
        ("config.json", {"head_dim": 2**31}, "head_dim"),
        ("config.json", {"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length"),
        ("tokenizer_config.json", {"model_max_length": []}, "model_max_length"),
    ],
)
def test_numbers_that_no_model_has(place: Path, file: str, values: dict[str, Any], says: str) -> None:
    path = place / "model" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    refused(place, ["generate", "model", "-p", "the", "-n", "1"], says)
    if file != "tokenizer_config.json":
        refused(place, ["inspect", "model"], says)


def test_a_classifier_whose_sizes_do_not_fit_is_refused(tmp_path: Path) -> None:
    classifier("bert", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for changes in ({"num_attention_heads": -1}, {"pad_token_id": 10**6}, {"hidden_size": 0}, {"vocab_size": "x"}):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(CompressError):
            ClassifierCheckpoint(tmp_path).load()
