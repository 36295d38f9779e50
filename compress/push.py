"""Upload of an artifact to the hub: all of its files, and no others, in one commit."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.run.claims import claiming
from engine.checkpoint.artifact import FILE_NAME, check_checksums, written_here
from engine.checkpoint.hub import explained, split
from engine.errors import CompressError, HubError, OptionError

_STAYS = ".gitattributes"
"""The file that the hub adds to every repository."""


@dataclass(frozen=True)
class Target:
    """A repository that the account may write to."""

    repository: str
    """The id of the repository, owner/name."""
    private: bool
    overwrite: bool


def check_target(repository: str, private: bool, overwrite: bool) -> Target:
    """Check before any work whether an artifact can be pushed to a repository; nothing is created or changed.

    `repository`: owner/name, or a name alone for one of the account's own. Raises HubError or OptionError.
    """
    from huggingface_hub import HfApi

    with explained(repository):
        account = HfApi().whoami()
    if "/" not in repository:
        repository = f"{account['name']}/{repository}"
    if split(repository)[1] is not None:
        raise OptionError(f"{repository}: results are pushed to the main revision; leave out the @")
    target = Target(repository, private, overwrite)
    _check_account(target, account)
    with explained(repository):
        held = _held(repository)
    _check_replaced(target, held)
    return target


def _check_account(target: Target, account: dict[str, Any]) -> None:
    """Raise HubError where the token is known to lack write access.

    Permissions of fine-grained tokens are known to the hub only.
    """
    owners = {account["name"]: "write"} | {each["name"]: each.get("roleInOrg") for each in account.get("orgs", [])}
    owner = target.repository.partition("/")[0]
    if owner not in owners:
        mine = ", ".join(sorted(owners))
        raise HubError(f"{target.repository}: your account does not belong to {owner}; take a repository of {mine}")
    token = account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read" or owners[owner] == "read":
        raise HubError(
            f"{target.repository}: the token may only read; make one that may write (https://huggingface.co/settings/tokens)"
        )


def _held(repository: str) -> tuple[str | None, list[str]]:
    """Return a repository's last commit and its files; None and an empty list where there is no such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        commit = HfApi().model_info(repository).sha
        return commit, [name for name in HfApi().list_repo_files(repository, revision=commit) if name != _STAYS]
    except RepositoryNotFoundError:
        return None, []


def _check_replaced(target: Target, held: tuple[str | None, list[str]]) -> None:
    """Raise HubError where the repository has content that may not be replaced."""
    _, names = held
    if names and not target.overwrite:
        raise HubError(f"{target.repository}: exists already; give another name, or --overwrite to replace what is there")
    if names and FILE_NAME not in names:
        raise HubError(
            f"{target.repository}: holds something else (no {FILE_NAME}), so it is not replaced; give another name"
        )


def push(directory: Path, repository: str, private: bool, overwrite: bool) -> dict[str, Any]:
    """Run all checks, then upload an artifact; return the figures of `compress push --json`.

    Raises the errors of `check_target` and `upload`.
    """
    if not directory.is_dir():
        raise OptionError(f"{directory}: no such directory; give that of an artifact")
    return upload(directory, check_target(repository, private, overwrite))


def push_result(directory: Path, target: Target) -> dict[str, Any]:
    """Upload the artifact that a command has just written. A HubError says where it is, and how to retry."""
    try:
        return upload(directory, target)
    except CompressError as error:
        raise HubError(f"{error}; {directory} is whole: `compress push {directory} {target.repository}` goes on") from error


def upload(directory: Path, target: Target) -> dict[str, Any]:
    """Upload an artifact; return its place on the hub.

    Afterwards the repository has the whole artifact, or is unchanged. Weights that an interrupted push had uploaded are not
    uploaded again. Raises CheckpointError for a damaged artifact, OptionError for a directory without one, OutputError
    where a run is writing it, and HubError.
    """
    # without write access nobody can replace the artifact meanwhile
    writable = os.access(directory.absolute().parent, os.W_OK)
    with claiming(directory if writable else None):
        return _upload(directory, target)


def _upload(directory: Path, target: Target) -> dict[str, Any]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    started = time.monotonic()
    names = files_of(directory)
    with explained(target.repository):
        parent, held = _held(target.repository)
        _check_replaced(target, (parent, held))
        if parent is None:
            HfApi().create_repo(target.repository, private=target.private or None)
            parent, held = _held(target.repository)
            _check_replaced(target, (parent, held))  # another push may have finished meanwhile
        added = [CommitOperationAdd(name, directory / name) for name in names]
        removed = [CommitOperationDelete(name, is_folder=False) for name in sorted(set(held) - set(names))]
        made = HfApi().create_commit(
            target.repository,
            [*added, *removed],
            commit_message=f"Upload {directory.resolve().name}",
            parent_commit=parent,  # the hub refuses the commit if another push was faster
        )
    return {
        "artifact": str(directory),
        "repository": target.repository,
        "url": f"{HfApi().endpoint}/{target.repository}",
        "commit": made.oid,
        "files": len(names),
        "bytes": sum((directory / name).stat().st_size for name in names),
        "seconds": time.monotonic() - started,
    }


def files_of(directory: Path) -> list[str]:
    """Return the artifact's own files after a check of their checksums. Other files in the directory are not uploaded."""
    provenance = written_here(directory)
    check_checksums(directory, provenance)
    missing = [name for name in provenance["files"] if not (directory / name).is_file()]
    if missing:
        raise OptionError(f"{directory}: {missing[0]} is missing; copy the artifact again")
    return [FILE_NAME, *sorted(provenance["files"])]
