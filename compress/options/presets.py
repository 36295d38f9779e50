"""Presets: the settings of a paper's experiments, under the name that `--preset` takes.

A preset has one row for each job that the paper has settings for. A row states each value and its place in the paper.
Options that are on the command line win over the row (compress/commands/preset.py). Papers are in docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import OptionError
from engine.options import option

PAPER, IMAGENET = "paper", "imagenet"
CLASSIFIER = "classifier"
"""First word of the rows for classifiers; other rows begin with the name of their command."""


@dataclass(frozen=True)
class Preset:
    """The settings of one job."""

    paper: str
    values: Mapping[str, tuple[Any, str]]
    """(value, place in the paper) by name of the option, as the command line writes both."""
    note: str = ""
    """Settings that are no options, and those that the paper does not state."""


SETTING = "setting"
DIEP = Preset(
    "DiEP",
    {
        "relaxation": ("paper", "eq. 6"),
        "learning_rate": (5e-3, SETTING),
        "epochs": (10, SETTING),
        "batch_size": (16, SETTING),
        "reconstruction_weight": (0.01, "eq. 7, setting"),
        "start": ("zero", "not stated"),
        "recenter": (False, "eq. 8"),
        "score": ("raw", "§4.2"),
        "scope": ("global", "§4.2"),
        "min_experts": (1, "§4.2, which has no minimum"),
        "samples": (128, SETTING),
    },
    "three α-steps to each β-step and a cosine schedule are part of the method; the length of sequences is not stated",
)

DENSE = "Cruz Salinas et al."
DENSE_STEPS = {
    "learning_rate": (1.252e-3, "§4.2"),
    "schedule": ("linear", "§4.2"),
    "warm_up_steps": (31_000, "§4.2"),
}
DENSIFY = Preset(
    DENSE,
    {
        "select": ("usage", "§3.2"),
        "ffns": (1, "§3.2; 2 for 72 experts, §3.3"),
        "distill_steps": (30_000, "§4.2"),
        **DENSE_STEPS,
        "lambda_supervised": (1.0, "eq. 3, weight not stated"),
        "lambda_layer": (1.0, "eq. 3, weight not stated"),
        "lambda_prediction": (0.0, "§3.1"),
    },
    "the paper does not state the batch size, nor the number of fine-tuning steps that follow; give --finetune-steps",
)
LAYER_MSE = Preset(
    DENSE,
    {"steps": (30_000, "§4.2"), **DENSE_STEPS},
    "the batch size is not stated; the weights of both terms of eq. 3, which are not stated either, are 1",
)

RESPONSES = {
    "learning_rate": (1e-5, "appendix A"),
    "batch_size": (16, "appendix A"),
    "epochs": (10, "appendix A"),
    "max_length": (512, "appendix A"),
    "max_prompt_length": (256, "appendix A"),
    "select_by": ("rouge-l", "appendix A"),
}
AUGMENTATION = {"ka_samples": (2, "§5.1"), "ka_probability": (0.05, "§5.1")}
ROUTER = {"router_learning_rate": (1e-5, "appendix A"), "load_balance_weight": (0.01, "§4.3")}


def _every_expert_matters(own: Mapping[str, tuple[Any, str]]) -> Preset:
    """Return the row of a recipe, with its own settings."""
    note = (
        "AdamW; responses are sampled at temperature 1; the schedule of the learning rate is not stated; the paper repeats "
        "each run with five seeds, and fine-tunes teacher and student on the training set first (--recipe sft)"
    )
    return Preset("Every Expert Matters", {**RESPONSES, **own}, note)


CIFAR = {
    "optimiser": ("sgd", "§5.1"),
    "learning_rate": (0.05, "§5.1; 0.01 for ShuffleNet and MobileNetV2"),
    "momentum": (0.9, "§5.1"),
    "weight_decay": (5e-4, "§5.1"),
    "batch_size": (64, "§5.1"),
    "epochs": (240, "§5.1"),
    "augment": ("crop-flip", "§5.1"),
}
CIFAR_NOTE = "CIFAR-100; the rate is divided by 10 after 5/8, 6/8 and 7/8 of the epochs (150, 180, 210); mean of five runs"
MOE_KD = Preset("MoE-KD", {**CIFAR, "temperature": (4.0, "§5")}, CIFAR_NOTE)

IMAGES = {
    "optimiser": ("sgd", "§5.1"),
    "learning_rate": (0.1, "§5.1"),
    "milestones": ((30, 60, 90), "§5.1: every 30 epochs"),
    "momentum": (0.9, "§5.1"),
    "weight_decay": (1e-4, "§5.1"),
    "batch_size": (256, "§5.1"),
    "epochs": (100, "§5.1"),
    "augment": ("resized-crop-flip", "§5.1: the standard practice"),
}
IMAGES_NOTE = "ImageNet-1K; images are resized and cropped as each model's own preprocessing says"
IMAGENET_MOE_KD = Preset("MoE-KD", {**IMAGES, "temperature": (1.0, "§5")}, IMAGES_NOTE)

PRESETS: dict[str, dict[tuple[str, str], Preset]] = {
    PAPER: {
        ("prune", "diep"): DIEP,
        ("densify", ""): DENSIFY,
        ("distill", "sft"): _every_expert_matters({}),
        ("distill", "kd"): _every_expert_matters({}),
        ("distill", "gkd"): _every_expert_matters({}),
        ("distill", "all"): _every_expert_matters({}),
        ("distill", "ka"): _every_expert_matters(AUGMENTATION),
        ("distill", "sar"): _every_expert_matters(ROUTER),
        ("distill", "layer-mse"): LAYER_MSE,
        (CLASSIFIER, "sft"): Preset("MoE-KD", CIFAR, CIFAR_NOTE),
        (CLASSIFIER, "kd"): MOE_KD,
        (CLASSIFIER, "srrl"): MOE_KD,
        (CLASSIFIER, "moe-kd"): MOE_KD,
    },
    IMAGENET: {
        (CLASSIFIER, "sft"): Preset("MoE-KD", IMAGES, IMAGES_NOTE),
        (CLASSIFIER, "kd"): IMAGENET_MOE_KD,
        (CLASSIFIER, "srrl"): IMAGENET_MOE_KD,
        (CLASSIFIER, "moe-kd"): IMAGENET_MOE_KD,
    },
}
"""Rows by name of the preset, and by job: the command with its method or recipe."""


@dataclass(frozen=True)
class PresetOptions:
    """The option that names a preset."""

    preset: str | None = option(
        None,
        group="Presets",
        choices=tuple(PRESETS),
        help="Take the settings of the method's paper and print them (imagenet: MoE-KD's there); options beside it win.",
    )


def preset_of(name: str, command: str, kind: str = "") -> Preset:
    """Return the row of a preset for a job. Raises OptionError where the preset has none."""
    rows = PRESETS[name]
    if (command, kind) not in rows:
        known = [word for of, word in rows if of == command]
        but = f", but of {', '.join(known)}" if known else ""
        raise OptionError(f"preset {name} has no settings of {kind or command}{but}; leave out --preset")
    return rows[command, kind]
