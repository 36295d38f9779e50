"""The tables of adaptive expert skipping, stored with a checkpoint, and the Routings made from them.

For each MoE layer, `gamma1_J` holds the calibration medians of w_ej / w_e0 for the ranks j = 1..K-1, and `gamma2_NN`
holds the similarity of two experts' outputs divided by the layer's mean similarity. `importance_1` holds the calibration
quantile of the 1-norm of a token's input to the router.

Shape suffixes: J ranks after the first (K-1), N routed experts of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.skip_table_file import FILE_NAME, SKIP_RULES, check_skip_tables, has_importance, table_name
from engine.decoder.routing import Routing, Skipping
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.files.json_file import writing
from engine.files.safetensors_file import SafetensorsFile


@dataclass(frozen=True)
class _SkipRule:
    """A rule of skipping."""

    weighs_similarity: bool = False
    """Whether γ2 is the experts' similarity, or 1."""
    protects_tokens: bool = False
    """Whether important tokens skip nothing."""


_RULES = {
    "diep": _SkipRule(weighs_similarity=True),  # DiEP §4.3
    "naee": _SkipRule(),  # arXiv 2402.14800
    "mc-moe": _SkipRule(protects_tokens=True),  # arXiv 2410.06270 §3.3; `Skipping` states the difference
}
assert tuple(_RULES) == SKIP_RULES


@dataclass(frozen=True)
class SkipTables:
    """The tables of each MoE layer, in the order of the layers."""

    gamma1_J: tuple[Tensor, ...]
    """[K-1] float32 for each layer, where K is the layer's own top-k."""
    gamma2_NN: tuple[Tensor, ...]
    """[N, N] float32 for each layer."""
    importance_1: tuple[Tensor, ...] | None = None
    """[1] float32 for each layer; None for tables of an earlier version, which lack it."""

    def save(self, path: Path) -> None:
        """Write one safetensors file. Raises OutputError if writing fails."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for layer, (gamma1_J, gamma2_NN) in enumerate(zip(self.gamma1_J, self.gamma2_NN, strict=True)):
            tensors[table_name(layer, "gamma1")] = _own(gamma1_J)
            tensors[table_name(layer, "gamma2")] = _own(gamma2_NN)
        for layer, own_1 in enumerate(self.importance_1 or ()):
            tensors[table_name(layer, "importance")] = _own(own_1)
        # Serialized first and written here, because safetensors' own writer reports a full disk as its private error.
        content = save(tensors)
        with writing(path, "skip tables"):
            path.write_bytes(content)

    @classmethod
    def load(cls, path: Path, config: DecoderConfig) -> SkipTables:
        """Read the tables and check them. Raises CheckpointError for a file that is damaged or of another model."""
        layers = range(len(config.moe_layers))
        with SafetensorsFile(path) as file:
            check_skip_tables(file, config)
            # Copies: the mapping is closed after reading.
            names = ("gamma1", "gamma2", *(("importance",) if has_importance(file) else ()))
            return cls(*(tuple(file.tensor(table_name(layer, name)).clone() for layer in layers) for name in names))


def load_skip_tables(directory: Path, config: DecoderConfig) -> SkipTables | None:
    """Return the tables in a checkpoint's directory, or None if it has none."""
    path = directory / FILE_NAME
    return SkipTables.load(path, config) if path.is_file() else None


def skipping_routings(
    config: DecoderConfig,
    tables: SkipTables | None,
    threshold: float,
    minimum_experts: int = 1,
    device: torch.device | str = "cpu",
    *,
    own: Sequence[Routing],
    rule: str = SKIP_RULES[0],
) -> list[Routing]:
    """Return each MoE layer's own Routing with skipping; a threshold of 0 returns the own Routings unchanged.

    own: these Routings (`model.own_routings`). `minimum_experts` of each token are never skipped. rule: one of SKIP_RULES.
    Raises OptionError for a threshold that is negative or that the model does not support, for an unknown rule, and for
    a rule that needs a table which the file lacks.
    """
    if (known := _RULES.get(rule)) is None:
        raise OptionError(f"skip rule {rule!r} is not known; choose {', '.join(SKIP_RULES[:-1])} or {SKIP_RULES[-1]}")
    if not 0 <= threshold < float("inf"):
        raise OptionError(f"skip threshold is {threshold}; it must be 0 (off) or more, 1 is the calibrated rule")
    if minimum_experts < 1:
        raise OptionError(f"skip minimum is {minimum_experts}; at least 1 expert of each token is always computed")
    layers = [layer.moe for layer in config.layers if layer.moe is not None]
    if threshold == 0:
        return list(own)
    if not layers:
        raise OptionError("a skip threshold needs a model with experts, and this one is dense; leave it at 0")
    if tables is None:
        raise OptionError(
            f"a skip threshold above 0 needs calibrated tables, and the checkpoint has no {FILE_NAME}; "
            "`compress prune` calibrates and stores them"
        )
    importance_1 = tables.importance_1 if known.protects_tokens else None
    if known.protects_tokens and importance_1 is None:
        raise OptionError(
            f"skip rule {rule!r} needs the calibrated importance of tokens, which {FILE_NAME} of the checkpoint lacks, "
            "because an earlier version wrote it; calibrate again with `compress prune`, or choose another rule"
        )
    similarities = [each if known.weighs_similarity else torch.ones_like(each) for each in tables.gamma2_NN]
    protections = [None] * len(layers) if importance_1 is None else [own_1.to(device) for own_1 in importance_1]
    return [
        Skipping(
            base,
            gamma1_J.to(device),
            gamma2_NN.to(device),
            threshold,
            moe.restores_sum,
            minimum_experts,
            own_1,
        )
        for base, moe, gamma1_J, gamma2_NN, own_1 in zip(
            own, layers, tables.gamma1_J, similarities, protections, strict=True
        )
    ]


def _own(tensor: Tensor) -> Tensor:
    """Return a copy for the file: safetensors refuses tensors that share memory, which tables of ones may do."""
    return tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
