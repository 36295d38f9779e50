"""Behavior that all commands share: option groups, one-line errors, exit codes, `--json`, the hub and several processes.

A verb is a function of one `Given`; `command` makes it a click command. Exit codes: 1 for an error, 2 for wrong usage, 130
after Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from compress.commands.click_options import GroupedOption, all_leaves, make, parameter
from compress.commands.output import is_first_process, say
from engine.errors import CompressError, OptionError
from engine.generation.options import MACHINE, OpenOptions
from engine.options import like, option

OTHER = "Other"
GROUPS = (
    "Target",
    "What to remove",
    "What to merge",
    "What to keep",
    "What to train",
    "What to write",
    "What to measure",
    "What to generate",
    "What to check",
    "Several models",
    "Address",
    "Who may ask",
    "Tools and reasoning",
    "Output",
    "Calibration text",
    "Text",
    "Prompts and responses",
    "Refit",
    "DiEP",
    "NAEE",
    "Training",
    "Every Expert Matters",
    "Classifiers",
    "Recovery",
    "Quantization",
    "Load",
    "Skipping experts",
    "Drafting",
    "Load test of a server",
    "Tasks",
    "Presets",
    "Hub",
    MACHINE,
    OTHER,
)
"""Headings of the help texts, in their order."""

Figures = Mapping[str, Any]
"""Figures of compress/report/figures.py, or a command's own."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Common:
    """Options of every command."""

    json: bool = option(False, group=OTHER, help="Print one JSON object on stdout, and nothing else there.")
    device: str = like(OpenOptions, "device")
    dtype: str = like(OpenOptions, "dtype")
    seed: int = option(
        0, group=OTHER, minimum=0, maximum=2**32 - 1, help="Random seed; the same seed gives the same result."
    )
    threads: int | None = like(OpenOptions, "threads")
    verbose: bool = option(False, group=OTHER, short="-v", help="Say more on stderr.")
    debug: bool = option(False, group=OTHER, help="Show tracebacks.")


@dataclass(frozen=True)
class Revision:
    """Options for the version of a model on the hub."""

    revision: str | None = option(
        None, group="Hub", unset="the main branch", help="Branch, tag or commit of a model on the hub."
    )


@dataclass(frozen=True)
class Private:
    """Options for the visibility of a repository that an upload creates."""

    private: bool = option(False, group="Hub", help="Make the repository private if it is new.")


@dataclass(frozen=True)
class Push(Private):
    """Options for the upload of the result."""

    push_to_hub: str | None = option(
        None, group="Hub", metavar="REPO_ID", help="Then upload the result to the hub, as `compress push` does."
    )


HUB = (Revision, Push)


@dataclass(frozen=True)
class Given:
    """The values of the command line."""

    common: Common
    values: Mapping[str, Any]
    """Values by name of the option, including the common options."""
    named: frozenset[str]
    """Names of the options that are on the command line; all others have their defaults."""

    def make(self, of: Callable[..., Made], **fixed: Any) -> Made:
        """Return a dataclass of options; `fixed` has the fields that are not read from the command line."""
        common = self.common
        shared = {"seed": common.seed, "device": common.device, "dtype": common.dtype, "threads": common.threads}
        return make(of, self.values, shared, **fixed)

    def make_named(self, of: Callable[..., Made], **fixed: Any) -> Made:
        """Return a dataclass of options in which options that are not on the command line have its own defaults."""
        values = {name: value for name, value in self.values.items() if name in self.named}
        return make(of, values, {"seed": self.common.seed}, **fixed)

    def job(self, of: Callable[..., Made], name: str, **fixed: Any) -> Made:
        """Return the options of a run that writes a directory, by default named after the model and `name`."""
        return self.make(of, **self.of_job(name, **fixed))

    def of_job(self, name: str, **fixed: Any) -> dict[str, Any]:
        """Return the fields of JobOptions that depend on the model and the machine."""
        output = self.values["output"] or Path(f"{self.result_name}-{name}")
        return {"output": output, "dtype": self.torch_dtype(), "device": self.chosen_device()} | fixed

    @property
    def result_name(self) -> str:
        """The last part of the model's name, with which the default output begins."""
        from engine.checkpoint.hub import last_name

        return last_name(self.values["student" if "student" in self.values else "model"])

    def torch_dtype(self) -> Any:
        """Return the dtype to compute in; None for auto."""
        import torch

        return None if self.common.dtype == "auto" else getattr(torch, self.common.dtype)

    def chosen_device(self) -> str:
        """Return the device to compute on, and join the other processes that share the work.

        Raises OptionError for CUDA on a machine without it.
        """
        from engine.kernels.devices import resolve_device
        from engine.passes import processes

        return processes.join(str(resolve_device(self.common.device)))

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise OptionError for the first of these options that is on the command line."""
        if wrong := sorted(self.named & set(names)):
            raise OptionError(f"--{wrong[0].replace('_', '-')} is {why}; leave it out")

    def say(self, text: str) -> None:
        """Print text for people."""
        say(self.common.json, text)


class GroupedCommand(click.Command):
    """A command whose help text lists its options under headings."""

    def __init__(self, name: str, first: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.first = first

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group that has options, the command's own group first, the others in the order of GROUPS."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and isinstance(each, click.Option):
                group = each.group if isinstance(each, GroupedOption) else OTHER
                groups.setdefault(group, []).append(record)
        for group in sorted(groups, key=lambda group: (group != self.first, GROUPS.index(group))):
            with formatter.section(group):
                formatter.write_dl(groups[group])


def command(
    name: str, verb: Callable[[Given], Figures], *options: type, first: str | None = None, is_shared: bool = False
) -> click.Command:
    """Return the command of a verb, with the options of the dataclasses and those of every command.

    The verb's docstring is the help text. `first`: the group that comes first in it; None for the order of GROUPS.
    `is_shared`: whether several processes of torchrun can share the work.
    """
    found = all_leaves(options)
    found |= {name: leaf for name, leaf in all_leaves((Common,)).items() if name not in found}

    def run(**values: Any) -> None:
        source = click.get_current_context().get_parameter_source
        named = frozenset(each for each in values if source(each) is click.core.ParameterSource.COMMANDLINE)
        run_verb(verb, name, Given(make(Common, values, {}), values, named), is_shared)

    return GroupedCommand(name, first, callback=run, params=[parameter(leaf) for leaf in found.values()], help=verb.__doc__)


def run_verb(verb: Callable[[Given], Figures], name: str, given: Given, is_shared: bool) -> None:
    """Run a verb; print its figures as JSON if requested, or an error in one line."""
    try:
        prepare_process(given.common, name, is_shared)
        figures = run_with_hub(verb, given)
        leave_process()
    except KeyboardInterrupt:
        if is_first_process():
            click.echo("Interrupted.", err=True)
        sys.exit(130)
    except Exception as error:
        if speaks_of_failure():
            if given.common.debug or not isinstance(error, CompressError):
                raise
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    if given.common.json and figures and is_first_process():
        click.echo(json.dumps(figures, allow_nan=False))


def run_with_hub(verb: Callable[[Given], Figures], given: Given) -> Figures:
    """Run a verb on the model at its --revision, and upload the result to --push-to-hub.

    A repository that cannot be pushed to is refused before any work.
    """
    values = dict(given.values)
    if values.get("revision") is not None:
        from engine.checkpoint.hub import at_revision

        name = "model" if "model" in values else "path"
        values[name] = at_revision(values[name], values["revision"])
    given = Given(given.common, values, given.named)
    repository = values.get("push_to_hub")
    if repository is None or not is_first_process():
        return verb(given)
    from compress.push import check_target, push_result

    target = check_target(repository, values["private"], values["overwrite"])
    figures = verb(given)
    pushed = push_result(Path(figures["artifact"]), target)
    given.say(f"{pushed['url']}: commit {pushed['commit'][:12]}")
    return {**figures, "pushed": pushed}


def prepare_process(common: Common, name: str, is_shared: bool) -> None:
    """Set threads, keep libraries quiet unless asked otherwise, and meet the other processes of torchrun.

    Raises OptionError where several processes were started for a command that runs in one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from engine.passes import processes

        if processes.started_together() and not is_shared:
            raise OptionError(
                f"compress {name} runs in one process; torchrun's several can only share calibrate, prune, merge, densify, "
                "distill, quantize"
            )
        processes.meet()
    if common.threads is not None:
        import torch

        torch.set_num_threads(common.threads)
    if not common.verbose:
        # transformers reads the level of its logger from this when it is imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def speaks_of_failure() -> bool:
    """Return whether this process reports a failure."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from engine.passes import processes

    return processes.is_first_to_fail()


def leave_process() -> None:
    """Destroy the process group, if there is one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from engine.passes import processes

        processes.leave()
