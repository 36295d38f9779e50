"""Models on the hub: what names one, which of its files are fetched, and what is said when the hub does not give them.

Fetched are safetensors, JSON and tokenizer files at the top of a repository, and of an artifact of ours also what its
compression.json lists in other formats that hold no code. Pickles never are, and of code only the modelling file that
this version writes itself, byte for byte, told by its hash before it is fetched.
"""

from __future__ import annotations

import functools
import glob
import re
import struct
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine.architectures import ARCHITECTURES
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.remote_code import FILE_NAME as MODELLING_FILE
from engine.checkpoint.remote_code import render
from engine.errors import CheckpointError, HubError, OptionError
from engine.files.json_file import load_json
from engine.files.safetensors_file import INDEX_NAME, MAX_HEADER_BYTES, PICKLES, SINGLE_NAME, indexed_shards

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
_DESCRIBING = ("config.json", "generation_config.json", "compression.json", INDEX_NAME, "skip_tables.safetensors")
_BESIDE_WEIGHTS = ("skip_tables.safetensors", "mixture.safetensors")
_OF_ARTIFACTS = (".json", ".safetensors", ".txt", ".model", ".jinja", ".md", ".png", ".onnx", ".data")
_FIRST_BYTES = 100_000  # of a shard: nearly every header is shorter, so one request gives it
_LENGTH = struct.Struct("<Q")
_CONNECTIONS = 8


def is_hub_id(model: str) -> bool:
    """Whether this is written as an id on the hub, `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(model) is not None


def split(model: str) -> tuple[str, str | None]:
    """An id's repository, and its revision: a branch, tag or commit; None for the main one."""
    found = _ID.fullmatch(model)
    if found is None:
        raise OptionError(f"{model}: is not an id on the hub; write it owner/name, or owner/name@revision")
    return found[1], found[2]


def at_revision(model: str, revision: str) -> str:
    """The id with its revision in it. Raises OptionError for what has none."""
    if not is_hub_id(model) or Path(model).exists():
        raise OptionError(f"{model}: is not an id on the hub, and only those have a --revision; leave it out")
    repository, own = split(model)
    if own is not None:
        raise OptionError(f"{model}: names revision {own} already; leave out --revision")
    if not is_hub_id(f"{repository}@{revision}"):
        raise OptionError(f"--revision is {revision!r}; give a branch, tag or commit")
    return f"{repository}@{revision}"


def last_name(model: str) -> str:
    """What results are called after: the name of a directory, or of a repository without its revision."""
    return Path(split(model)[0] if is_hub_id(model) and not Path(model).exists() else model).name


@functools.cache  # of one run: all that it reads is of one commit, whatever is pushed meanwhile
def fetch(model: str, layers: frozenset[int] | None = None) -> Path:
    """The directory in huggingface_hub's cache that MODEL is read from. What is there already is not fetched again.

    `layers`: of several shards fetch only those that hold tensors of these layers. A connection that breaks is taken up
    where it broke; a killed run leaves whole files, and the next one fetches the others. Raises HubError.
    """
    repository, revision = split(model)
    with explained(model):
        directory = _snapshot(repository, revision, _SMALL)
        listed = _listed(repository, directory)
        return _snapshot(repository, directory.name, map(glob.escape, _wanted(model, directory, listed, layers)))


@functools.cache
def describe(model: str) -> Path:
    """The same, with what says which model this is, and none of its weights."""
    repository, revision = split(model)
    with explained(model):
        return _snapshot(repository, revision, _DESCRIBING)


def lacks_weights(model: str) -> bool:
    """Whether some of MODEL's weights would have to be fetched."""
    directory = describe(model)
    return any(not (directory / name).exists() for name in _shards(directory))


@contextmanager
def outline(model: str) -> Iterator[tuple[Path, frozenset[str]]]:
    """A temporary directory that is like MODEL's, and the names of its shards, of which only the headers were fetched.

    Every other file that is not fetched has its size and no content, so that whatever is missing or cut is found.
    Raises HubError.
    """
    with TemporaryDirectory() as made:
        directory = Path(made)
        with explained(model):
            shards = _draw(split(model)[0], describe(model), directory)
        yield directory, shards


def _draw(repository: str, source: Path, directory: Path) -> frozenset[str]:
    """Fill an outline from the snapshot of what describes the model; the names of the shards."""
    listed = _listed(repository, source)
    shards = frozenset(name for name in _shards(source) if name in listed)
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        headers = dict(zip(shards, pool.map(lambda name: _header(repository, source.name, name), shards), strict=True))
    for name, file in listed.items():
        if name not in shards and (source / name).exists():
            copyfile(source / name, directory / name)
            continue
        with (directory / name).open("wb") as made:
            made.write(headers.get(name, b""))
            made.truncate(file.size)  # no disk is taken for what is not there
    return shards


def _snapshot(repository: str, revision: str | None, patterns: Collection[str] | Iterator[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetched = functools.partial(
        snapshot_download, repository, revision=revision, allow_patterns=list(patterns), ignore_patterns="*/*"
    )
    if revision is not None and _COMMIT.fullmatch(revision):
        # huggingface_hub would ask the hub about a commit in several threads first, which lose their errors.
        with suppress(LocalEntryNotFoundError):
            directory = Path(fetched(local_files_only=True))
            if _listed(repository, directory):
                return directory
        HfApi().model_info(repository, revision=revision)  # raises what is the matter, once and in one thread
    return Path(fetched())


def _listed(repository: str, directory: Path) -> dict[str, RepoFile]:
    """What the repository holds at its top, by name, without asking again."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(repository, revision=directory.name)
    except CachedRepoTreeNotFoundError:  # what is in the cache was fetched by an older release
        return {}
    return {file.path: file for file in files if Path(file.path).name == file.path}


def _shards(directory: Path) -> dict[str, set[str]]:
    """The files of weights, each with the names of its tensors; none where there is no index to tell them."""
    return indexed_shards(directory) if (directory / INDEX_NAME).exists() else {SINGLE_NAME: set()}


def shards_of(shards: dict[str, set[str]], layers: Collection[int]) -> list[str]:
    """Those shards that hold tensors of these layers; one without a list of its tensors may hold any."""

    def holds(names: set[str]) -> bool:
        found = map(_LAYER.search, names)
        return not names or any(match is not None and int(match[1]) in layers for match in found)

    return [name for name, names in shards.items() if layers and holds(names)]


def _wanted(model: str, directory: Path, listed: dict[str, RepoFile], layers: Collection[int] | None) -> list[str]:
    """What else is fetched when the small files are there. Raises CheckpointError where that is no weights at all."""
    shards = _shards(directory)
    weights = list(shards) if layers is None else shards_of(shards, layers)
    provenance = read_provenance(directory)
    if provenance is None:
        if listed and not any(name in listed for name in shards) and any(name.endswith(PICKLES) for name in listed):
            raise CheckpointError(
                f"{model}: the hub has its weights pickled only, and these are never fetched since they can run code; take "
                "a revision with safetensors (--revision refs/pr/N), or another copy of the model"
            )
        return [*weights, *_BESIDE_WEIGHTS]
    files = [name for name in provenance["files"] if name.endswith(_OF_ARTIFACTS) and name not in shards]
    return [*weights, *files, *([MODELLING_FILE] if _is_ours(directory, listed.get(MODELLING_FILE)) else [])]


def _is_ours(directory: Path, file: RepoFile | None) -> bool:
    """Whether a modelling file that was not fetched is, byte for byte, the one that this version writes."""
    from huggingface_hub.utils.sha import git_hash

    row = ARCHITECTURES.get(str(load_json(directory / "config.json", "model config").get("model_type")))
    return file is not None and row is not None and file.blob_id == git_hash(render(row).encode())


def _header(repository: str, commit: str, name: str) -> bytes:
    """The beginning of a safetensors file with all of its header; less where that is damaged."""
    beginning = _beginning(repository, commit, name, _FIRST_BYTES)
    if len(beginning) < _LENGTH.size:
        return beginning
    (length,) = _LENGTH.unpack_from(beginning)
    end = _LENGTH.size + min(length, MAX_HEADER_BYTES)
    return (beginning if end <= len(beginning) else _beginning(repository, commit, name, end))[:end]


def _beginning(repository: str, commit: str, name: str, count: int) -> bytes:
    """So many bytes, also of a server that sends the whole file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    found = bytearray()
    with http_stream_backoff("GET", hf_hub_url(repository, name, revision=commit), headers=headers) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            found += chunk
            if len(found) >= count:
                break
    return bytes(found[:count])


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Around what asks the hub about MODEL: whatever goes wrong there becomes a HubError that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty():
        disable_progress_bars()  # its bars are for people, as ours are
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(f"{model}: {_explanation(model, error)}") from error


def _explanation(model: str, error: BaseException) -> str:
    from httpx2 import ConnectError, HTTPError, TimeoutException
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        where = f"https://huggingface.co/{model.partition('@')[0]}"
        return f"is gated; accept its terms at {where}, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such directory here, and no such model on the hub, or it is private; check the name, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has no such revision; give a branch, tag or commit of the model"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return "cannot be an id on the hub; write it owner/name"
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error.response.status_code)
    if isinstance(error.__cause__, errors.HfHubHTTPError):
        return _explanation(model, error.__cause__)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectError | TimeoutException):
        return (
            "no such directory here, the hub cannot be reached, and not all of the model is in the cache; check the network "
            "(and HF_HUB_OFFLINE), or give a directory"
        )
    if isinstance(error, HTTPError | RuntimeError):  # RuntimeError: of threads that shared the connection
        return "the connection to the hub broke; run the command again, which goes on with the files that are missing"
    reason = (isinstance(error, OSError) and error.strerror) or next(iter(str(error).splitlines()), "")
    return (
        f"cannot be exchanged with the hub ({reason or type(error).__name__}); make space if a disk is full, and try again"
    )


def _refusal(status: int) -> str:
    """What an HTTP status means, and what to do."""
    if status == 401:
        return "the hub refuses the token; log in again with `hf auth login`, or correct HF_TOKEN"
    if status == 403:
        return "the hub does not let this token do that; give it the right (https://huggingface.co/settings/tokens)"
    if status in (409, 412):
        return "something else was written there meanwhile; look at the repository, and run the command again"
    if status == 429:
        return "the hub wants fewer requests; wait some minutes, or log in with `hf auth login`"
    return f"the hub answers with HTTP status {status}; try again later"
