"""An artifact to the hub: all of its files, and nothing else, in one commit."""

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
"""What the hub itself puts into every repository."""


@dataclass(frozen=True)
class Target:
    """A repository that the account may write to."""

    repository: str
    """owner/name"""
    private: bool
    overwrite: bool


def check_target(repository: str, private: bool, overwrite: bool) -> Target:
    """Find out before any work whether an artifact can be pushed there; nothing is made or changed.

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
    """Raise HubError where the token is known not to write there. What fine-grained tokens may do, only the hub knows."""
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
    """A repository's last commit and the files that it holds; None and none where there is no such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        commit = HfApi().model_info(repository).sha
        return commit, [name for name in HfApi().list_repo_files(repository, revision=commit) if name != _STAYS]
    except RepositoryNotFoundError:
        return None, []


def _check_replaced(target: Target, held: tuple[str | None, list[str]]) -> None:
    """Raise HubError where something is there that may not be replaced."""
    _, names = held
    if names and not target.overwrite:
        raise HubError(f"{target.repository}: exists already; give another name, or --overwrite to replace what is there")
    if names and FILE_NAME not in names:
        raise HubError(
            f"{target.repository}: holds something else (no {FILE_NAME}), so it is not replaced; give another name"
        )


def push(directory: Path, repository: str, private: bool, overwrite: bool) -> dict[str, Any]:
    """Check everything, then upload an artifact; the keys of `compress push --json`. Errors are those of both."""
    if not directory.is_dir():
        raise OptionError(f"{directory}: no such directory; give that of an artifact")
    return upload(directory, check_target(repository, private, overwrite))


def push_result(directory: Path, target: Target) -> dict[str, Any]:
    """Upload what a command has just written. HubError says that it is there, and how to go on."""
    try:
        return upload(directory, target)
    except CompressError as error:
        raise HubError(f"{error}; {directory} is whole: `compress push {directory} {target.repository}` goes on") from error


def upload(directory: Path, target: Target) -> dict[str, Any]:
    """Upload an artifact; where it went.

    The repository has the whole artifact afterwards, or is as it was. Weights that an interrupted push had uploaded are not
    uploaded again. Raises CheckpointError for a damaged artifact, OptionError for none, OutputError where a run
    is writing it, HubError.
    """
    writable = os.access(directory.absolute().parent, os.W_OK)  # where nobody can write, nobody replaces the artifact
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
            _check_replaced(target, (parent, held))  # another push may have come between
        added = [CommitOperationAdd(name, directory / name) for name in names]
        removed = [CommitOperationDelete(name, is_folder=False) for name in sorted(set(held) - set(names))]
        made = HfApi().create_commit(
            target.repository,
            [*added, *removed],
            commit_message=f"Upload {directory.resolve().name}",
            parent_commit=parent,  # what was pushed meanwhile is not overwritten unseen
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
    """The artifact's own files, compared with their checksums. What else lies in the directory stays where it is."""
    provenance = written_here(directory)
    check_checksums(directory, provenance)
    missing = [name for name in provenance["files"] if not (directory / name).is_file()]
    if missing:
        raise OptionError(f"{directory}: {missing[0]} is missing; copy the artifact again")
    return [FILE_NAME, *sorted(provenance["files"])]
