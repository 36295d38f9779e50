"""Options of generating text: how a model is opened, how tokens are chosen, and where text ends. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.checkpoint.skip_table_file import SKIP_RULES
from engine.errors import OptionError
from engine.options import check, declared, option, part

if TYPE_CHECKING:
    import torch

GENERATE, SKIP, DRAFT = "What to generate", "Skipping experts", "Drafting"
MACHINE = "Machine"
SKIP_OPTIONS = ("skip_threshold", "skip_min_experts", "skip_rule")
"""Fields of OpenOptions for adaptive expert skipping."""
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
MOST_BIAS = 100.0
"""Largest absolute value of a logit bias, as in OpenAI's interface."""
LOAD_MODES = MAPPED, MEMORY = "mapped", "memory"
"""Where weights are while a model generates: in mapped files, or in huge pages (engine/passes/held_weights.py)."""
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_DRAFT_TOKENS = 63
OWN_LAYERS = "mtp"
"""Name of the draft that is a model's own layers for multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a model is opened."""

    model: str = option("demo", group="", is_argument=True, help="Directory, hub id or 'demo'.")
    device: str = option("auto", group=MACHINE, choices=DEVICES, help="Where to compute.")
    dtype: str = option("auto", group=MACHINE, choices=DTYPES, help="Dtype to compute in; auto: as stored.")
    threads: int | None = option(None, group=MACHINE, minimum=1, unset="all cores", help="CPU threads.")
    skip_threshold: float = option(
        0.0, group=SKIP, help="Skip unneeded experts: 0 for none, 1 for the calibrated rule; higher values skip more."
    )
    skip_min_experts: int = option(1, group=SKIP, help="Experts that a token never skips.")
    skip_rule: str = option(
        SKIP_RULES[0],
        group=SKIP,
        choices=SKIP_RULES,
        help="diep weighs the similarity of experts; naee compares routing weights alone; mc-moe does too, and important "
        "tokens skip nothing.",
    )
    backend: str = option(
        "auto",
        group=MACHINE,
        choices=("auto", "torch", "onnx"),
        help="auto: onnx for an exported model, torch for all others.",
    )
    memory_limit: int | None = option(
        None,
        group=MACHINE,
        is_size=True,
        above=0,
        unset="none",
        help="Most resident memory, such as 16GB: experts that do not fit are read from disk when they are needed.",
    )
    miss_threshold: float = option(
        0.0,
        group=MACHINE,
        minimum=0,
        maximum=1,
        help="With --memory-limit, let the best expert in memory take the place of one that is not, where less than this "
        "share of the token's weights is lost by that; 0 reads every expert.",
    )
    load_mode: str = option(
        MAPPED,
        group=MACHINE,
        choices=LOAD_MODES,
        help="mapped: leave the weights in mapped files, which processes share; memory: first read them into memory of the "
        "process's own, in huge pages, from which decoding is faster.",
    )
    checksums: bool = option(False, group=MACHINE, help="First compare every file with the artifact's checksums.")
    draft: str | None = option(
        None,
        group=DRAFT,
        help="A smaller model with the same tokenizer that drafts tokens, or `mtp`: MODEL's own layers for multi-token "
        "prediction. The text remains MODEL's.",
    )
    draft_tokens: int = option(
        4, group=DRAFT, minimum=1, maximum=MOST_DRAFT_TOKENS, help="Tokens that it drafts before MODEL checks them."
    )
    kv_cache_dtype: str = option(
        "auto",
        group=MACHINE,
        choices=("auto", "float16", "bfloat16", "int8"),
        help="Dtype of keys and values. auto: that of the computation; int8: half the size of bfloat16, with a scale per "
        "position and head.",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SamplingOptions:
    """Options that determine the next token. Raises OptionError for values outside the ranges given here.

    They are applied in this order, which is that of vLLM: logit bias, repetition penalty, frequency and presence penalty,
    temperature, top-n-sigma (which vLLM does not have), min-p, top-k, top-p. Tokens that a grammar or a minimum length
    excludes take no part in any of them.
    """

    temperature: float = option(0.0, group=GENERATE, help="Divisor of the logits; 0 always takes the most probable token.")
    """Values below LEAST_TEMPERATURE (sampling.py) count as 0."""
    top_p: float = option(
        1.0, group=GENERATE, help="Sample from the most probable tokens that together reach this probability, in (0, 1]."
    )
    top_k: int = option(0, group=GENERATE, help="Sample from so many of the most probable tokens; 0 for all.")
    seed: int = 0
    presence_penalty: float = 0.0
    """-2..2, subtracted from the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """-2..2, subtracted once for each time that the token was generated before."""
    min_p: float = option(
        0.0,
        group=GENERATE,
        minimum=0,
        maximum=1,
        help="Sample from tokens at least this fraction as probable as the most probable one; 0 for all.",
    )
    top_n_sigma: float = option(
        0.0,
        group=GENERATE,
        minimum=0,
        help="Sample from tokens whose logits are within so many standard deviations of the largest; 0 for all.",
    )
    """Tang et al. 2024, "Top-nσ". The standard deviation is over all tokens that may follow."""
    repetition_penalty: float = option(
        1.0,
        group=GENERATE,
        minimum=LEAST_REPETITION_PENALTY,
        maximum=MOST_REPETITION_PENALTY,
        help="Divide positive logits of tokens of the text so far by this, and multiply negative ones; 1 for none.",
    )
    """Keskar et al. 2019. The text so far is the prompt and what was generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits, -100..100."""

    def __post_init__(self) -> None:
        check(self)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top-p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise OptionError(f"top-k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= penalty <= 2:
                raise OptionError(f"{name} penalty is {penalty}; it must be from -2 to 2")
        if not math.isfinite(self.top_n_sigma):
            raise OptionError(f"top-n-sigma is {self.top_n_sigma}; it must be a number of standard deviations, or 0 (all)")
        for token, bias in self.logit_bias:
            if token < 0 or not abs(bias) <= MOST_BIAS:
                raise OptionError(f"the bias of token {token} is {bias}; it must be from -{MOST_BIAS:g} to {MOST_BIAS:g}")

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty changes logits before the temperature does."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return bool(self.logit_bias) or any(penalties)

    @property
    def closes_tokens(self) -> bool:
        """Whether any token that may follow is left out for its small probability."""
        return self.top_p < 1 or any((self.top_k, self.min_p, self.top_n_sigma))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a random generator in the initial state of this seed."""
        import torch

        return torch.Generator(device).manual_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(OpenOptions):
    """One run of `compress generate`."""

    prompts: tuple[str, ...] = field(
        metadata=declared(
            group=GENERATE,
            flag="prompt",
            short="-p",
            several="repeated",
            help="Text to continue; may be given several times.",
        )
    )
    images: tuple[str, ...] = option(
        (),
        group=GENERATE,
        flag="image",
        several="repeated",
        metavar="FILE",
        help="Image (PNG, JPEG, WebP or GIF) that the prompt is a question about; may be given several times.",
    )
    tokens: int = option(128, group=GENERATE, short="-n", minimum=1, help="Most new tokens.")
    sampling: SamplingOptions = part(SamplingOptions)
    stop: tuple[str, ...] = option(
        (), group=GENERATE, several="repeated", help="Text to stop at; may be given several times."
    )
