"""The `compress` command: parse, call, print. No logic lives here."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from compress.report.columns import number, size, text_table
from engine.errors import CompressError

DEVICES = ("auto", "cpu", "cuda")
PLANNED_DEVICES = ("cpu", "h100", "h200", "a100", "a800", "l40s", "rtx4090")
DTYPES = ("auto", "float32", "bfloat16", "float16")
METRICS = ("perplexity", "rouge-l")
CLASSIFIER_METRIC = "accuracy"
RECIPES = ("sft", "kd", "gkd", "all", "ka", "sar", "layer-mse", "srrl", "moe-kd")
ABLATIONS = ("i", "ii", "iii", "iv", "v")
OPTIMISERS = ("sgd", "adamw")
AUGMENTATIONS = ("none", "crop", "crop-flip")
DIVERGENCES = ("forward-kl", "reverse-kl", "skew-forward-kl", "skew-reverse-kl", "jensen-shannon")
SELECTIONS = ("usage", "reap", "average", "random")
PRUNE_METHODS = ("diep", "naee", "frequency", "probability", "reap", "man", "mc-moe", "fisher", "taylor", "random")
DIEP_OPTIONS = (
    "relaxation",
    "epochs",
    "learning_rate",
    "reconstruction_weight",
    "batch_size",
    "pressure",
    "start",
    "score",
)
MERGE_METHODS = ("m-smoe", "s-smoe", "hc-smoe", "ream")
PICTURE_SEQUENCES = 16
"""Of the calibration text, for a comparison's pictures of expert usage and similarity."""
EXPORT_FORMATS = ("onnx", "onnx-genai")
EXPORT_PRECISIONS = ("float32", "float16", "int8", "int4")
EXPERT_FORMS = ("moe", "portable")
WEIGHT_BITS = (8, 4)
SHARED_COMMANDS = ("calibrate", "prune", "merge", "densify", "distill")
"""Those that several processes of torchrun can share."""


@dataclass(frozen=True)
class Common:
    """Options of every command."""

    json: bool
    device: str
    dtype: str
    seed: int
    threads: int | None
    verbose: bool
    debug: bool

    def torch_dtype(self) -> Any:
        """None for auto."""
        import torch

        return None if self.dtype == "auto" else getattr(torch, self.dtype)


def common_options(
    function: Callable[..., dict[str, Any]], devices: Sequence[str] = DEVICES, device: str = "auto"
) -> Callable[..., None]:
    """Add the options of every command; run it; print its result, or one line of what is wrong."""
    default_device = device

    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
    @click.option(
        "--device", type=click.Choice(devices), default=default_device, show_default=True, help="Where to compute."
    )
    @click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="auto: as stored.")
    @click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Same seed, same result.")
    @click.option("--threads", type=click.IntRange(min=1), help="CPU threads; all cores by default.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more on stderr.")
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @functools.wraps(function)
    def run(
        as_json: bool, device: str, dtype: str, seed: int, threads: int | None, verbose: bool, debug: bool, **own: Any
    ) -> None:
        common = Common(as_json, device, dtype, seed, threads, verbose, debug)
        try:
            prepare_process(common, function.__name__)
            result = run_with_hub(function, common, own)
            leave_process()
        except KeyboardInterrupt:
            if is_first_process():
                click.echo("Interrupted.", err=True)
            sys.exit(130)
        except Exception as error:
            if speaks_of_failure():
                if debug or not isinstance(error, CompressError):
                    raise
                click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            sys.exit(1)
        if as_json and result and is_first_process():
            click.echo(json.dumps(result, allow_nan=False))

    return run


class ByteSize(click.ParamType[int]):
    """A size such as 500MB, 2GB or 1.5GiB, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Without a unit it is bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).strip().lower())
        if match is None or (match[3] and not match[2]) or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size; write it like 500MB, 2GB or 1.5GiB", param, ctx)
        return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def run_with_hub(function: Callable[..., dict[str, Any]], common: Common, own: dict[str, Any]) -> dict[str, Any]:
    """Run a command: MODEL at its --revision, and its artifact to --push-to-hub, which is refused before any work."""
    revision = own.pop("revision", None)
    if revision is not None:
        from engine.checkpoint.hub import at_revision

        name = "model" if "model" in own else "path"
        own[name] = at_revision(own[name], revision)
    if "push_to_hub" not in own:
        return function(common, **own)
    from compress.push import check_target, push_result

    repository, private = own.pop("push_to_hub"), own.pop("private")
    if repository is None or not is_first_process():
        return function(common, **own)
    target = check_target(repository, private, own["overwrite"])
    figures = function(common, **own)
    pushed = push_result(Path(figures["artifact"]), target)
    say(common, f"{pushed['url']}: commit {pushed['commit'][:12]}")
    return figures | {"pushed": pushed}


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in their order in the help text."""
    return lambda function: functools.reduce(lambda made, decorate: decorate(made), reversed(decorators), function)


def text_options(samples: int) -> Decorator:
    """Which text, of every command that runs some through the model."""
    return together(
        click.option("--data", help="Text: file, folder, .jsonl, 'stdlib' or a dataset id."),
        click.option("--samples", type=int, default=samples, show_default=True, help="Sequences."),
        click.option(
            "--sequence-length", type=int, help="Tokens a sequence.  [default: 2048 or the model's maximum; demo 256]"
        ),
    )


memory_limit_option = click.option(
    "--memory-limit", type=ByteSize(), help="Most memory to have resident, such as 8GB: layer by layer, activations on disk."
)
revision_option = click.option("--revision", help="Of a hub id: a branch, tag or commit.  [default: the main branch]")
model_argument = together(click.argument("model", default="demo"), revision_option)
private_option = click.option("--private", is_flag=True, help="Hub: the repository is private where it is made anew.")
push_options = together(
    click.option("--push-to-hub", metavar="REPO_ID", help="Then upload the result to the hub, as `compress push` does."),
    private_option,
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing result.")
resume_option = click.option("--resume", is_flag=True, help="Go on with an interrupted run.")
limit_option = click.option("--limit", type=click.IntRange(min=1), help="Tasks: first examples only.")
skip_min_experts_option = click.option(
    "--skip-min-experts", type=int, default=1, show_default=True, help="Experts a token never skips."
)


kv_cache_dtype_option = click.option(
    "--kv-cache-dtype",
    type=click.Choice(("auto", "float16", "bfloat16", "int8")),
    default="auto",
    show_default=True,
    help="Of keys and values. auto: what is computed in; int8: half of bfloat16, with a scale per position and head.",
)


backend_option = click.option(
    "--backend",
    type=click.Choice(("auto", "torch", "onnx")),
    default="auto",
    show_default=True,
    help="auto: onnx for an exported model, torch for all others.",
)


instruction_options = together(
    click.option("--prompt-template", help="What a prompt becomes, with {prompt} in it.  [default: ### Instruction: …]"),
    click.option("--max-length", type=int, default=512, show_default=True, help="Tokens of prompt and response."),
    click.option("--max-prompt-length", type=int, default=256, show_default=True, help="Longer prompts are left out."),
)
"""How prompts with responses are read."""
speed_options = together(
    click.option("-p", "--prompt-tokens", type=int, default=512, show_default=True, help="Prefill test; 0 for none."),
    click.option("-n", "--generated-tokens", type=int, default=128, show_default=True, help="Decode test; 0 for none."),
    click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Of each test."),
)
"""What is measured where speed is."""


def output_option(default: str) -> Decorator:
    """Where a command writes a directory."""
    return click.option(
        "-o", "--output", type=click.Path(path_type=Path), help=f"Directory of the result.  [default: {default}]"
    )


def evaluation_option(none: str = "0 for none") -> Decorator:
    """How much text tells what a smaller model has lost."""
    text = f"Held-out sequences for perplexity before and after; {none}."
    return click.option("--evaluation-samples", type=int, default=32, show_default=True, help=text)


def result_name(model: str) -> str:
    """What the default --output begins with."""
    from engine.checkpoint.hub import last_name

    return last_name(model)


group_size_option = click.option(
    "--group-size", type=int, default=32, show_default=True, help="Weights of a row that share a scale; -1 for all of it."
)
input_options = together(
    output_option("MODEL-METHOD"),
    text_options(128),
    evaluation_option(),
    click.option("--statistics", type=click.Path(path_type=Path), help="Use a file of `compress calibrate`."),
)
recover_options = together(
    click.option(
        "--recover-steps",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Afterwards train the router rows and norms that are left for so many steps towards MODEL's predictions.",
    ),
    click.option("--recover-learning-rate", type=float, default=5e-3, show_default=True, help="Recovery: of AdamW."),
    click.option(
        "--distill",
        is_flag=True,
        help="Afterwards train all weights that are left towards MODEL's predictions, as `compress distill` does.",
    ),
    click.option(
        "--distill-steps", type=click.IntRange(min=1), help="Steps of --distill, which they imply.  [default: 600]"
    ),
)
step_options = together(
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        help="Sequences a step, of each process.",
    ),
    click.option(
        "--micro-batch-size",
        type=click.IntRange(min=1),
        help="Sequences at a time; gradients add up to a step's.  [default: about 4,096 tokens]",
    ),
    click.option("--clip-norm", type=float, default=1.0, show_default=True, help="Longest gradient."),
    click.option(
        "--validation-samples",
        type=click.IntRange(min=0),
        default=32,
        show_default=True,
        help="Sequences set aside to tell the best state by; 0 keeps the last.",
    ),
    click.option(
        "--validate-every", type=click.IntRange(min=0), default=50, show_default=True, help="Steps between; 0 for none."
    ),
    click.option(
        "--save-every", type=click.IntRange(min=1), default=50, show_default=True, help="Steps between saved states."
    ),
    click.option("--shard", is_flag=True, help="Spread the result over the processes while it is trained (FSDP2)."),
)
"""Of every training that makes a new model."""
dense_training_options = together(
    click.option(
        "--distill-steps",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Train the result on text, each layer's output towards that of MODEL's.",
    ),
    click.option(
        "--finetune-steps", type=click.IntRange(min=0), default=0, show_default=True, help="Then train it on text alone."
    ),
    click.option(
        "--lambda-supervised", type=float, default=0.0, show_default=True, help="Weight of the text's own next tokens."
    ),
    click.option("--lambda-layer", type=float, default=1.0, show_default=True, help="Weight of the layers' outputs."),
    click.option(
        "--lambda-prediction",
        type=float,
        default=1.0,
        show_default=True,
        help="Weight of MODEL's own predictions of the next tokens.",
    ),
    click.option(
        "--learning-rate", type=float, help="Of AdamW, at its highest.  [default: 1 over the hidden size, at most 1/160]"
    ),
    step_options,
    click.option(
        "--offload-teacher", is_flag=True, help="Read MODEL's layers one at a time for each batch: less memory, slower."
    ),
)
result_options = together(
    click.option("--plan-output", type=click.Path(path_type=Path), help="Also write the plan to this file."),
    overwrite_option,
    resume_option,
    push_options,
)
artifact_options = together(input_options, memory_limit_option, recover_options, result_options)
"""Options of every command that calibrates and writes a smaller mixture; `densify` takes the first and the last."""


classifier_options = together(
    click.option(
        "--ablation",
        type=click.Choice(ABLATIONS),
        help="moe-kd, changed: uniform gate (i), its classifier (ii) or the prototypes (iii) from scratch, hard means (iv), "
        "the teacher's prediction for the E-step (v).",
    ),
    click.option(
        "--augment", type=click.Choice(AUGMENTATIONS), default="none", show_default=True, help="Images: at random."
    ),
    click.option(
        "--optimiser",
        type=click.Choice(OPTIMISERS),
        default="sgd",
        show_default=True,
        help="Classifiers: adamw suits encoders.",
    ),
    click.option("--momentum", type=float, default=0.9, show_default=True, help="Classifiers: of gradient descent."),
    click.option("--weight-decay", type=float, default=5e-4, show_default=True, help="Classifiers: of all parameters."),
    click.option("--probe", metavar="DATA", help="Classifiers: other examples, to probe the features on linearly."),
)
CLASSIFIER_OPTIONS = ("ablation", "augment", "optimiser", "momentum", "weight_decay", "probe")
"""Of a distillation, beside those that language models have too."""


load_options = together(
    click.option("--server", help="URL of a running server to measure instead of a model."),
    click.option("--api-key", envvar="COMPRESS_API_KEY", show_envvar=True, help="Of the server."),
    click.option("--num-prompts", type=click.IntRange(min=1), default=100, show_default=True, help="Server: requests."),
    click.option("--max-concurrency", type=click.IntRange(min=1), help="Server: requests at once.  [default: all]"),
    click.option(
        "--request-rate",
        type=click.FloatRange(min=0, min_open=True),
        help="Server: requests a second, at random distances.  [default: all at once]",
    ),
    click.option(
        "--random-input-len", type=click.IntRange(min=1), default=128, show_default=True, help="Server: tokens of a prompt."
    ),
    click.option(
        "--random-output-len",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Server: tokens of answers.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Server: answers go on to their full length."),
)
"""Of a load test, with the names that other serving benchmarks have for them."""


def is_first_process() -> bool:
    """False in all but one of the processes that torchrun started: they are silent."""
    return os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ


def speaks_of_failure() -> bool:
    """Whether it is this process that says what went wrong."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from engine.passes import processes

    return processes.is_first_to_fail()


def leave_process() -> None:
    """Take the group of processes apart, if there is one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from engine.passes import processes

        processes.leave()


def prepare_process(common: Common, command: str) -> None:
    """Threads, and quiet libraries unless asked otherwise. Several processes meet, or are refused where one does all."""
    import torch

    from engine.errors import OptionError
    from engine.passes import processes

    if processes.started_together() and command not in SHARED_COMMANDS:
        raise OptionError(
            f"compress {command} runs in one process; torchrun's several can only share {', '.join(SHARED_COMMANDS)}"
        )
    processes.meet()
    if common.threads is not None:
        torch.set_num_threads(common.threads)
    if not common.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what transformers sets its logger to when imported
        logging.getLogger("transformers").setLevel(logging.ERROR)
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def chosen_device(common: Common) -> str:
    """`auto` resolved; CUDA where there is none is refused. Of several processes that have met, this one's own."""
    from engine.kernels.devices import resolve_device
    from engine.passes import processes

    return processes.join(str(resolve_device(common.device)))


def progress_bar(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """A bar on stderr, on a terminal, for whatever takes over two seconds."""
    from tqdm import tqdm

    quiet = None if is_first_process() else True  # None: unless on a terminal
    bar: Iterable[Any] = tqdm(iterable, desc=description, delay=2, leave=False, disable=quiet)
    return bar


def say(common: Common, text: str) -> None:
    """What people read: on stdout, or on stderr when stdout is for a machine."""
    if is_first_process():
        click.echo(text, err=common.json)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Several(click.ParamType[tuple[Any, ...]]):
    """One value, or several with commas between them; the callback gets a tuple."""

    name = "several"

    def __init__(self, one: click.ParamType[Any], metavar: str) -> None:
        self.one, self.metavar = one, metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """For the help."""
        return self.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Each by the type of one."""
        if isinstance(value, tuple):
            return value
        return tuple(self.one.convert(item.strip(), param, ctx) for item in str(value).split(","))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="moe-compress", prog_name="compress")
def main() -> None:
    """Make a Mixture-of-Experts language model small, write it as safetensors, run it, and say what it costs."""


@main.command()
@model_argument
@click.option(
    "--sparsity",
    type=Several(click.FLOAT, "R[,R…]"),
    help="Share of all experts to remove, between 0 and 1. Several make a sweep: all of them, then their comparison.",
)
@click.option("--experts", type=int, help="Experts to keep per layer (on average), instead of --sparsity.")
@click.option(
    "--method",
    type=Several(click.Choice(PRUNE_METHODS), f"[{'|'.join(PRUNE_METHODS)}][,…]"),
    help="Criterion; several make a sweep.  [default: fisher; diep where one of its options is given]",
)
@click.option(
    "--scope",
    type=click.Choice(("global", "layer")),
    help="Rank the experts of all layers together, or cut each layer by the same share.  [default: global; naee: layer]",
)
@click.option("--uniform", is_flag=True, help="Same count in every layer: a plain checkpoint of its family.")
@click.option("--min-experts", type=int, default=0, help="Least experts per layer.  [default: experts per token]")
@click.option(
    "--merge",
    type=click.Choice(("none", "cka")),
    default="none",
    show_default=True,
    help="What becomes of removed experts: nothing, or each is merged into the most similar one that stays.",
)
@click.option(
    "--relaxation",
    type=click.Choice(("paper", "routed", "gated")),
    default="gated",
    show_default=True,
    help="DiEP: the relaxed layer.",
)
@click.option("--epochs", type=click.IntRange(min=0), default=10, show_default=True, help="DiEP: passes over the text.")
@click.option("--learning-rate", type=float, help="DiEP: of α and β.  [default: by relaxation]")
@click.option("--reconstruction-weight", type=float, default=0.01, show_default=True, help="DiEP: λ.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="DiEP: sequences a step.")
@click.option("--pressure", type=float, help="DiEP, gated: μ.  [default: by relaxation]")
@click.option("--start", type=click.Choice(("zero", "fisher")), help="DiEP: start of α.  [default: by relaxation]")
@click.option(
    "--score",
    type=click.Choice(("raw", "normalised")),
    help="DiEP: rank by α·β or by N·softmax(α)·β.  [default: by relaxation]",
)
@click.option(
    "--naee-limit",
    type=click.IntRange(min=0),
    default=10_000,
    show_default=True,
    help="NAEE: most subsets of a layer to compare; where there are more, experts go one by one.",
)
@click.option("--plan", type=click.Path(path_type=Path), help="Carry out this plan instead of making one.")
@click.option("--bits", type=click.Choice(WEIGHT_BITS), help="Also round the weights that are left to so many bits.")
@group_size_option
@click.option("--shard", is_flag=True, help="diep, fisher, taylor: spread MODEL over the processes (FSDP2).")
@artifact_options
@common_options
def prune(common: Common, **options: Any) -> dict[str, Any]:
    """Remove experts from MODEL and write the smaller model.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress prune …
    """
    from compress.prune import prune as run

    methods, sparsities = options["method"] or (default_method(),), options["sparsity"]
    single = options | {"method": methods[0], "sparsity": sparsities[0] if sparsities else None}
    if len(methods) > 1 or (sparsities and len(sparsities) > 1):
        return _sweep(common, methods, sparsities, **single)
    return _shown_figures(common, run(_prune_options(common, **single), progress_bar))


def default_method() -> str:
    """DiEP where one of its options is on the command line, for others would ignore it."""
    from compress.prune import DEFAULT_METHOD

    return "diep" if any(map(_is_named, DIEP_OPTIONS)) else DEFAULT_METHOD


def _sweep(common: Common, methods: tuple[str, ...], sparsities: tuple[float, ...] | None, **options: Any) -> dict[str, Any]:
    from compress.compare import CompareOptions
    from compress.report.columns import text_table
    from compress.sweep import cells, sweep
    from engine.errors import OptionError

    _refuse_options(["memory_limit"], "for one artifact at a time, and this makes several")
    _refuse_options(("push_to_hub",), "for one artifact, and a sweep makes several; `compress push` them afterwards")
    if sparsities is None or options["plan_output"] is not None:
        raise OptionError("a sweep needs --sparsity and writes no --plan-output; each artifact carries its plan")
    name = f"{result_name(options['model'])}-sweep"
    base = _prune_options(common, **options | {"output": options["output"] or Path(name)})
    scope = "uniform" if options["uniform"] else options["scope"]
    comparison = CompareOptions(
        models=(),
        text=replace(base.calibration, samples=PICTURE_SEQUENCES),
        speed=False,
        dtype=common.dtype,
        device=chosen_device(common),
        threads=common.threads,
    )
    result = sweep(cells(base, methods, sparsities, scope), comparison, progress_bar)
    if not result:
        return result  # of a process that is not the first
    say(common, table(text_table(result["rows"])))
    say(
        common,
        f"{result['output']}: {len(result['runs'])} artifacts in {result['seconds']:.1f} s; open comparison/index.html",
    )
    return result


@main.command("plan-run")
@click.argument("model", default="demo")
@click.option("--method", type=click.Choice(PRUNE_METHODS), help="Criterion.  [default: as of prune]")
@click.option("--sparsity", type=float, default=0.5, show_default=True, help="Share of all experts to remove.")
@click.option("--samples", type=int, default=128, show_default=True, help="Sequences.")
@click.option("--sequence-length", type=int, help="Tokens a sequence.  [default: 2048 or the model's maximum; demo 256]")
@evaluation_option()
@click.option("--epochs", type=click.IntRange(min=0), default=10, show_default=True, help="DiEP: passes over the text.")
@click.option(
    "--relaxation", type=click.Choice(("paper", "routed", "gated")), default="gated", show_default=True, help="DiEP."
)
@click.option("--start", type=click.Choice(("zero", "fisher")), help="DiEP: start of α.  [default: by relaxation]")
@click.option("--naee-limit", type=click.IntRange(min=0), default=10_000, show_default=True, help="NAEE: most subsets.")
@functools.partial(common_options, devices=PLANNED_DEVICES, device="cpu")
def plan_run(common: Common, **options: Any) -> dict[str, Any]:
    """Say what `compress prune` of MODEL would cost: bytes moved, time and peak memory, before it starts.

    MODEL is a directory with a config.json, a hub id, or 'demo'. Nothing but config.json is read or downloaded. This
    processor is measured for a moment; of others published figures are divided by.
    """
    from calibrate.options import CalibrationOptions
    from compress.methods.diep import DiepOptions
    from compress.run_plan import RunOptions, shown
    from compress.run_plan import plan_run as run

    text = {name: options[name] for name in ("samples", "sequence_length", "evaluation_samples")}
    given = RunOptions(
        calibration=CalibrationOptions(**text),
        diep=DiepOptions(**{name: options[name] for name in ("epochs", "relaxation", "start")}),
        method=options["method"] or default_method(),
        **{name: options[name] for name in ("model", "sparsity", "naee_limit")},
        device=common.device,
        dtype=common.torch_dtype(),
    )
    figures = run(given)
    say(common, table(shown(figures)))
    say(common, f"{figures['device']}: {figures['device_source']}; {figures['calibration']}")
    if not figures["fits"]:
        say(common, f"this does not fit into the {size(figures['device_memory_bytes'])} of the device")
    return figures


@main.command()
@model_argument
@click.option("--experts", type=int, required=True, help="Experts per layer of the result.")
@click.option(
    "--method", type=click.Choice(MERGE_METHODS), default="ream", show_default=True, help="How experts are grouped."
)
@artifact_options
@common_options
def merge(common: Common, **options: Any) -> dict[str, Any]:
    """Merge similar experts of MODEL and write the smaller model.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress merge …
    """
    from compress.plans.selection import Budget
    from compress.prune import PruneOptions, prune

    budget = Budget(experts=options["experts"], scope="layer")
    run = PruneOptions(budget=budget, method=options["method"], **_artifact_options(common, **options))
    return _shown_figures(common, prune(run, progress_bar))


@main.command()
@model_argument
@click.option("--bits", type=click.Choice(WEIGHT_BITS), required=True, help="Of each weight.")
@group_size_option
@click.option("--experts-only", is_flag=True, help="Leave attention and dense feed-forward networks as they are.")
@click.option("--quantize-head", is_flag=True, help="Round the output head too, to 8 bits: every token reads all of it.")
@click.option(
    "--activation-aware", is_flag=True, help="First scale input channels by the size of their activations on --data."
)
@output_option("MODEL-BITS-bit")
@text_options(32)
@evaluation_option("0 for none, and without --activation-aware no text is read")
@overwrite_option
@resume_option
@push_options
@common_options
def quantize(common: Common, **options: Any) -> dict[str, Any]:
    """Round the weights of MODEL to 8 or 4 bits, and store them in the form that vLLM reads.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default). Router, norms, embeddings and
    biases keep their dtype, and so does the output head unless --quantize-head is given.
    """
    from compress.quantize import QuantizeOptions
    from compress.quantize import quantize as run
    from compress.rounding.quantizer import QuantiserOptions

    given, rounding = _job_options(common, options, "quantize"), [field.name for field in fields(QuantiserOptions)]
    if options["output"] is None:
        given["output"] = Path(f"{result_name(options['model'])}-{options['bits']}-bit")
    figures = run(
        QuantizeOptions(
            quantiser=QuantiserOptions(**{name: options[name] for name in rounding}),
            activation_aware=options["activation_aware"],
            method="quantize",
            **given,
        ),
        progress_bar,
    )
    return _shown_figures(common, figures)


@main.command()
@model_argument
@click.option("--ffns", type=int, help="Experts of each layer in its one FFN.  [default: experts per token]")
@click.option(
    "--select",
    type=click.Choice(SELECTIONS),
    default="usage",
    show_default=True,
    help="Which: the most used, those of the highest REAP score, the mean of all, or any.",
)
@input_options
@dense_training_options
@result_options
@common_options
def densify(common: Common, **options: Any) -> dict[str, Any]:
    """Make an ordinary dense model of MODEL: K experts of each layer become one FFN.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default). The result is of the dense family
    that fits and loads wherever that does; without training it is far from MODEL. Of an encoder-decoder both stacks become
    dense, and --data is a .jsonl of pairs: `source` and `target`, or `instruction`, `input` and `output`.

    Several processes share the work: torchrun --nproc-per-node N --no-python compress densify …
    """
    from compress.dense.dense_training import DenseTrainingOptions
    from compress.densify import DensifyOptions, densify
    from compress.densify_encoder_decoder import densify_encoder_decoder
    from engine.checkpoint.checkpoint import resolve
    from engine.transformers_models.encoder_decoder import is_encoder_decoder

    names = [field.name for field in fields(DenseTrainingOptions) if field.name != "seed"]
    training = DenseTrainingOptions(**{name: options[name] for name in names}, seed=common.seed)
    given = _job_options(common, options, "densify")
    run = densify_encoder_decoder if is_encoder_decoder(resolve(options["model"])) else densify
    figures = run(DensifyOptions(ffns=options["ffns"], select=options["select"], training=training, **given), progress_bar)
    _shown_figures(common, figures)
    errors = figures["block_error_per_layer"]
    say(common, f"{figures['ffns']} experts of each layer as one FFN: {figures['family_note']}")
    say(common, f"a layer's output was off by {min(errors):.0%} to {max(errors):.0%} before any training")
    if weights := figures.get("router_weight_error_per_layer"):
        say(common, f"of that, the mean router probability alone makes {min(weights):.1%} to {max(weights):.1%}")
    if any(dropped := figures.get("dropped_share_per_layer", ())):
        say(common, f"beyond the capacity of an expert were {min(dropped):.1%} to {max(dropped):.1%} of a layer's tokens")
    if gates := figures.get("shared_gate_error_per_layer"):
        say(common, f"of that, the mean gate of the shared expert alone makes {min(gates):.1%} to {max(gates):.1%}")
    for name, part in figures["training"].items():
        say(common, f"{name}: {part['steps']} steps, loss {part['loss_first']:.3f} to {part['loss_last']:.3f}")
    return figures


@main.command()
@click.option("--teacher", help="Checkpoint directory, hub id or 'demo'; left out for --recipe sft.")
@click.option("--student", required=True, help="The model to train: a dense one, or a mixture such as a pruned one.")
@click.option(
    "--recipe",
    type=click.Choice(RECIPES),
    default="kd",
    show_default=True,
    help="On the data's responses: sft without a teacher, kd towards it. On the student's: gkd; with all experts of the "
    "teacher: all; with sampled ones: ka; with its router trained for the student: sar. layer-mse: each block's output. "
    "Of classifiers: sft, kd, srrl, or the student as a mixture of experts: moe-kd.",
)
@click.option("--divergence", type=click.Choice(DIVERGENCES), help="Of the predictions.  [default: the recipe's own]")
@click.option("--data", help="Prompts with responses (.jsonl), or text: file, folder, .jsonl, 'stdlib' or a dataset id.")
@instruction_options
@click.option("--sequence-length", type=int, help="Tokens a sequence of text.  [default: 2048 or the maximum; demo 256]")
@click.option("--steps", type=click.IntRange(min=1), help="Of training.  [default: what --epochs says; on text 600]")
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True, help="Over prompts with responses.")
@click.option(
    "--learning-rate", type=float, help="Of AdamW, at its highest.  [default: 1/4 over the hidden size, at most 1/640]"
)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Of both predictions when compared.")
@click.option(
    "--teacher-cache",
    metavar="exact|K",
    help="kd: run the teacher once over all training data and keep its predictions on disk, as they are or the K most "
    "probable tokens of each.",
)
@click.option("--ka-samples", type=int, default=2, show_default=True, help="ka: teacher forwards, and steps, a response.")
@click.option("--ka-probability", type=float, default=0.05, show_default=True, help="ka: how often experts are sampled.")
@click.option(
    "--ka-draw",
    type=click.Choice(["layer", "token"]),
    default="layer",
    show_default=True,
    help="ka: one draw for a layer and forward, or one for each token.",
)
@click.option("--router-learning-rate", type=float, default=1e-5, show_default=True, help="sar: of the teacher's router.")
@click.option("--load-balance-weight", type=float, default=0.01, show_default=True, help="sar: of the router's balance.")
@click.option(
    "--select-by",
    type=click.Choice(METRICS),
    default="perplexity",
    show_default=True,
    help="What tells the best state, of responses on data set aside.",
)
@step_options
@click.option("--samples", type=int, default=128, show_default=True, help="Sequences for skip tables of a mixture.")
@click.option("--evaluation-samples", type=int, default=64, show_default=True, help="Held-out sequences or examples.")
@classifier_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory of the result.  [default: STUDENT-RECIPE]")
@overwrite_option
@resume_option
@push_options
@common_options
def distill(common: Common, **options: Any) -> dict[str, Any]:
    """Train a student towards a teacher: on text, or on responses to prompts.

    Teacher and student need the same tokenizer. Kept is the best state on data set aside, in the student's shape.

    Both may be classifiers of images or texts instead: --data is a folder of images, an .npz, a .jsonl of text and label, or
    'digits' (the default). Defaults are then 240 epochs, batches of 64, rate 0.05, temperature 4; the last state is kept.

    Several processes share the work: torchrun --nproc-per-node N --no-python compress distill …
    """
    from calibrate.instructions import Limits
    from compress.distill import distill as run
    from compress.distillation.inputs import DistillOptions
    from compress.distillation.response_distillation import KnowledgeAugmentation
    from engine.checkpoint.checkpoint import resolve
    from engine.transformers_models.classifier import is_classifier

    if is_classifier(resolve(options["student"])):
        return _distill_classifier(common, options)
    _refuse_options(CLASSIFIER_OPTIONS, "of classifiers, and the student is a language model")
    given = _job_options(common, options | {"model": options["student"]}, options["recipe"])
    own = {field.name for field in fields(DistillOptions)} & options.keys() - given.keys()
    figures = run(
        DistillOptions(
            augmentation=KnowledgeAugmentation(
                options["ka_samples"], options["ka_probability"], options["ka_draw"] == "token"
            ),
            limits=Limits(options["max_length"], options["max_prompt_length"]),
            template=options["prompt_template"],
            **{name: options[name] for name in own},
            **given,
        ),
        progress_bar,
    )
    _shown_figures(common, figures)
    say(
        common,
        f"{figures['recipe']}: {figures['steps']} steps, loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}",
    )
    before, after = figures["metric_before"], figures["metric_after"]
    say(common, f"{figures['metric_name']} of responses: {before:.3f} to {after:.3f}")
    say(common, "time: " + ", ".join(f"{name} {share:.0%}" for name, share in figures["time_share"].items()))
    if left := figures["prompts_left_out"]:
        say(common, f"{left} prompts are longer than --max-prompt-length and were left out")
    return figures


def _distill_classifier(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from compress.classifiers.distill import ClassifierOptions, distill_classifier

    own = {field.name for field in fields(ClassifierOptions)}
    job = {"student", "output", "data", "overwrite", "resume"}
    _refuse_options(options.keys() - own - job, "of language models, and the student is a classifier")
    given = _job_options(common, options | {"model": options["student"]}, options["recipe"])
    # What was not named on the command line has the defaults of classifiers.
    named = {name: options[name] for name in own & options.keys() - given.keys() if _is_named(name)}
    figures = distill_classifier(ClassifierOptions(**named, **given), progress_bar)
    rows = [["", "before", "after"], ["accuracy", *(number(figures[f"metric_{when}"], 4) for when in ("before", "after"))]]
    if figures["probe_after"] is not None:
        rows.append(["linear probe", *(number(figures[f"probe_{when}"], 4) for when in ("before", "after"))])
    rows.append(["parameters", *(f"{figures[f'parameters_{when}']:,}" for when in ("before", "after"))])
    say(common, table(rows))
    if figures["teacher_accuracy"] is not None:
        say(common, f"teacher: {figures['teacher_accuracy']:.4f}; all on {figures['evaluation']}")
    if figures["experts"]:
        say(common, f"without its {figures['experts']} experts: {figures['accuracy_without_mixture']:.4f}")
    say(
        common,
        f"{figures['recipe']}: {figures['steps']} steps, loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}\n"
        f"{figures['artifact']}: written in {figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}",
    )
    return figures


def _is_named(name: str) -> bool:
    """Whether an option is on the command line."""
    source = click.get_current_context().get_parameter_source
    return source(name) is click.core.ParameterSource.COMMANDLINE


def _refuse_options(names: Iterable[str], why: str) -> None:
    """Raise OptionError for the first that is on the command line."""
    from engine.errors import OptionError

    if wrong := sorted(name for name in names if _is_named(name)):
        raise OptionError(f"--{wrong[0].replace('_', '-')} is {why}; leave it out")


def _shown_figures(common: Common, figures: dict[str, Any]) -> dict[str, Any]:
    """Print what a smaller model cost and gained."""
    rows = [
        ["", "before", "after"],
        ["experts", str(figures["experts_before"]), str(figures["experts_after"])],
        ["parameters", f"{figures['parameters_before']:,}", f"{figures['parameters_after']:,}"],
        ["weights", size(figures["bytes_before"]), size(figures["bytes_after"])],
        ["perplexity", number(figures["perplexity_before"]), number(figures["perplexity_after"])],
    ]
    if "token_accuracy_after" in figures:
        rows.append(["token accuracy", *(number(figures[f"token_accuracy_{when}"], 3) for when in ("before", "after"))])
    say(common, table(rows))
    if figures["experts_per_layer"]:
        say(common, f"experts per layer: {' '.join(map(str, figures['experts_per_layer']))}")
    if bits := figures.get("weight_bits"):
        share, off = figures["bytes_not_quantized_share"], figures["relative_weight_error"]
        say(common, f"weights of {bits} bits are off by {off or 0:.2%}; {share:.0%} of the bytes keep their dtype")
    if "naee" in figures:
        say(
            common,
            f"naee: {figures['naee']['search']} search; a layer has up to {figures['naee']['subsets']} subsets",
        )
    say(
        common,
        f"{figures['artifact']}: written in {figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}",
    )
    if figures.get("loading_note"):
        say(common, f"note: {figures['loading_note']}")
    if figures.get("plots", True) == []:
        say(common, "no plots: matplotlib is not installed (pip install moe-compress[plots])")
    return figures


def _prune_options(common: Common, **given: Any) -> Any:
    from compress.methods.diep import DiepOptions
    from compress.plans.selection import Budget
    from compress.prune import DEFAULT_SCOPE, PruneOptions
    from compress.rounding.quantizer import QuantiserOptions
    from engine.errors import OptionError

    if given["plan"] is None and (given["sparsity"] is None) == (given["experts"] is None):
        raise OptionError("give --sparsity or --experts (one of them), or a ready-made --plan")
    if given["plan"] is not None and (given["sparsity"] is not None or given["experts"] is not None):
        raise OptionError("--plan says which experts stay; leave out --sparsity and --experts")
    if given["plan"] is not None and given["merge"] != "none":
        raise OptionError("--plan says what becomes of each expert; leave out --merge")
    budget = Budget(
        sparsity=given["sparsity"],
        experts=given["experts"],
        scope="uniform" if given["uniform"] else given["scope"] or DEFAULT_SCOPE.get(given["method"], "global"),
        min_experts=given["min_experts"],
    )
    return PruneOptions(
        budget=None if given["plan"] is not None else budget,
        method=given["method"],
        merge=given["merge"],
        naee_limit=given["naee_limit"],
        diep=DiepOptions(
            relaxation=given["relaxation"],
            epochs=given["epochs"],
            batch_size=given["batch_size"],
            learning_rate=given["learning_rate"],
            reconstruction_weight=given["reconstruction_weight"],
            pressure=given["pressure"],
            start=given["start"],
            score=given["score"],
            seed=common.seed,
        ),
        plan=given["plan"],
        quantiser=QuantiserOptions(given["bits"], given["group_size"]) if given["bits"] else None,
        shard=given["shard"],
        **_artifact_options(common, **given),
    )


def _artifact_options(common: Common, **given: Any) -> dict[str, Any]:
    """What `artifact_options` and MODEL say, as fields of PruneOptions."""
    from compress.dense.dense_training import TEXT_STEPS
    from compress.distillation.recover import RecoverOptions
    from compress.distillation.whole_recovery import WholeRecoveryOptions

    recover = RecoverOptions(given["recover_steps"], given["recover_learning_rate"], seed=common.seed)
    steps = given["distill_steps"] or (TEXT_STEPS if given["distill"] else 0)
    distill = WholeRecoveryOptions(steps, seed=common.seed)
    return _job_options(common, given, given["method"]) | {"recover": recover, "distill": distill}


def _job_options(common: Common, given: dict[str, Any], name: str) -> dict[str, Any]:
    """What `input_options`, `result_options` and MODEL say, as fields of JobOptions; `name` ends that of the output."""
    from calibrate.options import CalibrationOptions

    return {
        "model": given["model"],
        "output": given["output"] or Path(f"{result_name(given['model'])}-{name}"),
        "calibration": CalibrationOptions(
            data=given["data"],
            samples=given["samples"],
            sequence_length=given["sequence_length"],
            evaluation_samples=given["evaluation_samples"],
            seed=common.seed,
        ),
        "statistics": given.get("statistics"),
        "plan_output": given.get("plan_output"),
        "dtype": common.torch_dtype(),
        "device": chosen_device(common),
        "overwrite": given["overwrite"],
        "resume": given["resume"],
        "memory_limit": given.get("memory_limit"),
    }


@main.command()
@model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Statistics file to write.")
@text_options(128)
@memory_limit_option
@overwrite_option
@resume_option
@common_options
def calibrate(common: Common, **options: Any) -> dict[str, Any]:
    """Run text through MODEL once and save what every method reads.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress calibrate …
    """
    from calibrate.options import CalibrationOptions
    from compress.statistics_file import calibrate_to_file

    result = calibrate_to_file(
        options["model"],
        options["output"],
        CalibrationOptions(options["data"], options["samples"], options["sequence_length"], 0, common.seed),
        dtype=common.torch_dtype(),
        device=chosen_device(common),
        overwrite=options["overwrite"],
        resume=options["resume"],
        memory_limit=options["memory_limit"],
        progress=progress_bar,
    )
    say(
        common,
        f"{result['statistics']}: {result['tokens']:,} tokens in {result['seconds']:.1f} s, "
        f"peak memory {size(result['peak_memory_bytes'])}",
    )
    return result


@main.command()
@click.argument("path", default="demo")
@revision_option
@click.option("--checksums", is_flag=True, help="Also compare every file with the artifact's checksums.")
@common_options
def inspect(common: Common, path: str, checksums: bool) -> dict[str, Any]:
    """Say what a checkpoint or artifact is, and check that it is whole."""
    from engine.inspect import inspect as run

    result = run(path, checksums=checksums, progress=progress_bar)
    shown = {key: value for key, value in result.items() if key != "provenance" and value is not None}
    say(common, table([[key.replace("_", " "), _shown(key, value)] for key, value in shown.items()]))
    if result["provenance"]:
        method, source = result["provenance"].get("method"), result["provenance"].get("source", {}).get("model")
        say(common, "".join(each for each in f"made by method {method} from {source}" if each.isprintable()))
    return result


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repo_id")
@private_option
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is there.")
@common_options
def push(common: Common, **options: Any) -> dict[str, Any]:
    """Upload the artifact in DIRECTORY to the hub as REPO_ID: owner/name, or a name of one's own.

    The artifact is compared with its checksums, and its files go there in one commit, with its model card. Log in with
    `hf auth login` before, or set HF_TOKEN.
    """
    from compress.push import push as run

    result = run(options["directory"], options["repo_id"], options["private"], options["overwrite"])
    say(common, f"{result['url']}: {result['files']} files, {size(result['bytes'])}, commit {result['commit'][:12]}")
    return result


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key.startswith("bytes"):
        return size(value)
    if isinstance(value, list):
        return " ".join(map(str, value)) or "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@main.command()
@model_argument
@text_options(32)
@click.option(
    "--metric",
    type=click.Choice((*METRICS, CLASSIFIER_METRIC)),
    default="perplexity",
    show_default=True,
    help="Figure; of a classifier it is always accuracy.",
)
@click.option("--probe", is_flag=True, help="Classifiers: accuracy of a linear classifier trained on the features.")
@backend_option
@instruction_options
@click.option(
    "--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="rouge-l: times to sample responses."
)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="rouge-l: of the sampling; 0 is greedy.")
@click.option(
    "--tasks", help="Tasks of lm-evaluation-harness, names or YAML files, separated by commas, instead of a metric."
)
@limit_option
@click.option(
    "--split",
    type=click.Choice(("held-out", "calibration", "all")),
    default="held-out",
    show_default=True,
    help="Part of the text; calibration never sees 'held-out'.",
)
@memory_limit_option
@common_options
def evaluate(common: Common, **options: Any) -> dict[str, Any]:
    """Measure the quality of MODEL.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).

    It may be a classifier of images or texts: --data is then a folder of images, an .npz, a .jsonl of text and label, or
    'digits', by default what it was distilled on.
    """
    from calibrate.options import CalibrationOptions
    from compress.evaluate import evaluate_model, evaluate_tasks
    from engine.checkpoint.checkpoint import resolve
    from engine.errors import OptionError
    from engine.transformers_models.classifier import is_classifier

    if is_classifier(resolve(options["model"])) or options["tasks"] or options["metric"] != "perplexity":
        _refuse_options(["memory_limit"], "for perplexity, which is measured layer by layer")
    if is_classifier(resolve(options["model"])):
        return _evaluate_classifier(common, options)
    if options["metric"] == CLASSIFIER_METRIC or options["probe"]:
        raise OptionError(
            f"{options['model']}: is no classifier, so it has no accuracy; take --metric perplexity or rouge-l"
        )
    if options["backend"] != "auto" and (options["tasks"] or options["metric"] != "perplexity"):
        raise OptionError("--backend is for perplexity and accuracy; leave it out")
    device = chosen_device(common)
    if options["tasks"]:
        result = evaluate_tasks(options["model"], options["tasks"].split(","), limit=options["limit"], device=device)
        say(common, table([["task", "value"], *([name, str(value)] for name, value in result["value"].items())]))
        return result
    if options["metric"] == "rouge-l":
        return _evaluate_rouge(common, device, options)
    result = evaluate_model(
        options["model"],
        CalibrationOptions(options["data"], options["samples"], options["sequence_length"], 0, common.seed),
        split=options["split"],
        dtype=common.torch_dtype(),
        device=common.device,
        backend=options["backend"],
        memory_limit=options["memory_limit"],
        progress=progress_bar,
    )
    say(common, f"{result['metric']} {result['value']:.4f} on {result['tokens']:,} tokens in {result['seconds']:.1f} s")
    return result


def _evaluate_classifier(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from compress.classifiers.accuracy import evaluate_accuracy
    from engine.errors import OptionError

    if options["tasks"] or (_is_named("metric") and options["metric"] != CLASSIFIER_METRIC):
        raise OptionError(f"{options['model']}: is a classifier; its metric is {CLASSIFIER_METRIC}")
    result = evaluate_accuracy(
        options["model"],
        options["data"],
        split=options["split"],
        samples=options["samples"] if _is_named("samples") else None,
        length=options["max_length"],
        backend=options["backend"],
        dtype=common.torch_dtype(),
        device=common.device,
        probes=options["probe"],
        seed=common.seed,
        progress=progress_bar,
    )
    part = "" if result["split"] == "all" else f"{result['split']} "
    say(
        common,
        f"{result['metric']} {result['value']:.4f} on {result['examples']} {part}examples of {result['data']} in "
        f"{result['seconds']:.1f} s",
    )
    return result


def _evaluate_rouge(common: Common, device: str, options: dict[str, Any]) -> dict[str, Any]:
    from calibrate.instructions import Limits
    from compress.distillation.rouge import evaluate_rouge
    from engine.generation.sampling import SamplingOptions

    result = evaluate_rouge(
        options["model"],
        options["data"],
        Limits(options["max_length"], options["max_prompt_length"]),
        samples=options["samples"],
        seeds=options["seeds"],
        sampling=SamplingOptions(options["temperature"]),
        template=options["prompt_template"],
        seed=common.seed,
        dtype=common.torch_dtype(),
        device=device,
        progress=progress_bar,
    )
    spread = "" if result["standard_deviation"] is None else f" ± {result['standard_deviation']:.4f}"
    say(common, f"rouge-l {result['value']:.4f}{spread} on {result['examples']} examples in {result['seconds']:.1f} s")
    return result


@main.command()
@model_argument
@click.option("-p", "--prompt", multiple=True, required=True, help="Text to continue; may be given several times.")
@click.option("-n", "--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="New tokens at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Smallest set with this probability.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Likeliest k only; 0 for all.")
@click.option("--stop", multiple=True, help="Text to stop at; may be given several times.")
@click.option(
    "--skip-threshold",
    type=float,
    default=0.0,
    show_default=True,
    help="Skip unneeded experts: 0 off, 1 the calibrated rule, higher skips more.",
)
@skip_min_experts_option
@backend_option
@click.option("--draft", help="A smaller model with the same tokenizer, to write ahead; the text stays MODEL's.")
@click.option(
    "--draft-tokens", type=click.IntRange(1, 63), default=4, show_default=True, help="It writes before MODEL looks."
)
@click.option("--checksums", is_flag=True, help="First compare every file with the artifact's checksums.")
@kv_cache_dtype_option
@common_options
def generate(common: Common, **options: Any) -> dict[str, Any]:
    """Continue a text with MODEL, then report what it cost.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).
    """
    from engine.generation.generate import Engine
    from engine.generation.sampling import SamplingOptions

    engine = Engine.open(
        options["model"],
        device=common.device,
        dtype=common.dtype,
        threads=common.threads,
        skip_threshold=options["skip_threshold"],
        skip_min_experts=options["skip_min_experts"],
        backend=options["backend"],
        checksums=options["checksums"],
        draft=options["draft"],
        draft_tokens=options["draft_tokens"],
        kv_cache_dtype=options["kv_cache_dtype"],
        progress=progress_bar,
    )
    prompts = list(options["prompt"])
    generations = engine.generate(
        prompts,
        max_new_tokens=options["tokens"],
        sampling=SamplingOptions(options["temperature"], options["top_p"], options["top_k"], common.seed),
        stop=list(options["stop"]),
    )
    report = engine.report()
    for prompt, generation in zip(prompts, generations, strict=True):
        say(common, f"{prompt}{generation.text}\n")
    say(
        common,
        f"{report.generated_tokens} tokens, {number(report.tokens_per_second, 1)} tokens/s, first after "
        f"{report.time_to_first_token_seconds:.2f} s, loaded in {report.load_seconds:.2f} s, "
        f"peak memory {size(report.peak_memory_bytes)} (resident: weights {size(report.weights_resident_bytes)}, "
        f"KV cache {size(report.kv_cache_bytes)}, other {size(report.other_memory_bytes)}), "
        f"experts skipped {report.experts_skipped_share:.0%}",
    )
    if report.tokens_per_target_forward is not None:
        accepted = number(report.draft_acceptance_rate, 2)
        say(
            common,
            f"drafted tokens kept {accepted}, {report.tokens_per_target_forward:.2f} tokens for each forward of the model",
        )
    texts = [generation.text for generation in generations]
    return {
        "text": texts[0] if len(texts) == 1 else texts,
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": report.generated_tokens,
        "time_to_first_token_seconds": report.time_to_first_token_seconds,
        "tokens_per_second": report.tokens_per_second,
        "peak_memory_bytes": report.peak_memory_bytes,
        "resident_memory_bytes": report.resident_memory_bytes,
        "weights_resident_bytes": report.weights_resident_bytes,
        "kv_cache_bytes": report.kv_cache_bytes,
        "other_memory_bytes": report.other_memory_bytes,
        "load_seconds": report.load_seconds,
        "experts_skipped_share": report.experts_skipped_share,
        "experts_skipped_share_per_layer": report.experts_skipped_share_per_layer,
        "weights_read_bytes_per_token": report.weights_read_bytes_per_token,
        "draft_acceptance_rate": report.draft_acceptance_rate,
        "tokens_per_target_forward": report.tokens_per_target_forward,
    }


@main.command()
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="To listen on; 0 for a free one."
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    help="That clients have to send; several for several clients. Others can read a command line; they cannot read the "
    "variable COMPRESS_API_KEY, which holds one a line.",
)
@click.option("--allow-anonymous", is_flag=True, help="Let other machines in without a key.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="By which clients may name the server; several for several.  [default: of a local address that and localhost, "
    "else any]",
)
@click.option("--served-model-name", help="By which clients ask for MODEL.  [default: MODEL, of a directory its name]")
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=256, show_default=True, help="Requests that may wait; more get 429."
)
@click.option(
    "--max-batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Requests answered at the same time."
)
@click.option("--max-model-len", type=click.IntRange(min=1), help="Tokens of prompt and answer.  [default: the model's]")
@click.option(
    "--kv-cache-memory",
    type=ByteSize(),
    help="For keys and values, like 2GB.  [default: for a full batch, at most a quarter of what is free]",
)
@kv_cache_dtype_option
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="Seconds until a request is given up.",
)
@click.option(
    "--skip-threshold",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Skip unneeded experts: 0 off, 1 the calibrated rule. A request may ask for less.",
)
@common_options
def serve(common: Common, **options: Any) -> dict[str, Any]:
    """Serve MODEL over HTTP, to any client of OpenAI's interface, and a page to try it on.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default). With --json, one object with
    `url` and `model` is printed as soon as requests are taken.
    """
    from engine.server.serve import ServeOptions, keys_from
    from engine.server.serve import serve as run

    given = ServeOptions(
        model=options["model"],
        host=options["host"],
        port=options["port"],
        api_keys=keys_from(options["api_keys"]),
        allow_anonymous=options["allow_anonymous"],
        allowed_hosts=options["allowed_hosts"],
        served_model_name=options["served_model_name"],
        max_queue=options["max_queue"],
        max_batch_size=options["max_batch_size"],
        max_model_length=options["max_model_len"],
        kv_cache_bytes=options["kv_cache_memory"],
        kv_cache_dtype=options["kv_cache_dtype"],
        request_timeout=options["request_timeout"],
        skip_threshold=options["skip_threshold"],
        device=common.device,
        dtype=common.dtype,
        threads=common.threads,
    )

    def ready(url: str) -> None:
        say(common, f"{given.name} is served at {url}/v1, and a page at {url}/")
        if common.json:
            click.echo(json.dumps({"url": url, "model": given.name}))
            sys.stdout.flush()

    run(given, ready)
    return {}


@main.command()
@click.argument("models", nargs=-1)
@speed_options
@click.option("-d", "--depth", type=int, default=0, show_default=True, help="Tokens already in the cache.")
@click.option("-b", "--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "-o",
    "--output-format",
    type=click.Choice(("md", "csv", "json", "jsonl")),
    default="md",
    show_default=True,
    help="How rows are printed.",
)
@click.option("--skip-threshold", type=float, default=0.0, show_default=True, help="Skip unneeded experts.")
@skip_min_experts_option
@click.option(
    "--backend",
    type=click.Choice(("torch", "transformers", "onnx")),
    multiple=True,
    help="torch is ours; may be given several times.  [default: torch; onnx for an exported model]",
)
@click.option(
    "--concurrency",
    type=Several(click.IntRange(min=1), "N[,N…]"),
    help="Instead: so many requests at once through the scheduler of `compress serve`, of one model.",
)
@kv_cache_dtype_option
@load_options
@common_options
def bench(common: Common, **options: Any) -> dict[str, Any]:
    """Measure tokens/s and memory of one or more models, side by side, each in its own process; of classifiers examples/s.

    With --server, measure a running server instead, as its clients see it; with --concurrency, the scheduler.
    """
    from engine.bench.side_by_side import bench_models, format_rows
    from engine.checkpoint.checkpoint import resolve
    from engine.errors import OptionError
    from engine.transformers_models.classifier import is_classifier

    if options["server"] and (options["models"] or options["concurrency"]):
        raise OptionError("--server measures the model that runs there; leave out models and --concurrency")
    if options["server"]:
        return _bench_server(common, options)
    if options["concurrency"]:
        return _bench_concurrency(common, options)
    if (kinds := {is_classifier(resolve(model)) for model in options["models"]}) == {True}:
        return _bench_classifiers(common, options)
    if len(kinds) > 1:
        raise OptionError("classifiers and language models have other tests; measure them one kind at a time")
    rows = bench_models(
        list(options["models"]) or ["demo"],
        list(options["backend"]),
        prompt_tokens=options["prompt_tokens"],
        generated_tokens=options["generated_tokens"],
        repetitions=options["repetitions"],
        depth=options["depth"],
        batch=options["batch"],
        skip_threshold=options["skip_threshold"],
        skip_min_experts=options["skip_min_experts"],
        device=common.device,
        dtype=common.dtype,
        threads=common.threads,
        seed=common.seed,
        kv_cache_dtype=options["kv_cache_dtype"],
    )
    say(common, format_rows(rows, options["output_format"]))
    return {"rows": rows}


def _bench_classifiers(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from engine.bench.classifiers import HEAD, bench_classifiers, cells
    from engine.bench.side_by_side import format_rows

    _refuse_options(("generated_tokens", "depth", "skip_threshold", "skip_min_experts"), "not for classifiers")
    rows = bench_classifiers(
        list(options["models"]),
        list(options["backend"]),
        repetitions=options["repetitions"],
        progress=lambda rounds: progress_bar(rounds, "rounds"),
        device=common.device,
        dtype=common.dtype,
        threads=common.threads,
        batch=options["batch"],
        seed=common.seed,
        **({"tokens": options["prompt_tokens"]} if _is_named("prompt_tokens") else {}),
    )
    say(common, format_rows(rows, options["output_format"], HEAD, cells))
    return {"rows": rows}


def _bench_server(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from engine.bench.load_test import LoadOptions, load_test, result_block

    names = [field.name for field in fields(LoadOptions) if field.name != "seed"]
    figures = load_test(LoadOptions(**{name: options[name] for name in names}, seed=common.seed))
    say(common, result_block(figures))
    for error in figures["errors"]:
        say(common, f"failed: {error}")
    return figures


def _bench_concurrency(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from engine.bench.concurrency import bench_concurrency
    from engine.errors import OptionError
    from engine.generation.generate import Engine

    if len(options["models"]) > 1 or options["backend"]:
        raise OptionError("--concurrency measures one model, and our own scheduler; leave out --backend and other models")
    engine = Engine.open(
        next(iter(options["models"]), "demo"),
        device=common.device,
        dtype=common.dtype,
        threads=common.threads,
        skip_threshold=options["skip_threshold"],
        skip_min_experts=options["skip_min_experts"],
        kv_cache_dtype=options["kv_cache_dtype"],
        progress=progress_bar,
    )
    rows = bench_concurrency(
        engine,
        options["concurrency"],
        prompt_tokens=options["prompt_tokens"],
        generated_tokens=options["generated_tokens"],
        repetitions=options["repetitions"],
        seed=common.seed,
    )
    head = ["requests", "tokens/s", "of the first", "prefill tokens/s", "KV cache"]
    cells = [
        [
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_to_first']:.2f}×",
            f"{row['prefill_tokens_per_second']:.1f}",
            size(row["kv_cache_bytes"]),
        ]
        for row in rows
    ]
    say(common, table([head, *cells]))
    return {"rows": rows}


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory for JSON, CSV, plots and an HTML page.")
@click.option("--overwrite", is_flag=True, help="Replace an existing comparison.")
@click.option("--data", help="Text: file, folder, .jsonl, 'stdlib' or a dataset id; the same for all models.")
@click.option("--samples", type=click.IntRange(min=0), default=32, show_default=True, help="Held-out sequences; 0 for none.")
@click.option("--sequence-length", type=int, help="Tokens a sequence.  [default: the shortest default of the models]")
@click.option(
    "--calibration-samples",
    type=click.IntRange(min=0),
    default=PICTURE_SEQUENCES,
    show_default=True,
    help="Sequences for the plots of expert usage and similarity, with --output; 0 for none.",
)
@click.option(
    "--tasks", help="Tasks of lm-evaluation-harness, names or YAML files, separated by commas, besides perplexity."
)
@limit_option
@click.option("--speed/--no-speed", default=True, show_default=True, help="Measure tokens/s and memory.")
@speed_options
@click.option(
    "--skip-threshold",
    type=float,
    default=0.0,
    show_default=True,
    help="Skip unneeded experts, in perplexity and speed, of the models that have tables for it.",
)
@common_options
def compare(common: Common, **options: Any) -> dict[str, Any]:
    """Compare the quality, size, speed and memory of MODELS, in one run.

    Each is a checkpoint directory, a hub id, or 'demo', the built-in model.
    """
    from calibrate.options import CalibrationOptions
    from compress.compare import CompareOptions
    from compress.compare import compare as run

    samples, length = options["calibration_samples"], options["sequence_length"]
    result = run(
        CompareOptions(
            models=options["models"],
            output=options["output"],
            text=CalibrationOptions(options["data"], samples, length, options["samples"], common.seed),
            tasks=tuple(options["tasks"].split(",")) if options["tasks"] else (),
            limit=options["limit"],
            speed=options["speed"],
            prompt_tokens=options["prompt_tokens"],
            generated_tokens=options["generated_tokens"],
            repetitions=options["repetitions"],
            skip_threshold=options["skip_threshold"],
            dtype=common.dtype,
            device=common.device,
            threads=common.threads,
            overwrite=options["overwrite"],
        ),
        progress_bar,
    )
    say(common, table(text_table(result["rows"])))
    for note in result["notes"]:
        say(common, note)
    if result["output"]:
        say(common, f"{result['output']}: written; open {Path(result['output']) / 'index.html'}")
    return result


@main.command()
@model_argument
@click.option(
    "--format", "form", type=click.Choice(EXPORT_FORMATS), default="onnx", show_default=True, help="What is written."
)
@click.option(
    "--precision", type=click.Choice(EXPORT_PRECISIONS), default="float32", show_default=True, help="Of the weights."
)
@click.option(
    "--experts",
    type=click.Choice(EXPERT_FORMS),
    default="moe",
    show_default=True,
    help="Operators: those of onnxruntime for mixtures and attention, or standard ones only.",
)
@click.option("--skip-threshold", type=float, default=0.0, show_default=True, help="Skip unneeded experts, in the graph.")
@skip_min_experts_option
@click.option("--data", help="Classifiers: examples for int8 and for the comparison.  [default: those it was distilled on]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory of the result.  [default: MODEL-FORMAT]")
@overwrite_option
@push_options
@common_options
def export(common: Common, **options: Any) -> dict[str, Any]:
    """Write MODEL for another runtime, then compare it with the engine; where they differ, nothing is left.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default). An encoder-decoder becomes two
    graphs, the encoder's and the decoder's.
    """
    from compress.export.decoder import ExportOptions
    from compress.export.decoder import export as export_decoder
    from compress.export.encoder_decoder import export_encoder_decoder
    from engine.checkpoint.checkpoint import resolve
    from engine.transformers_models.classifier import is_classifier
    from engine.transformers_models.encoder_decoder import is_encoder_decoder

    if is_classifier(resolve(options["model"])):
        return _export_classifier(common, options)
    _refuse_options(("data",), "of classifiers, and this is a language model")
    run = export_encoder_decoder if is_encoder_decoder(resolve(options["model"])) else export_decoder
    figures = run(
        ExportOptions(
            model=options["model"],
            output=options["output"] or Path(f"{result_name(options['model'])}-{options['form']}"),
            format=options["form"],
            **{name: options[name] for name in ("precision", "experts", "skip_threshold", "skip_min_experts", "overwrite")},
            threads=common.threads,
        ),
        progress_bar,
    )
    say(
        common,
        f"{figures['artifact']}: {size(figures['bytes'])}, logits off by at most {figures['max_abs_logit_difference']:.1e}, "
        f"in {figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}",
    )
    if figures["tokenizer_problem"]:
        say(common, f"note: onnxruntime-genai cannot read the tokenizer ({figures['tokenizer_problem']}); give it token ids")
    return figures


def _export_classifier(common: Common, options: dict[str, Any]) -> dict[str, Any]:
    from compress.export.classifier import ClassifierExportOptions, export_classifier
    from engine.errors import OptionError

    _refuse_options(("experts", "skip_threshold", "skip_min_experts"), "not for classifiers")
    if options["form"] != "onnx":
        raise OptionError(f"{options['model']}: is a classifier; its format is onnx")
    names = ("model", "precision", "data", "overwrite")
    output = options["output"] or Path(f"{result_name(options['model'])}-onnx")
    given = ClassifierExportOptions(output=output, threads=common.threads, **{name: options[name] for name in names})
    figures = export_classifier(given)
    say(
        common,
        f"{figures['artifact']}: {size(figures['bytes'])}, logits off by at most {figures['max_abs_logit_difference']:.1e}, "
        f"{figures['predictions_equal_share']:.1%} of {figures['compared_examples']} predictions equal, in "
        f"{figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}",
    )
    return figures


if __name__ == "__main__":
    main()
