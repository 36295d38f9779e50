"""Models from the hub and artifacts to it, against a stand-in of its HTTP interface: requests, messages and the cache."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from artifacts_for_tests import KEPT, PRUNE, make_workplace
from click.testing import CliRunner
from hub_for_tests import Hub, served
from safetensors.torch import load_file, save_file

import cli
from compress import prune, push
from engine.checkpoint import hub as reading
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.errors import CheckpointError, CompressError, HubError, OptionError
from engine.files.safetensors_file import INDEX_NAME
from engine.generation.generate import Engine
from engine.inspect import inspect

NAME = "ada/tiny"
# huggingface_hub's uploads over plain HTTP, without hf_xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workplace, and in `sharded` its model with a shard for each layer. The first and the last hold the rest."""
    directory = tmp_path_factory.mktemp("hub")
    make_workplace(directory)
    shutil.copytree(directory / "model", directory / "sharded")
    shard(directory / "sharded")
    return directory


def shard(directory: Path) -> None:
    """Cut model.safetensors into layer-0 … and ends.safetensors, with an index."""
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        layer = name.split(".")[2] if ".layers." in name else None
        shards.setdefault("ends.safetensors" if layer is None else f"layer-{layer}.safetensors", {})[name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a new hub with an empty cache and nobody logged in."""
    with served() as (hub, url):
        use(monkeypatch, url, tmp_path)
        yield hub
    forget()


def use(monkeypatch: pytest.MonkeyPatch, url: str, path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the environment of these tests sets
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    at_once = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    for module in ("file_download", "utils._http"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", at_once)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    forget()


def forget() -> None:
    """Reset the state of the process to that of a new one."""
    reading.fetch.cache_clear()
    reading.describe.cache_clear()


def run(*arguments: str, code: int = 0) -> Any:
    """Return a command's JSON, or the line that it ends with."""
    result = CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    if code == 0:
        return json.loads(result.stdout)
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert not any("Error" in each for each in before)
    return line


# Reading


@pytest.mark.parametrize("name", [NAME, f"{NAME}@{'0' * 40}"])
def test_a_cache_without_a_list_of_files_is_read_without_a_network(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases of huggingface_hub before lists of files were cached filled such caches."""
    from huggingface_hub import constants

    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place, commit = tmp_path / "cache" / "models--ada--tiny", "0" * 40
    shutil.copytree(made / "sharded", place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    assert resolve(name) == place / "snapshots" / commit
    forget()
    (place / "snapshots" / commit / "ends.safetensors").unlink()
    with pytest.raises(HubError, match="not all of the model is in the cache"):
        resolve(name)
    forget()


def test_only_safetensors_json_and_tokenizer_files_are_fetched(made: Path, hub: Hub) -> None:
    files = {path.name: path.read_bytes() for path in (made / "sharded").iterdir()}
    others = "pytorch_model.bin training_args.bin modeling_tiny.py README.md consolidated.safetensors model.onnx"
    below = "original/params.json original/consolidated.safetensors onnx/config.json"
    hub.add(NAME, files | dict.fromkeys(f"{others} {below}".split(), b"not to be had"))
    directory = resolve(NAME)
    assert hub.downloaded() == set(files) == {path.name for path in directory.iterdir()}
    assert Checkpoint(directory).fingerprint() == Checkpoint(made / "sharded").fingerprint()
    hub.forget()
    forget()
    assert resolve(NAME) == directory and not hub.downloads, "what is in the cache is not fetched again"


def test_of_several_shards_those_of_some_layers_are_fetched(made: Path, hub: Hub) -> None:
    hub.add(NAME, made / "sharded")
    reading.fetch(NAME, frozenset({1}))
    assert {name for name in hub.downloaded() if name.endswith(".safetensors")} == {"layer-1.safetensors"}
    reading.fetch(NAME, frozenset({1, 2}))
    assert [name for name, _ in hub.downloads if name.startswith("layer-")] == ["layer-1.safetensors", "layer-2.safetensors"]
    hub.forget()
    reading.fetch(NAME, frozenset())
    assert not hub.downloads


def test_a_shard_is_known_by_the_layers_of_its_tensors() -> None:
    shards = {
        "a": {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"},
        "b": {"model.layers.0.mlp.down.weight", "model.layers.10.mlp.down.weight"},
        "c": {"language_model.model.layers.1.norm.weight", "lm_head.weight"},
    }
    assert reading.shards_of(shards, {0}) == ["a", "b"]
    assert reading.shards_of(shards, {1}) == ["c"]
    assert reading.shards_of(shards, {10, 1}) == ["b", "c"]
    assert reading.shards_of(shards, ()) == []
    assert reading.shards_of({"model.safetensors": set()}, {5}) == ["model.safetensors"]


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1"])
def test_a_revision_is_an_option_or_part_of_the_id(made: Path, hub: Hub, tmp_path: Path, revision: str) -> None:
    hub.add(NAME, made / "model")
    make_workplace(tmp_path / "other", seed=1)
    hub.add(NAME, tmp_path / "other" / "model", revision)
    wanted = Checkpoint(tmp_path / "other" / "model").fingerprint()
    assert wanted != Checkpoint(resolve(NAME)).fingerprint()
    assert Checkpoint(resolve(f"{NAME}@{revision}")).fingerprint() == wanted
    given = ["generate", "-p", "the", "-n", "4"]
    assert run(*given, NAME, "--revision", revision)["text"] == run(*given, str(tmp_path / "other" / "model"))["text"]


def test_results_are_called_after_the_repository() -> None:
    assert reading.last_name("ada/tiny@refs/pr/1") == reading.last_name("ada/tiny") == "tiny"
    assert reading.last_name("./some/where@home") == "where@home"


def test_one_run_reads_one_commit(made: Path, hub: Hub) -> None:
    hub.add(NAME, made / "model")
    first = resolve(NAME)
    hub.add(NAME, made / "sharded")
    assert resolve(NAME) == first
    forget()
    assert resolve(NAME) != first


def test_a_broken_connection_is_taken_up_where_it_broke(made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000)
    hub.add(NAME, made / "model")
    hub.cut["model.safetensors"] = 50_000
    content = (resolve(NAME) / "model.safetensors").read_bytes()
    assert content == (made / "model" / "model.safetensors").read_bytes()
    assert [asked for name, asked in hub.downloads if name == "model.safetensors"] == [None, "bytes=50000-"]


def test_after_a_failure_only_what_is_missing_is_fetched(made: Path, hub: Hub) -> None:
    hub.add(NAME, made / "sharded")
    hub.broken.add("layer-1.safetensors")
    with pytest.raises(HubError, match="HTTP status 500"):
        resolve(NAME)
    before = hub.downloaded()
    assert "layer-1.safetensors" not in before
    hub.broken.clear()
    hub.forget()
    directory = resolve(NAME)
    assert "layer-1.safetensors" in hub.downloaded() and not hub.downloaded() & before
    Checkpoint(directory).check_finite()


# Headers only


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole files only"])
def test_inspect_fetches_config_and_headers(made: Path, hub: Hub, ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FIRST_BYTES", 500)  # less than a header here, so that a second request is needed
    hub.ranges = ranges
    hub.add(NAME, made / "sharded")
    found = run("inspect", NAME)
    assert found == inspect(str(made / "sharded"), checksums=False, progress=lambda each, _: each) | {"weights_read": False}
    weights = {path.name: path.stat().st_size for path in (made / "sharded").glob("*.safetensors")}
    assert hub.downloaded() == {"config.json", "generation_config.json", INDEX_NAME, *weights}
    if ranges:
        assert all(hub.sent[name] < size / 4 for name, size in weights.items() if name.startswith("layer-"))
    hub.forget()
    assert resolve(NAME).is_dir() and run("inspect", NAME)["weights_read"], "weights in the cache are read"


def test_a_tensor_that_was_not_fetched_is_not_zero_but_refused(made: Path, hub: Hub) -> None:
    hub.add(NAME, made / "sharded")
    with reading.outline(NAME) as (directory, shards):
        assert shards == {"ends.safetensors", *(f"layer-{layer}.safetensors" for layer in range(3))}
        checkpoint = Checkpoint(directory, shards)
        with pytest.raises(CheckpointError, match="only its header was fetched"):
            checkpoint.tensor("model.norm.weight")
    assert not directory.exists()


def test_a_shard_that_is_cut_on_the_hub_is_found_by_its_header(made: Path, hub: Hub) -> None:
    files = {path.name: path.read_bytes() for path in (made / "sharded").iterdir()}
    hub.add(NAME, files | {"layer-1.safetensors": files["layer-1.safetensors"][:-8]})
    line = run("inspect", NAME, code=1)
    assert f"{NAME}/layer-1.safetensors" in line and "8 bytes past the end" in line


# Messages


@pytest.mark.parametrize(
    ("model", "token", "fragment"),
    [
        ("ada/missing", None, "no such model on the hub, or it is private; check the name, or log in"),
        ("ada/missing", "writer", "no such model on the hub"),
        ("ada/private", None, "or it is private; check the name, or log in"),
        (f"{NAME}@v9", None, "no such revision"),
        ("ada/gated", "reader", "accept its terms at https://huggingface.co/ada/gated"),
        (NAME, "expired", "refuses the token"),
        ("ada/pickled", None, "only pickled weights"),
        ("ada/..", None, "no such directory"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_in_one_line(
    made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, model: str, token: str | None, fragment: str
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.add(NAME, made / "model")
    hub.add("ada/private", made / "model", private=True)
    hub.add("ada/gated", made / "model", gated=True)
    hub.add("ada/pickled", {"config.json": (made / "model" / "config.json").read_bytes(), "pytorch_model.bin": b"x"})
    line = run("generate", model, "-p", "the", code=1)
    assert line.startswith(f"Error: {model}: ") and fragment in line
    assert not any(name.endswith((".bin", ".safetensors")) for name in hub.downloaded())


def test_without_the_hub_what_is_in_the_cache_is_read(
    made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add(NAME, made / "sharded")
    reading.fetch(NAME, frozenset({0}))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        use(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path)
    assert "the hub cannot be reached, and not all of the model is in the cache" in run("inspect", "ada/other", code=1)
    assert "not all of the model is in the cache" in run("generate", NAME, "-p", "the", code=1)
    assert (reading.fetch(NAME, frozenset({0})) / "layer-0.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "revision", "fragment"),
    [
        ("demo", "main", "only those have a --revision"),
        (f"{NAME}@a", "b", "names revision a already"),
        (NAME, "a b", "'a b'"),
    ],
)
def test_a_revision_of_what_has_none_is_refused(model: str, revision: str, fragment: str) -> None:
    assert fragment in run("inspect", model, "--revision", revision, code=1)


# Writing


@pytest.fixture
def writer(hub: Hub, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return the hub for a user with write access, in a workplace of its own."""
    monkeypatch.setenv("HF_TOKEN", "writer")
    for name in ("model", "text.txt"):
        (shutil.copytree if name == "model" else shutil.copy)(made / name, tmp_path / name)
    (tmp_path / "plan.json").write_text(json.dumps({"schema_version": 1, "kind": "moe", "layers": KEPT}))
    monkeypatch.chdir(tmp_path)
    return hub


WITH_PLAN = ["prune", "model", "--plan", "plan.json", *PRUNE[6:]]


def contents(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.mark.usefixtures("pictures")
def test_what_is_pushed_runs_by_its_name_as_it_does_here(writer: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = run(*WITH_PLAN, "-o", "small", "--push-to-hub", "small")
    repository = writer.repositories["ada/small"]
    assert figures["pushed"]["repository"] == "ada/small" and figures["pushed"]["commit"] == repository.revisions["main"]
    assert not repository.private and len(repository.commits) == 2, "one commit beside that of the hub itself"
    files = contents("small")
    assert {name: data for name, data in repository.files.items() if name != ".gitattributes"} == files
    assert "modeling_compressed.py" in files and figures["pushed"]["bytes"] == sum(map(len, files.values()))
    assert writer.downloaded() == set()
    there, here = (Engine.open(model).generate(["the"], max_new_tokens=8)[0].text for model in ("ada/small", "small"))
    assert there == here
    assert writer.downloaded() == set(files)
    assert run("inspect", "ada/small", "--checksums")["provenance"]["figures"]["experts_per_layer"] == [3, 5, 2]


def test_code_that_is_not_ours_stays_on_the_hub(writer: Hub) -> None:
    run(*WITH_PLAN, "-o", "small")
    files = contents("small") | {"modeling_compressed.py": b"import os", "weights.bin": b"", "pytorch_model.bin": b""}
    writer.add("ada/changed", files)
    assert run("generate", "ada/changed", "-p", "the", "-n", "2")["generated_tokens"] == 2
    assert writer.downloaded() == set(files) - {"modeling_compressed.py", "weights.bin", "pytorch_model.bin"}
    assert run("inspect", "ada/changed", "--checksums")["checksums_compared"]


def test_a_repository_is_replaced_only_when_asked_and_then_whole(writer: Hub) -> None:
    run(*WITH_PLAN, "-o", "small", "--push-to-hub", "team/small", "--private")
    repository = writer.repositories["team/small"]
    assert repository.private
    first = repository.files
    run("merge", "model", "--experts", "2", *PRUNE[6:], "-o", "merged")
    (Path("merged") / "secret.txt").write_text("not of the artifact")
    assert "exists already" in run("push", "merged", "team/small", code=1)
    assert repository.files is first
    pushed = run("push", "merged", "team/small", "--overwrite")
    assert pushed["files"] == len(contents("merged")) - 1
    del (wanted := contents("merged"))["secret.txt"]
    assert {name: data for name, data in repository.files.items() if name != ".gitattributes"} == wanted
    assert len(repository.commits) == 3
    writer.add("ada/other", {"config.json": b"{}"})
    assert "holds something else" in run("push", "merged", "ada/other", "--overwrite", code=1)


@pytest.mark.parametrize(
    ("token", "repository", "fragment"),
    [
        (None, "small", "not logged in"),
        ("expired", "small", "refuses the token"),
        ("reader", "small", "may only read"),
        ("writer", "others/small", "does not belong to others; take a repository of ada, team"),
        ("writer", "no name", "write it owner/name"),
        ("writer", "a/b/c", "write it owner/name"),
        ("writer", "ada/small@v2", "leave out the @"),
        ("writer", "ada/taken", "exists already"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_any_work(
    writer: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None, repository: str, fragment: str
) -> None:
    writer.add("ada/taken", {"compression.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(prune, "prune", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr(push, "upload", lambda *_, **__: pytest.fail("work began"))
    assert fragment in run(*PRUNE, "-o", "small", "--push-to-hub", repository, code=1)
    assert fragment in run("push", "model", repository, code=1)
    assert writer.writes == 0 and not Path("small").exists()


def test_an_upload_that_fails_leaves_the_artifact_and_goes_on(writer: Hub) -> None:
    writer.broken.add("commit")
    line = run(*PRUNE, "-o", "small", "--push-to-hub", "small", code=1)
    assert "small is whole: `compress push small ada/small` goes on" in line
    assert set(writer.repositories["ada/small"].files) == {".gitattributes"}
    assert writer.uploads
    writer.broken.clear()
    writer.forget()
    run("push", "small", "ada/small")
    assert not writer.uploads, "what was uploaded before the failure is not uploaded again"
    assert contents("small").items() <= writer.repositories["ada/small"].files.items()


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "replaced"])
def test_of_two_pushes_at_once_the_second_changes_nothing(
    writer: Hub, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Another push comes between the check of the repository and the first write to it."""
    run(*WITH_PLAN, "-o", "small", *([] if is_new else ["--push-to-hub", "small"]))
    own, looks = push._check_replaced, []

    def meanwhile(*given: Any) -> None:
        own(*given)
        looks.append(given)
        if len(looks) == 2:
            writer.add("ada/small", {"compression.json": b"{}"})

    monkeypatch.setattr(push, "_check_replaced", meanwhile)
    assert "ada/small: something else was written there meanwhile" in run("push", "small", "small", "--overwrite", code=1)
    assert writer.repositories["ada/small"].files == {"compression.json": b"{}"}


def test_only_whole_artifacts_are_pushed(writer: Hub) -> None:
    run(*PRUNE, "-o", "small")
    with pytest.raises(CompressError, match="carry them"):
        push.push(Path("model"), "small", private=False, overwrite=False)
    with (Path("small") / "README.md").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="checksum differs"):
        push.push(Path("small"), "small", private=False, overwrite=False)
    with pytest.raises(OptionError, match="no such directory"):
        push.push(Path("nowhere"), "small", private=False, overwrite=False)
    assert writer.writes == 0


def test_a_sweep_is_not_pushed_as_one(writer: Hub) -> None:
    line = run("prune", "model", "--sparsity", "0.3,0.5", *PRUNE[4:], "--push-to-hub", "small", code=1)
    assert "--push-to-hub is for one artifact" in line and writer.writes == 0


def test_a_result_says_which_model_of_the_hub_it_comes_from(made: Path, writer: Hub) -> None:
    writer.add(NAME, made / "model", "v2")
    figures = run("prune", NAME, "--revision", "v2", *PRUNE[2:])
    assert figures["artifact"] == "tiny-frequency"
    assert "\nbase_model: ada/tiny\n" in (Path("tiny-frequency") / "README.md").read_text()
    assert json.loads((Path("tiny-frequency") / "compression.json").read_text())["source"]["model"] == f"{NAME}@v2"
