"""Models on the Hugging Face Hub: model ids, downloads, and error messages.

Downloaded files are the safetensors, JSON and tokenizer files at the top of a repository. For an artifact of this
project, the files listed in its compression.json are downloaded too if their formats hold no code. Pickle files are
never downloaded. The only code that is downloaded is a modeling file identical, byte for byte, to the one that this
version writes; its hash is compared before the download.
"""

from __future__ import annotations

import functools
import glob
import re
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.remote_code import FILE_NAME as MODELLING_FILE
from engine.checkpoint.remote_code import source_of
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
_FIRST_BYTES = 100_000  # start of a shard: nearly every header is shorter, so one request is enough
_LENGTH = struct.Struct("<Q")
_CONNECTIONS = 8


def is_hub_id(model: str) -> bool:
    """Return whether `model` is written as an id on the hub, `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(model) is not None


def split(model: str) -> tuple[str, str | None]:
    """Return an id's repository and its revision (a branch, tag or commit; None for the main branch)."""
    found = _ID.fullmatch(model)
    if found is None:
        raise OptionError(f"{model}: is not an id on the hub; write it owner/name, or owner/name@revision")
    return found[1], found[2]


def at_revision(model: str, revision: str) -> str:
    """Return the id with its revision. Raises OptionError for a model that cannot have a revision."""
    if not is_hub_id(model) or Path(model).exists():
        raise OptionError(f"{model}: is not an id on the hub, and only those have a --revision; leave it out")
    repository, own = split(model)
    if own is not None:
        raise OptionError(f"{model}: names revision {own} already; leave out --revision")
    if not is_hub_id(f"{repository}@{revision}"):
        raise OptionError(f"--revision is {revision!r}; give a branch, tag or commit")
    return f"{repository}@{revision}"


def last_name(model: str) -> str:
    """Return the name for results: the name of a directory, or of a repository without its revision."""
    return Path(split(model)[0] if is_hub_id(model) and not Path(model).exists() else model).name


@functools.cache  # for one run: everything is read from one commit, even if the repository changes meanwhile
def fetch(model: str, layers: frozenset[int] | None = None) -> Path:
    """Return the directory of MODEL in huggingface_hub's cache, downloading the files that are missing there.

    `layers`: download only the shards that hold tensors of these layers. An interrupted download is resumed; a killed
    run leaves only complete files, and the next run downloads the others. Raises HubError.
    """
    repository, revision = split(model)
    with explained(model):
        directory = _snapshot(repository, revision, _SMALL)
        listed = _listed(repository, directory)
        return _snapshot(repository, directory.name, map(glob.escape, _wanted(model, directory, listed, layers)))


@functools.cache
def describe(model: str) -> Path:
    """Return the directory of MODEL in the cache with the files that describe it, without weights. Raises HubError."""
    repository, revision = split(model)
    with explained(model):
        return _snapshot(repository, revision, _DESCRIBING)


def lacks_weights(model: str) -> bool:
    """Return whether some of MODEL's weights are not in the cache."""
    directory = describe(model)
    return any(not (directory / name).exists() for name in _shards(directory))


@contextmanager
def outline(model: str) -> Iterator[tuple[Path, frozenset[str]]]:
    """Yield a temporary copy of MODEL's directory, and the names of its shards, whose headers alone are downloaded.

    Every other file that is not downloaded has its full size and no content, so that missing or truncated files are
    found. Raises HubError.
    """
    with TemporaryDirectory() as made:
        directory = Path(made)
        with explained(model):
            shards = _draw(split(model)[0], describe(model), directory)
        yield directory, shards


def _draw(repository: str, source: Path, directory: Path) -> frozenset[str]:
    """Fill an outline from the snapshot of the describing files, and return the names of the shards."""
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
            made.truncate(file.size)  # a sparse file: the missing content takes no disk space
    return shards


def _snapshot(repository: str, revision: str | None, patterns: Iterable[str]) -> Path:
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = list(patterns)
    fetched = functools.partial(
        snapshot_download, repository, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"
    )
    if revision is not None and _COMMIT.fullmatch(revision):
        # huggingface_hub would first query a commit in several threads, which lose their errors.
        with suppress(LocalEntryNotFoundError):
            directory = Path(fetched(local_files_only=True))
            if _listed(repository, directory) or (is_offline_mode() and _has_weights(directory, patterns)):
                return directory
        HfApi().model_info(repository, revision=revision)  # raises the error once, in this thread
    return Path(fetched())


def _has_weights(directory: Path, patterns: Iterable[str]) -> bool:
    """Return whether a snapshot has the named weights, for caches without a list of files, which older releases filled."""
    wanted = (name for name in patterns if name.endswith(".safetensors") and name not in _BESIDE_WEIGHTS)
    return all((directory / name).exists() for name in wanted)


def _listed(repository: str, directory: Path) -> dict[str, RepoFile]:
    """Return the files at the repository's top level by name, from the cache and without another request."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(repository, revision=directory.name)
    except CachedRepoTreeNotFoundError:  # the cached files were downloaded by an older release
        return {}
    return {file.path: file for file in files if Path(file.path).name == file.path}


def _shards(directory: Path) -> dict[str, set[str]]:
    """Return the weight files, each with its tensors' names; without an index, the names are empty."""
    return indexed_shards(directory) if (directory / INDEX_NAME).exists() else {SINGLE_NAME: set()}


def shards_of(shards: dict[str, set[str]], layers: Collection[int]) -> list[str]:
    """Return the shards that hold tensors of these layers. A shard without a list of tensors may hold any tensor."""

    def holds(names: set[str]) -> bool:
        found = map(_LAYER.search, names)
        return not names or any(match is not None and int(match[1]) in layers for match in found)

    return [name for name, names in shards.items() if layers and holds(names)]


def _wanted(model: str, directory: Path, listed: dict[str, RepoFile], layers: Collection[int] | None) -> list[str]:
    """Return the files to download after the small files. Raises CheckpointError if all weights are pickled."""
    shards = _shards(directory)
    weights = list(shards) if layers is None else shards_of(shards, layers)
    provenance = read_provenance(directory)
    if provenance is None:
        if listed and not any(name in listed for name in shards) and any(name.endswith(PICKLES) for name in listed):
            raise CheckpointError(
                f"{model}: the hub has only pickled weights, which are never downloaded because they can run code; take "
                "a revision with safetensors (--revision refs/pr/N), or another copy of the model"
            )
        return [*weights, *_BESIDE_WEIGHTS]
    files = [name for name in provenance["files"] if name.endswith(_OF_ARTIFACTS) and name not in shards]
    return [*weights, *files, *([MODELLING_FILE] if _is_ours(directory, listed.get(MODELLING_FILE)) else [])]


def _is_ours(directory: Path, file: RepoFile | None) -> bool:
    """Return whether a modeling file on the hub is, byte for byte, the one that this version writes."""
    from huggingface_hub.utils.sha import git_hash

    source = source_of(load_json(directory / "config.json", "model config"))
    return file is not None and source is not None and file.blob_id == git_hash(source)


def _header(repository: str, commit: str, name: str) -> bytes:
    """Return the beginning of a safetensors file up to the end of its header; less if the file is damaged."""
    beginning = _beginning(repository, commit, name, _FIRST_BYTES)
    if len(beginning) < _LENGTH.size:
        return beginning
    (length,) = _LENGTH.unpack_from(beginning)
    end = _LENGTH.size + min(length, MAX_HEADER_BYTES)
    return (beginning if end <= len(beginning) else _beginning(repository, commit, name, end))[:end]


def _beginning(repository: str, commit: str, name: str, count: int) -> bytes:
    """Return the first `count` bytes of a file, even from a server that ignores the range and sends the whole file."""
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
    """Turn any error of hub requests in the body into a HubError that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty():
        disable_progress_bars()  # huggingface_hub's bars are for terminals only, like ours
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
    if isinstance(error, HTTPError | RuntimeError):  # RuntimeError: raised in threads that shared the connection
        return "the connection to the hub broke; run the command again to download the missing files"
    reason = (isinstance(error, OSError) and error.strerror) or next(iter(str(error).splitlines()), "")
    return (
        f"cannot be exchanged with the hub ({reason or type(error).__name__}); make space if a disk is full, and try again"
    )


def _refusal(status: int) -> str:
    """Return the meaning of an HTTP status and the advice for it."""
    if status == 401:
        return "the hub refuses the token; log in again with `hf auth login`, or correct HF_TOKEN"
    if status == 403:
        return "the hub denies this token the permission; grant it (https://huggingface.co/settings/tokens)"
    if status in (409, 412):
        return "something else was written there meanwhile; check the repository, and run the command again"
    if status == 429:
        return "the hub limits the rate of requests; wait a few minutes, or log in with `hf auth login`"
    return f"the hub answers with HTTP status {status}; try again later"
