"""A dense encoder-decoder made from a mixture (Cruz Salinas et al.): observation of the routers, the student, the fold.

Both models are transformers' own. The mixture's router selects one expert per token and multiplies its output by the router
probability p. F̂FN(x) = Σ_{i≤K} a_i FFN_i(x) (eq. 5) has no p, so the calibration mean of p is part of the a_i
(dense_plan.py). A token that arrives when an expert's capacity is full is dropped: the block's output for it is zero, and
the residual connection carries it on. Dropped tokens count as tokens of weight 0.

The dense sibling has one width for all FFNs. With K > 1, the FFNs of layers that were already dense are padded with zero
units up to K·F, which does not change their output. During training they keep their width F, since the gradients of such
units are zero.

Shape suffixes: B pairs of a batch, L positions, T tokens without padding, N experts, D hidden, F width of an expert, K
FFNs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.pairs import PADDING, Pairs
from calibrate.statistics import LayerStatistics, Statistics
from compress.dense.dense_plan import Chosen, first_scales
from compress.dense.dense_student import FfnSum, folded
from compress.methods.alignment import alignment
from compress.plans.plan import Part, Plan, PlannedExpert, Source
from engine.errors import UnsupportedError
from engine.families.encoder_decoders import (
    ENCODER_DECODERS,
    EXPERT_OF_BLOCK,
    FFN_PROJECTIONS,
    ROUTER_OF_BLOCK,
    EncoderDecoder,
)
from engine.families.results import as_dense_encoder_decoder
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint
from engine.transformers_models.transformers_model import quiet_transformers

GROUP = 32
"""Number of pairs per forward pass where nothing is trained."""

Projections = tuple[Tensor, Tensor]
"""in_FD and out_DF of an FFN without a gate."""


# Running a model


def logits(model: nn.Module, pairs: Pairs, config: Any) -> Tensor:
    """Return the logits [B, L, V] of the targets' tokens under teacher forcing, including padding."""
    device = next(model.parameters()).device
    source_BL, target_BL = pairs.source_PS.to(device), pairs.target_PM.to(device)
    start_B1 = torch.full_like(target_BL[:, :1], config.decoder_start_token_id)
    before_BL = torch.cat([start_B1, target_BL[:, :-1]], dim=1)
    outputs = model(
        input_ids=source_BL.masked_fill(source_BL == PADDING, config.pad_token_id),
        attention_mask=(source_BL != PADDING).long(),
        decoder_input_ids=before_BL.masked_fill(before_BL == PADDING, config.pad_token_id),
        use_cache=False,
    )
    made: Tensor = outputs.logits
    return made


def without_padding(values: Tensor, name: str, pairs: Pairs) -> Tensor:
    """Return [B, L, …] values of a layer as [T, …]. The encoder's layers process sources, the decoder's targets."""
    ids_BL = pairs.source_PS if name.startswith("encoder.") else pairs.target_PM
    return values[(ids_BL != PADDING).to(values.device)]


def dense_row(row: EncoderDecoder) -> EncoderDecoder:
    """Return the row of the dense sibling of a mixture."""
    assert row.dense_sibling is not None
    return ENCODER_DECODERS[row.dense_sibling]


# Observation of the routers


@dataclass(frozen=True)
class Seen:
    """Values of one sparse layer on one batch, without padding."""

    x_TD: Tensor
    y_TD: Tensor
    """The block's output, which is zero for dropped tokens."""
    used_TN: Tensor
    """1 where the expert processed the token; the row of a dropped token is zero."""
    weight_T: Tensor
    """The router probability of the selected expert."""
    logits_TN: Tensor


@contextmanager
def _watching(
    model: nn.Module, blocks: Mapping[str, str], see: Callable[[str, Any, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call see(layer, router output, input [B, L, D], output [B, L, D]) after each forward pass of a block."""
    routed: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: routed.__setitem__(name, output)

    def tell(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: see(name, routed.pop(name), inputs[0], output)

    handles = []
    for name, prefix in blocks.items():
        block = model.get_submodule(prefix)
        handles.append(block.get_submodule(ROUTER_OF_BLOCK).register_forward_hook(keep(name)))
        handles.append(block.register_forward_hook(tell(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def watch(
    teacher: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    pairs: Pairs,
    visit: Callable[[str, Seen], None],
    progress: Callable[[Iterable[Pairs]], Iterable[Pairs]] = iter,
) -> None:
    """Call `visit` with every sparse layer of the mixture on every batch."""
    blocks = {name: checkpoint.block(name) for name in checkpoint.experts}
    for batch in progress(list(pairs.split(GROUP))):

        def see(name: str, routed: Any, x_BLD: Tensor, y_BLD: Tensor, batch: Pairs = batch) -> None:
            used_BLN, weight_BL1, logits_BLN = routed
            parts = (x_BLD, y_BLD, used_BLN, weight_BL1[..., 0], logits_BLN)
            visit(name, Seen(*(without_padding(part, name, batch) for part in parts)))

        with _watching(teacher, blocks, see):
            logits(teacher, batch, checkpoint.config)


@dataclass(frozen=True)
class Usage:
    """Calibration statistics of the sparse layers, by their numbers."""

    statistics: Statistics
    """The statistics that the selection of experts reads; the other tensors are empty."""
    dropped_shares: list[float]
    """Share of each layer's tokens that arrived after their expert's capacity was full."""


def usage(
    teacher: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    pairs: Pairs,
    progress: Callable[[Iterable[Pairs]], Iterable[Pairs]] = iter,
) -> Usage:
    """Return sums over all calibration tokens without padding, in float64."""
    sums: dict[str, dict[str, Tensor]] = {}

    def visit(name: str, seen: Seen) -> None:
        used_TN, z_TN = seen.used_TN.double(), seen.logits_TN.double()
        p_TN, weight_T = z_TN.softmax(-1), seen.weight_T.double()
        own = {
            "tokens": torch.tensor(len(z_TN)),
            "tokens_routed": used_TN.sum(0).long(),
            "probability_sum": p_TN.sum(0),
            "routed_probability_sum": (p_TN * used_TN).sum(0),
            "weight_sum": weight_T @ used_TN,
            # With one expert per token the block's output is weight · FFN_i(x).
            "weighted_norm_sum": seen.y_TD.double().norm(dim=1) @ used_TN,
            "router_gram": z_TN.T @ z_TN,
            "unselected_probability_share": 1.0 - (p_TN * used_TN).sum(),
        }
        before = sums.get(name, {})
        sums[name] = {key: value.cpu() + before.get(key, 0) for key, value in own.items()}

    watch(teacher, checkpoint, pairs, visit, progress)
    layers = {index: _layer_statistics(sums[name]) for index, name in enumerate(checkpoint.experts)}
    dropped = [1.0 - float(own.tokens_routed.sum() / own.tokens) for own in layers.values()]
    return Usage(Statistics(layers, {"model": checkpoint.fingerprint(), "tokens": pairs.tokens}), dropped)


def _layer_statistics(sums: Mapping[str, Tensor]) -> LayerStatistics:
    nothing = torch.empty(0)
    share = 1.0 - sums["routed_probability_sum"].sum() / sums["tokens"]
    return LayerStatistics(
        norm_sum=nothing,
        squared_norm_sum=nothing,
        output_sum=nothing,
        output_mean=nothing,
        weighted_output_mean=nothing,
        weight_ratio_median=nothing,
        linear_cka=nothing,
        rbf_cka=nothing,
        rbf_cka_before=nothing,
        **dict(sums) | {"unselected_probability_share": share},
    )


# Which experts stay


def expert_weights(teacher: nn.Module, checkpoint: EncoderDecoderCheckpoint, name: str, expert: int) -> Projections:
    """Return in_FD and out_DF of an expert of the layer of that name."""
    module = teacher.get_submodule(f"{checkpoint.block(name)}.{EXPERT_OF_BLOCK.format(expert=expert)}")
    in_FD, out_DF = (module.get_parameter(projection).detach() for projection in FFN_PROJECTIONS)
    return in_FD, out_DF


def planned(
    chosen: Mapping[int, Chosen], statistics: Statistics, teacher: nn.Module, checkpoint: EncoderDecoderCheckpoint
) -> Plan:
    """Return the plan of the selected experts with their initial a_i; hidden units of averaged experts are aligned first."""
    names, layers = list(checkpoint.experts), {}
    for index, best in chosen.items():
        scales = first_scales(statistics.layers[index], best)
        parts = [
            Part(_sources(centre, members, teacher, checkpoint, names[index]), scale)
            for (centre, members), scale in zip(best.members.items(), scales, strict=True)
        ]
        layers[index] = (PlannedExpert(tuple(parts)),)
    return Plan(layers, kind="dense")


def _sources(
    centre: int, members: list[int], teacher: nn.Module, checkpoint: EncoderDecoderCheckpoint, name: str
) -> tuple[Source, ...]:
    share = 1.0 / len(members)

    def permutation(expert: int) -> tuple[int, ...] | None:
        if expert == centre:
            return None
        first, own = (expert_weights(teacher, checkpoint, name, number) for number in (centre, expert))
        # These experts have no gate; the second projection is empty, which changes no distance.
        return alignment((first[0], first[0][:, :0], first[1]), (own[0], own[0][:, :0], own[1]), first[0].device)

    return tuple(Source(expert, share, permutation(expert)) for expert in members)


def part_weights(teacher: nn.Module, checkpoint: EncoderDecoderCheckpoint, name: str, part: Part) -> Projections:
    """Return Σ coefficient · permuted expert, without the part's scale."""
    total: list[Tensor] = []
    for source in part.sources:
        assert isinstance(source.expert, int)
        in_FD, out_DF = expert_weights(teacher, checkpoint, name, source.expert)
        if source.permutation is not None:
            units = torch.tensor(source.permutation, device=in_FD.device)
            in_FD, out_DF = in_FD[units], out_DF[:, units]
        own = [in_FD.float() * source.coefficient, out_DF.float() * source.coefficient]
        total = own if not total else [before + after for before, after in zip(total, own, strict=True)]
    return total[0], total[1]


# The student


def dense_names(checkpoint: EncoderDecoderCheckpoint) -> dict[str, str]:
    """Return the prefix in the sibling of every layer's FFN or MoE block, by its prefix in the mixture."""
    return {checkpoint.block(name): checkpoint.block(name, dense_row(checkpoint.row)) for name in all_layers(checkpoint)}


def empty_student(checkpoint: EncoderDecoderCheckpoint, width: int) -> nn.Module:
    """Return the sibling by transformers on the meta device, with names and shapes but no weights."""
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    config = as_dense_encoder_decoder(checkpoint.raw_config, width)
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with quiet_transformers(), torch.device("meta"):
        made: nn.Module = AutoModelForSeq2SeqLM.from_config(  # type: ignore[no-untyped-call]
            CONFIG_MAPPING[config["model_type"]](**values)
        )
    return made.eval()


def carried(teacher_names: Iterable[str], checkpoint: EncoderDecoderCheckpoint) -> dict[str, str]:
    """Return the sibling's name of every tensor outside of the sparse layers' blocks, by its name in the mixture."""
    blocks, sparse = dense_names(checkpoint), {checkpoint.block(name) for name in checkpoint.experts}
    result = {}
    for name in teacher_names:
        block = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), None)
        if block is None:
            result[name] = name
        elif block not in sparse:
            result[name] = blocks[block] + name.removeprefix(block)
    return result


def check_nothing_is_lost(teacher: nn.Module, checkpoint: EncoderDecoderCheckpoint) -> None:
    """Raise UnsupportedError unless the sibling uses every tensor outside of sparse blocks and needs no other tensor."""
    student = empty_student(checkpoint, getattr(checkpoint.config, checkpoint.row.width_key))
    shapes = {name: tensor.shape for name, tensor in student.state_dict().items()}
    own = teacher.state_dict()
    taken = carried(own, checkpoint)
    family = dense_row(checkpoint.row).model_type
    for name, new in taken.items():
        if shapes.get(new) != own[name].shape:
            raise UnsupportedError(f"a {family} has no place for {name}; this model cannot be made dense")
    made = {checkpoint.block(name, dense_row(checkpoint.row)) for name in checkpoint.experts}
    for name in shapes:
        if name not in taken.values() and not name.startswith(tuple(f"{block}." for block in made)):
            raise UnsupportedError(f"a {family} needs {name}, which this model does not have; it cannot be made dense")


def dense_student(
    plan: Plan,
    teacher: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the sibling with the mixture's weights; its sparse layers have K unfolded FFNs with their a_K."""
    student = empty_student(checkpoint, getattr(checkpoint.config, checkpoint.row.width_key)).to_empty(device="cpu")
    student.tie_weights()  # type: ignore[operator]  # moving off the meta device makes tied parameters two
    own = teacher.state_dict()
    student.load_state_dict({new: own[name] for name, new in carried(own, checkpoint).items()}, strict=False)
    student = student.to(device=device, dtype=dtype)
    for index, name in enumerate(checkpoint.experts):
        prefix = checkpoint.block(name, dense_row(checkpoint.row))
        (expert,) = plan.layers[index]
        ffns = []
        for part in expert.parts:
            ffn = copy.deepcopy(student.get_submodule(prefix))
            weights = part_weights(teacher, checkpoint, name, part)
            ffn.load_state_dict(dict(zip(FFN_PROJECTIONS, weights, strict=True)))
            ffns.append(ffn)
        student.set_submodule(prefix, FfnSum(ffns, [part.scale for part in expert.parts], device))
    return student.requires_grad_(False).eval()


# The fold


def widened(in_FD: Tensor, out_DF: Tensor, width: int) -> Projections:
    """Return an FFN padded with zero units up to `width`."""
    more = width - len(in_FD)
    return torch.nn.functional.pad(in_FD, (0, 0, 0, more)), torch.nn.functional.pad(out_DF, (0, more))


def saved_tensors(parameters: Mapping[str, Tensor], checkpoint: EncoderDecoderCheckpoint) -> dict[str, Tensor]:
    """Fold a student's parameters in float32; return them by their names in the result.

    parameters: from `named_parameters`, tied ones once.
    """
    sibling = dense_row(checkpoint.row)
    blocks = {checkpoint.block(name, sibling): name in checkpoint.experts for name in all_layers(checkpoint)}
    result = {name: tensor for name, tensor in parameters.items() if not name.startswith(tuple(f"{b}." for b in blocks))}
    scales = {block: parameters[f"{block}.a_K"].float() for block, sparse in blocks.items() if sparse}
    ffns = max(map(len, scales.values()))
    width = ffns * int(getattr(checkpoint.config, checkpoint.row.width_key))
    for block in blocks:
        if block in scales:
            apart = [_projections(parameters, f"{block}.ffns.{place}") for place in range(len(scales[block]))]
            made = folded(apart, scales[block])
        else:
            made = widened(*_projections(parameters, block), width)
        result |= {f"{block}.{projection}": tensor for projection, tensor in zip(FFN_PROJECTIONS, made, strict=True)}
    return {name: tensor.detach().to(checkpoint.model_dtype).cpu() for name, tensor in result.items()}


def learned_scales(parameters: Mapping[str, Tensor], checkpoint: EncoderDecoderCheckpoint) -> list[list[float]]:
    """Return the a_K of each sparse layer."""
    sibling = dense_row(checkpoint.row)
    return [parameters[f"{checkpoint.block(name, sibling)}.a_K"].tolist() for name in checkpoint.experts]


def all_layers(checkpoint: EncoderDecoderCheckpoint) -> list[str]:
    """Return the names of the layers of both stacks, such as "encoder.0", in their order."""
    return [f"{stack}.{layer}" for stack, count in checkpoint.layers.items() for layer in range(count)]


def _projections(parameters: Mapping[str, Tensor], prefix: str) -> Projections:
    in_FD, out_DF = (parameters[f"{prefix}.{projection}"].float() for projection in FFN_PROJECTIONS)
    return in_FD, out_DF


# Error against the mixture


@dataclass(frozen=True)
class LayerError:
    """Mean over tokens that were not dropped of ‖error‖₂ / ‖y‖₂, where y is the MoE block's output."""

    whole: float
    """Error of the FFN in place of the block; the input of each layer is that of the mixture."""
    weight: float
    """Error from the mean router probability alone, in place of the token's own."""


def layer_errors(
    student: nn.Module,
    teacher: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    usage: Usage,
    pairs: Pairs,
    progress: Callable[[Iterable[Pairs]], Iterable[Pairs]] = iter,
) -> list[LayerError]:
    """Return the error of each sparse layer of a student."""
    names = list(checkpoint.experts)
    totals = {name: [0.0, 0.0, 0] for name in names}

    def visit(name: str, seen: Seen) -> None:
        layer = usage.statistics.layers[names.index(name)]
        mean_weight = float(layer.weight_sum.sum() / layer.tokens.clamp_min(1))
        ffn = student.get_submodule(checkpoint.block(name, dense_row(checkpoint.row)))
        lengths_T = seen.y_TD.float().norm(dim=1)
        kept_T = lengths_T > 0
        off_T = (ffn(seen.x_TD) - seen.y_TD).float().norm(dim=1)
        totals[name][0] += float((off_T[kept_T] / lengths_T[kept_T]).double().sum())
        weight_T = seen.weight_T.double()[kept_T]
        totals[name][1] += float(((weight_T - mean_weight).abs() / weight_T).sum())
        totals[name][2] += int(kept_T.sum())

    watch(teacher, checkpoint, pairs, visit, progress)
    return [LayerError(whole / max(count, 1), weight / max(count, 1)) for whole, weight, count in totals.values()]
