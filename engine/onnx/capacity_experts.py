"""The MoE block of Switch Transformer as ONNX nodes: top-1 routing, a capacity per expert (Fedus et al. §2).

The router is computed in float32, and the expert's output is multiplied by the probability p of that expert. In one
call, an expert takes the first `capacity` tokens of each sequence that chose it, including padding; the block outputs
zero for later ones. transformers does this in inference as in training, and the graph counts in the same way.

com.microsoft::MoE gives its one chosen expert the weight 1 (engine/onnx/experts.py explains why), and its output is
multiplied by p, or by 0 if the expert was full. QMoE receives these weights directly.

Shape suffixes: B batch, L positions, T tokens (B·L), D hidden, F width of an expert, N experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engine.decoder.routing import TopK
from engine.families.encoder_decoders import EXPERT_OF_BLOCK, FFN_PROJECTIONS, ROUTER_OF_BLOCK
from engine.onnx.experts import ROUTER_WEIGHTS, branches
from engine.onnx.graph import FLOAT, INT64, MICROSOFT, Graph
from engine.onnx.layers import ROUNDED_ACTIVATIONS, Layers, cast, float32
from engine.onnx.quantize import block_size
from engine.onnx.routing import expert_weights, select
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

OPERATOR_ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu_new": "gelu"}
"""Value of activation_type in onnxruntime's mixtures, by the name of the activation in transformers."""
IN, OUT = FFN_PROJECTIONS


@dataclass(frozen=True)
class Block:
    """Description of one sparse layer."""

    prefix: str
    """Prefix of its tensors' names."""
    experts: int
    hidden: int
    width: int
    capacity: int
    activation: str

    def names(self, projection: str) -> list[str]:
        """Return the names of all experts' weights: IN [F, D] or OUT [D, F]."""
        return [f"{self.prefix}.{EXPERT_OF_BLOCK.format(expert=expert)}.{projection}" for expert in range(self.experts)]


def capacity_experts(layers: Layers, checkpoint: EncoderDecoderCheckpoint, block: Block, x_BLD: str) -> str:
    """Add the nodes of a sparse layer, [B, L, D] to [B, L, D]."""
    graph = layers.graph
    logits_TN, weights_TN = _routed(graph, checkpoint, block, cast(graph, x_BLD, graph.element_type, FLOAT))
    x_TD = graph.node("Reshape", x_BLD, graph.integers(-1, block.hidden))
    if layers.portable:
        y_TD = branches(graph, x_TD, weights_TN, (block.experts, block.hidden), partial(_expert, layers, block))
    elif layers.bits is None:
        y_TD = _mixture(layers, block, x_TD, logits_TN, weights_TN)
    else:
        y_TD = _quantised_mixture(layers, block, x_TD, weights_TN, layers.bits)
    return graph.node("Reshape", y_TD, graph.node("Shape", x_BLD))


def _routed(graph: Graph, checkpoint: EncoderDecoderCheckpoint, block: Block, x_BLD: str) -> tuple[str, str]:
    """Return the router logits, and the weight of each expert for each token (zero if unused); both [T, N] in float32."""
    name = f"{block.prefix}.{ROUTER_OF_BLOCK}.classifier"
    logits_BLN = graph.node(
        "MatMul", x_BLD, graph.weight(f"{name}.weight", lambda: checkpoint.tensor(f"{name}.weight").float().T)
    )
    if f"{name}.bias" in checkpoint.by_name:
        bias_N = graph.weight(f"{name}.bias", lambda: checkpoint.tensor(f"{name}.bias").float())
        logits_BLN = graph.node("Add", logits_BLN, bias_N)
    logits_TN = graph.node("Reshape", logits_BLN, graph.integers(-1, block.experts))
    selected = select(graph, TopK(1, normalise=False), logits_TN, block.experts)
    weights_TN = expert_weights(graph, selected, logits_TN)
    chosen_TN = graph.node("Cast", graph.node("Greater", weights_TN, float32(graph, 0.0)), to=INT64)
    chosen_BLN = graph.node("Reshape", chosen_TN, graph.node("Shape", logits_BLN))
    place_BLN = graph.node("CumSum", chosen_BLN, graph.integer(1))
    within_BLN = graph.node("LessOrEqual", place_BLN, graph.integer(block.capacity))
    within_TN = graph.node("Reshape", within_BLN, graph.integers(-1, block.experts))
    return logits_TN, graph.node("Where", within_TN, weights_TN, float32(graph, 0.0))


def _expert(layers: Layers, block: Block, expert: int, x_RD: str) -> str:
    return layers.feed_forward(x_RD, [block.names(projection)[expert] for projection in (IN, OUT)], block.activation)


def _mixture(layers: Layers, block: Block, x_TD: str, logits_TN: str, weights_TN: str) -> str:
    """Return the output [T, D] of one com.microsoft::MoE node."""
    graph = layers.graph
    shapes = {IN: (block.experts, block.width, block.hidden), OUT: (block.experts, block.hidden, block.width)}
    fc_in, fc_out = (
        layers.stacked(f"{block.prefix}.experts.{projection}", shape, map(layers.source, block.names(projection)))
        for projection, shape in shapes.items()
    )
    y_TD = graph.node(
        "MoE",
        *(x_TD, cast(graph, logits_TN, FLOAT, graph.element_type), fc_in, "", fc_out),
        domain=MICROSOFT,
        k=1,
        normalize_routing_weights=1,
        activation_type=OPERATOR_ACTIVATIONS[block.activation],
    )
    weight_T1 = graph.node("ReduceSum", weights_TN, graph.integers(-1), keepdims=1)
    return graph.node("Mul", y_TD, cast(graph, weight_T1, FLOAT, graph.element_type))


def _quantised_mixture(layers: Layers, block: Block, x_TD: str, weights_TN: str, bits: int) -> str:
    """Return the output [T, D] of one com.microsoft::QMoE node."""
    size = block_size(block.hidden, block.width)
    assert size is not None, f"{block.hidden} and {block.width} inputs"
    shapes = {IN: (block.experts, block.width, block.hidden), OUT: (block.experts, block.hidden, block.width)}
    packed = []
    for projection, shape in shapes.items():
        rounded = ([layers.rounded(name, bits, size)] for name in block.names(projection))
        packed += [*layers.stacked_in_bits(f"{block.prefix}.experts.{projection}", shape, rounded, bits), ""]
    return layers.graph.node(
        "QMoE",
        *(x_TD, weights_TN, *packed[:-1]),
        *[""] * (ROUTER_WEIGHTS - 7),
        weights_TN,
        domain=MICROSOFT,
        k=1,
        normalize_routing_weights=0,
        expert_weight_bits=bits,
        block_size=size,
        accuracy_level=ROUNDED_ACTIVATIONS,
        activation_type=OPERATOR_ACTIVATIONS[block.activation],
    )
