"""The command `compress prune`: one result, or a sweep over methods and sparsities."""

from __future__ import annotations

from dataclasses import dataclass

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.figures import show_figures
from compress.commands.output import progress_bar
from compress.commands.preset import with_preset
from compress.commands.sweeps import comparison_of, show_sweep
from compress.methods import DEFAULT_GRANULARITY, DEFAULT_METHODS, METHODS
from compress.options.presets import PresetOptions
from compress.options.prune import DiepOptions, PruneOptions
from compress.options.training import RECOVERY, TEXT_STEPS, WholeRecoveryOptions
from compress.plans.selection import REMOVE, Budget
from engine.errors import OptionError
from engine.options import names, option

UNIT_OPTIONS = {"refit", "unit_multiple", "include"}
"""Options that only methods for hidden units use."""
EXPERT_OPTIONS = {"experts", "min_experts", "merge", "naee_limit", "statistics", "plan"}
"""Options that only methods for whole experts use, and `--plan`, with which no method decides."""


@dataclass(frozen=True)
class Uniform:
    """The option `--uniform`, which stands for `--scope uniform` (compress/plans/selection.py)."""

    uniform: bool = option(
        False,
        group=REMOVE,
        help="Keep the same number of experts in every layer, or the same number of hidden units in every expert: a plain "
        "checkpoint of its family.",
    )


@dataclass(frozen=True)
class Afterwards:
    """Options of the training of all remaining weights."""

    distill: bool = option(
        False,
        group=RECOVERY,
        help="Then train all remaining weights towards MODEL's predictions, as `compress distill` does.",
    )
    distill_steps: int | None = option(
        None, group=RECOVERY, minimum=1, unset=str(TEXT_STEPS), help="Steps of --distill, which they imply."
    )

    @property
    def steps(self) -> int:
        """Number of training steps; 0 for none."""
        return self.distill_steps or (TEXT_STEPS if self.distill else 0)


def prune(given: Given) -> Figures:
    """Remove hidden units of experts from MODEL, or whole experts, and write the smaller model.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress prune …
    """
    from compress.prune import prune as run

    given = with_preset(given, (PruneOptions,), "prune", _preset_method(given))
    methods = given.values["method"] if "method" in given.named else (default_method(given),)
    sparsities = given.values["sparsity"]
    if len(methods) > 1 or (sparsities and len(sparsities) > 1):
        return _sweep(given, methods, sparsities)
    options = prune_options(given, methods[0], sparsities[0] if sparsities else None, methods[0])
    if options.makes_file:
        given.refuse(["push_to_hub"], "for directories, and a GGUF file is one file")
    return show_figures(given, run(options, progress_bar))


def default_method(given: Given) -> str:
    """Return the method without `--method`: one that uses the options on the command line, since others ignore them."""
    if given.named & names(DiepOptions):
        return "diep"
    if (granularity := given.values.get("granularity")) is not None:  # `plan-run` has no such option
        return DEFAULT_METHODS[granularity]
    is_whole = given.named & EXPERT_OPTIONS and not given.named & UNIT_OPTIONS
    return DEFAULT_METHODS["expert" if is_whole else DEFAULT_GRANULARITY]


def _preset_method(given: Given) -> str:
    """Return the method whose preset is taken: of a sweep DiEP's, of other runs that of the method on the command line."""
    methods = given.values["method"]
    return "diep" if "method" not in given.named or "diep" in methods else str(methods[0])


def prune_options(given: Given, method: str, sparsity: float | None, name: str) -> PruneOptions:
    """Return the options of one run. Raises OptionError unless exactly one option says how many experts to remove."""
    values = given.values
    has_plan, experts = values["plan"] is not None, values["experts"]
    if not has_plan and (sparsity is None) == (experts is None):
        raise OptionError("give --sparsity or --experts (one of them), or a ready-made --plan")
    if has_plan and (sparsity is not None or experts is not None):
        raise OptionError("--plan says which experts stay; leave out --sparsity and --experts")
    if has_plan and values["merge"] != "none":
        raise OptionError("--plan says what becomes of each expert; leave out --merge")
    return given.job(
        PruneOptions,
        name,
        method=method,
        budget=None if has_plan else _budget(given, method, sparsity),
        distill=recovery(given),
    )


def _budget(given: Given, method: str, sparsity: float | None) -> Budget:
    values, row = given.values, METHODS[method]
    granularity = values["granularity"] or row.granularity
    if values["scope"] == "expert" and granularity == "expert":
        raise OptionError("--scope expert keeps the same number of hidden units in every expert; add --granularity unit")
    multiple, include, scope = values["unit_multiple"], values["include"] or (), _scope(given) or row.scopes[0]
    return Budget(sparsity, values["experts"], scope, values["min_experts"], granularity, multiple, include)


def _scope(given: Given) -> str | None:
    """Return the scope on the command line; "expert" is the word for "uniform" where units are removed."""
    is_uniform = given.values["uniform"] or given.values["scope"] == "expert"
    return "uniform" if is_uniform else given.values["scope"]


def recovery(given: Given) -> WholeRecoveryOptions:
    """Return the training that --distill and --distill-steps ask for."""
    return WholeRecoveryOptions(given.make(Afterwards).steps, seed=given.common.seed)


def _sweep(given: Given, methods: tuple[str, ...], sparsities: tuple[float, ...] | None) -> Figures:
    from compress.sweep import cells, sweep

    if sparsities is None or given.values["plan_output"] is not None:
        raise OptionError("a sweep needs --sparsity and writes no --plan-output; each artifact carries its plan")
    base = prune_options(given, methods[0], sparsities[0], "sweep")
    if base.makes_file:
        raise OptionError(f"{base.output}: a sweep writes a directory; name one by --output")
    runs = cells(base, methods, sparsities, _scope(given), given.values["granularity"])
    figures = sweep(runs, comparison_of(given, base), progress_bar)
    return {} if figures is None else show_sweep(given, figures)


COMMAND = command("prune", prune, PruneOptions, Uniform, Afterwards, PresetOptions, *HUB, is_shared=True)
