"""The dense model while it is measured and trained: K FFNs side by side with their weights a_i, folded into one when saved.

F̂FN(x) = Σ_{i≤K} a_i FFN_i(x) (Cruz Salinas et al., eq. 5). K SwiGLU FFNs whose gate and up rows are put on top of each other
and whose down columns, times a_i, stand side by side compute the same sum: the fold is exact.

Shape suffixes: T tokens, D hidden, F width of one FFN, K FFNs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.plans.apply import dense_ffns, ffn_tensor, part_tensor, planned_config, side_by_side
from compress.plans.plan import Part, Plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert
from engine.decoder.model import Decoder, DecoderLayer
from engine.decoder.parameters import parameters_on_disk
from engine.families.experts import DOWN, DOWN_BIAS, GATE_BIAS
from engine.families.resolve import decoder_config
from engine.families.tensor_names import expert_parts
from engine.families.tensor_shapes import expected_tensors


class FfnSum(nn.Module):
    """F̂FN(x) = Σ_i a_i FFN_i(x), in place of a layer's MoE block."""

    def __init__(self, ffns: Sequence[nn.Module], scales: Sequence[float], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.ffns = nn.ModuleList(ffns)
        # float32 whatever the model's dtype: a few numbers, and the fold multiplies in float32 too.
        self.a_K = nn.Parameter(torch.tensor(scales, dtype=torch.float32, device=device), requires_grad=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        a_K = self.a_K.to(x_TD.dtype)
        outputs: list[Tensor] = [a * ffn(x_TD) for a, ffn in zip(a_K, self.ffns, strict=True)]
        return sum(outputs[1:], outputs[0])


def ffn_sum(
    plan: Plan, checkpoint: Checkpoint, layer: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> FfnSum:
    """What a dense plan makes of a layer, its parts still apart."""
    (planned,) = plan.layers[layer]
    moe = checkpoint.config.layers[layer].moe
    assert moe is not None
    ffns = []
    for part in planned.parts:
        unscaled = Part(part.sources)
        tensors = [part_tensor(checkpoint, layer, unscaled, p) for p in expert_parts(checkpoint.config.architecture)]
        ffns.append(Expert(*(tensor.to(device=device, dtype=dtype) for tensor in tensors), swiglu=moe.swiglu))
    return FfnSum(ffns, [part.scale for part in planned.parts], device)


def dense_student(
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    made: Callable[[int, DecoderLayer], None] | None = None,
) -> Decoder:
    """The result of a dense plan as a decoder whose MoE layers' FFNs are still apart; `made` as of `Decoder`."""
    config = decoder_config(planned_config(plan, checkpoint))
    shapes, narrower = expected_tensors(config), dense_ffns(checkpoint)

    def source(name: str) -> Tensor:
        if name in narrower or checkpoint.shapes.get(name) == shapes[name]:
            return checkpoint.tensor(name).to(device=device, dtype=dtype)
        return torch.empty(shapes[name], dtype=dtype, device="meta")  # of the folded FFN, which is replaced below

    def take_apart(index: int, layer: DecoderLayer) -> None:
        if index in plan.layers:
            layer.register_module("feed_forward", ffn_sum(plan, checkpoint, index, dtype, device))
        if made is not None:
            made(index, layer)

    return Decoder(config, source, take_apart)


def student_parameters(student: Decoder) -> dict[str, nn.Parameter]:
    """All that is trained: by names on disk, and `layers.L.ffns.I.PROJECTION` and `layers.L.a` of FFNs that are apart."""
    found = parameters_on_disk(student)
    for index, block in sums(student).items():
        found[f"layers.{index}.a"] = block.a_K
        for place, ffn in enumerate(block.ffns):
            assert isinstance(ffn, Expert)
            for projection, tensor in enumerate(ffn.projections):
                assert isinstance(tensor, nn.Parameter)
                found[f"layers.{index}.ffns.{place}.{projection}"] = tensor
    return found


def sums(student: Decoder) -> dict[int, FfnSum]:
    """The FFNs that are apart, by decoder layer."""
    blocks = {index: layer.feed_forward for index, layer in enumerate(student.layers)}
    return {index: block for index, block in blocks.items() if isinstance(block, FfnSum)}


def scales(layer: DecoderLayer) -> list[nn.Parameter]:
    """The a_K of a layer whose FFNs are apart."""
    return [layer.feed_forward.a_K] if isinstance(layer.feed_forward, FfnSum) else []


def folded(ffns: Iterable[Sequence[Tensor]], a_K: Tensor) -> tuple[Tensor, ...]:
    """K FFNs (…_FD, out_DF) as one of width K·F: rows on top of each other, columns of the last times a_i side by side.

    Of their biases (…_F, out_D) too: the last ones, times a_i, are added up.
    """
    *ins, outs = zip(*ffns, strict=True)
    scaled = [a * out for a, out in zip(a_K, outs, strict=True)]
    return *map(torch.cat, ins), side_by_side(scaled, DOWN if outs[0].dim() > 1 else DOWN_BIAS)


def saved_tensors(trained: Mapping[str, Tensor], plan: Plan, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """What was trained (by the names of `student_parameters`, float32), folded, by its names in the result."""
    result = {name: tensor for name, tensor in trained.items() if not name.startswith("layers.")}
    every = expert_parts(checkpoint.config.architecture)
    for layer, (planned,) in plan.layers.items():
        places = range(len(planned.parts))
        a_K = trained[f"layers.{layer}.a"].float()
        for parts in (every[:GATE_BIAS], every[GATE_BIAS:]):
            ffns = [[trained[f"layers.{layer}.ffns.{place}.{p}"].float() for p in parts] for place in places]
            for projection, tensor in zip(parts, folded(ffns, a_K) if parts else (), strict=True):
                result[ffn_tensor(plan, checkpoint, layer, 0, projection)] = tensor
    return result


def learned_scales(trained: Mapping[str, Tensor], plan: Plan) -> dict[int, list[float]]:
    """a_K by decoder layer."""
    return {layer: trained[f"layers.{layer}.a"].tolist() for layer in plan.layers}
