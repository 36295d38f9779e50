"""The command `compress push`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from compress.commands.command import Figures, Given, Private, command
from compress.report.columns import size
from engine.options import declared, option


@dataclass(frozen=True, kw_only=True)
class PushOptions(Private):
    """Options of `compress push`."""

    directory: Path = field(metadata=declared(group="", is_argument=True, help="The artifact."))
    repo_id: str = field(metadata=declared(group="", is_argument=True, help="Repository on the hub."))
    overwrite: bool = option(False, group="Hub", help="Replace an artifact that is already in the repository.")


def push(given: Given) -> Figures:
    """Upload the artifact in DIRECTORY to the hub as REPO_ID: owner/name, or a name of one's own.

    The artifact is compared with its checksums, and its files are uploaded in one commit, with its model card. Log in with
    `hf auth login` before, or set HF_TOKEN.
    """
    from compress.push import push as run

    options = given.make(PushOptions)
    figures = run(options.directory, options.repo_id, options.private, options.overwrite)
    given.say(f"{figures['url']}: {figures['files']} files, {size(figures['bytes'])}, commit {figures['commit'][:12]}")
    return figures


COMMAND = command("push", push, PushOptions)
