"""The dense model during evaluation and training: K FFNs with weights a_i, which are folded into one FFN when saved.

F̂FN(x) = Σ_{i≤K} a_i FFN_i(x) (Cruz Salinas et al., eq. 5). The fold is exact: the gate and up rows of the K SwiGLU FFNs
are concatenated, and so are their down columns times a_i; the resulting FFN computes the same sum.

Shape suffixes: T tokens, D hidden, F width of one FFN, K FFNs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from compress.plans.apply import dense_ffns, part_tensor, planned_config, planned_name, side_by_side
from compress.plans.plan import Plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, expert_of
from engine.decoder.model import Decoder, DecoderLayer
from engine.decoder.parameters import parameters_on_disk
from engine.families.experts import DOWN, DOWN_BIAS, GATE_BIAS
from engine.families.resolve import decoder_config
from engine.families.tensor_names import expert_parts
from engine.families.tensor_shapes import expected_tensors
from engine.kernels.kernel_choice import TORCH, KernelChoice


class FfnSum(nn.Module):
    """F̂FN(x) = Σ_i a_i FFN_i(x), in place of a layer's MoE block."""

    def __init__(self, ffns: Sequence[nn.Module], scales: Sequence[float], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.ffns = nn.ModuleList(ffns)
        # float32 whatever the model's dtype: these are few numbers, and the fold multiplies in float32 too.
        self.a_K = nn.Parameter(torch.tensor(scales, dtype=torch.float32, device=device), requires_grad=False)

    def forward(self, x_TD: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the sum for tokens [T, D], of the same shape. It is trained, so torch computes it whatever the choice."""
        a_K = self.a_K.to(x_TD.dtype)
        outputs: list[Tensor] = [a * ffn(x_TD) for a, ffn in zip(a_K, self.ffns, strict=True)]
        return sum(outputs[1:], outputs[0])


def ffn_sum(
    plan: Plan, checkpoint: Checkpoint, layer: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> FfnSum:
    """Return the FFNs of a layer of a dense plan, not yet folded."""
    (planned,) = plan.layers[layer]
    moe = checkpoint.config.layers[layer].moe
    assert moe is not None
    ffns = []
    for part in planned.parts:
        unscaled = replace(part, scale=1.0)
        tensors = [part_tensor(checkpoint, layer, unscaled, p) for p in expert_parts(checkpoint.config.architecture)]
        ffns.append(expert_of((tensor.to(device=device, dtype=dtype) for tensor in tensors), moe.swiglu))
    return FfnSum(ffns, [part.scale for part in planned.parts], device)


def dense_student(
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    made: Callable[[int, DecoderLayer], None] | None = None,
) -> Decoder:
    """Return the result of a dense plan as a decoder whose FFNs are not yet folded; `made` is passed to `Decoder`."""
    config = decoder_config(planned_config(plan, checkpoint))
    shapes, narrower = expected_tensors(config), dense_ffns(checkpoint)

    def source(name: str) -> Tensor:
        if name in narrower or checkpoint.shapes.get(name) == shapes[name]:
            return checkpoint.tensor(name).to(device=device, dtype=dtype)
        return torch.empty(shapes[name], dtype=dtype, device="meta")  # shapes of the folded FFN, which is replaced below

    def take_apart(index: int, layer: DecoderLayer) -> None:
        if index in plan.layers:
            layer.register_module("feed_forward", ffn_sum(plan, checkpoint, index, dtype, device))
        if made is not None:
            made(index, layer)

    return Decoder(config, source, take_apart)


def student_parameters(student: Decoder) -> dict[str, nn.Parameter]:
    """Return all trained parameters by their names on disk.

    Unfolded FFNs have the names `layers.L.ffns.I.PROJECTION` and `layers.L.a`.
    """
    found, parts = parameters_on_disk(student), expert_parts(student.config.architecture)
    for index, block in sums(student).items():
        found[f"layers.{index}.a"] = block.a_K
        for place, ffn in enumerate(block.ffns):
            assert isinstance(ffn, Expert)
            for projection, tensor in zip(parts, ffn.projections, strict=True):
                assert isinstance(tensor, nn.Parameter)
                found[f"layers.{index}.ffns.{place}.{projection}"] = tensor
    return found


def sums(student: Decoder) -> dict[int, FfnSum]:
    """Return the unfolded FFNs by decoder layer."""
    blocks = {index: layer.feed_forward for index, layer in enumerate(student.layers)}
    return {index: block for index, block in blocks.items() if isinstance(block, FfnSum)}


def scales(layer: DecoderLayer) -> list[nn.Parameter]:
    """Return the a_K of a layer with unfolded FFNs."""
    return [layer.feed_forward.a_K] if isinstance(layer.feed_forward, FfnSum) else []


def folded(ffns: Iterable[Sequence[Tensor]], a_K: Tensor) -> tuple[Tensor, ...]:
    """Fold K FFNs (…_FD, out_DF) into one of width K·F: concatenate the rows, and the columns of out_DF times a_i.

    Biases (…_F, out_D) are folded too: the output biases, times a_i, are summed.
    """
    *ins, outs = zip(*ffns, strict=True)
    scaled = [a * out for a, out in zip(a_K, outs, strict=True)]
    return *map(torch.cat, ins), side_by_side(scaled, DOWN if outs[0].dim() > 1 else DOWN_BIAS)


def saved_tensors(trained: Mapping[str, Tensor], plan: Plan, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Fold trained tensors (float32, named as in `student_parameters`), and return them by their names in the result."""
    result = {name: tensor for name, tensor in trained.items() if not name.startswith("layers.")}
    every = expert_parts(checkpoint.config.architecture)
    for layer, (planned,) in plan.layers.items():
        places = range(len(planned.parts))
        a_K = trained[f"layers.{layer}.a"].float()
        for parts in ([p for p in every if p < GATE_BIAS], [p for p in every if p >= GATE_BIAS]):
            ffns = [[trained[f"layers.{layer}.ffns.{place}.{p}"].float() for p in parts] for place in places]
            for projection, tensor in zip(parts, folded(ffns, a_K) if parts else (), strict=True):
                result[planned_name(plan, checkpoint, layer, 0, projection)] = tensor
    return result


def learned_scales(trained: Mapping[str, Tensor], plan: Plan) -> dict[int, list[float]]:
    """Return the a_K by decoder layer."""
    return {layer: trained[f"layers.{layer}.a"].tolist() for layer in plan.layers}
