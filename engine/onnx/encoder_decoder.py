"""An encoder-decoder as two ONNX graphs with one data file: the encoder and the decoder.

The encoder has the inputs `input_ids` and `attention_mask` [B, S], 0 at padding, and the output `last_hidden_state` [B,
S, D]. The decoder has the inputs `input_ids` [B, L], `encoder_attention_mask` [B, S], `encoder_hidden_states` [B, S,
D], and for each layer `past_key_values.N.decoder.key` and `.value` [B, H, P, E] and `past_key_values.N.encoder.key` and
`.value` [B, H, C, E]. Its outputs are `logits` [B, L, V] and `present.N.…`, the past of the next call.

Keys and values of the source are computed only for positions that are not in the past: for all of them if C is 0, for
none if C is S. Therefore the first call and all later ones use one graph without control flow.

Shape suffixes: B batch, S source positions, C source positions with cached keys and values, L new target positions, P
earlier target positions, H heads, E head dimension, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from engine.checkpoint.kinds import DECODER_NAME, ENCODER_NAME
from engine.errors import UnsupportedError
from engine.families.encoder_decoders import FFN_PROJECTIONS, GATED_PROJECTIONS, STACKS
from engine.files.json_file import shown, writing
from engine.onnx.capacity_experts import Block, capacity_experts
from engine.onnx.graph import INT64, Graph
from engine.onnx.layers import ACTIVATIONS, Layers
from engine.onnx.quantize import Written
from engine.onnx.relative_attention import attend, causal_mask, padding_mask, position_bias, split_heads
from engine.onnx.runtime import DATA_NAME
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

END = 2**31 - 1
PARTS = ("key", "value")
FARTHEST = 65536
"""Upper limit of the distance with a separate bias, because the table has a row for each distance."""


def check_graphs(checkpoint: EncoderDecoderCheckpoint) -> None:
    """Raise UnsupportedError naming each attribute of the config that the graphs do not support."""
    config, lacking = checkpoint.config, []
    if config.dense_act_fn not in ACTIVATIONS:
        lacking.append(f"{checkpoint.row.activation_key}={shown(getattr(config, checkpoint.row.activation_key))}")
    if checkpoint.experts and config.router_dtype != "float32":
        lacking.append(f"router_dtype={shown(config.router_dtype)}")
    count, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if count < 4 or not count // 2 < farthest <= FARTHEST:
        lacking.append(f"relative_attention_num_buckets={shown(count)} up to distance {shown(farthest)}")
    lacking += [f"no layers in the {stack}" for stack, layers in checkpoint.layers.items() if layers < 1]
    if lacking:
        raise UnsupportedError(
            f"{checkpoint.directory}: config.json needs features that exported graphs lack: {', '.join(lacking)}; "
            "this model cannot be exported"
        )


def write_encoder_decoder(
    checkpoint: EncoderDecoderCheckpoint,
    directory: Path,
    *,
    dtype: torch.dtype,
    portable: bool,
    bits: int | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Written:
    """Write both graphs and their weights, layer by layer.

    The options are those of write_decoder (engine/onnx/decoder.py).
    """
    names = [f"{stack}.{layer}" for stack in STACKS for layer in range(checkpoint.layers[stack])]
    data_path = directory / DATA_NAME
    with writing(data_path, "ONNX weights"), data_path.open("wb") as data:

        def layers(graph: Graph) -> Layers:
            return Layers(
                graph=graph,
                source=lambda name: checkpoint.tensor(name).to(dtype),
                norm_epsilon=checkpoint.config.layer_norm_epsilon,
                portable=portable,
                bits=bits,
            )

        first = layers(Graph(directory, data, dtype))
        second = layers(Graph(directory, data, dtype, beside=first.graph))
        stacks: dict[str, StackGraph] = {
            "encoder": EncoderGraph(first, checkpoint),
            "decoder": DecoderGraph(second, checkpoint),
        }
        for name in progress(names):
            stack, layer = name.split(".")
            stacks[stack].add_layer(int(layer))
            checkpoint.release()
        for own in stacks.values():
            own.end()
    for graph, file_name in ((first.graph, ENCODER_NAME), (second.graph, DECODER_NAME)):
        graph.save(checkpoint.row.model_type, {}, file_name)
    return Written(first.graph.weights_bytes + second.graph.weights_bytes, first.packings | second.packings)


class StackGraph:
    """One of the two graphs while it is written: a residual stream [B, L, D] with sublayers."""

    name: str

    def __init__(self, layers: Layers, checkpoint: EncoderDecoderCheckpoint, ids_BL: str) -> None:
        self.layers, self.graph, self.checkpoint, self.config = layers, layers.graph, checkpoint, checkpoint.config
        self._x = layers.embedded(ids_BL, checkpoint.table(f"{self.name}.embed_tokens.weight"))

    def add_layer(self, layer: int) -> None:
        """Add one layer: attention and feed-forward block, each after its norm and with a residual connection."""
        with self.graph.scope(f"layers.{layer}"):
            self._attend(layer)
            with self.graph.scope("feed_forward"):
                block = self.checkpoint.block(f"{self.name}.{layer}")
                normed = self._normed(block.rpartition(".")[0])
                self._add(self._feed_forward(f"{self.name}.{layer}", block, normed))

    def end(self) -> None:
        """Add the last norm and the graph's outputs."""
        raise NotImplementedError

    def _attend(self, layer: int) -> None:
        raise NotImplementedError

    def _add(self, y_BLD: str) -> None:
        self._x = self.graph.node("Add", self._x, y_BLD)

    def _normed(self, prefix: str) -> str:
        return self.layers.rms_norm(self._x, f"{prefix}.layer_norm.weight")

    def _last(self) -> str:
        return self.layers.rms_norm(self._x, f"{self.name}.final_layer_norm.weight")

    def _position_bias(self, query_L: str, key_P: str) -> str:
        weight = f"{self.name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        farthest = self.config.relative_attention_max_distance
        return position_bias(self.layers, weight, query_L, key_P, farthest, both_ways=self.name == "encoder")

    def _heads(self, x_BLD: str, prefix: str, which: str) -> str:
        """Return queries, keys or values, [B, H, L, E]."""
        y = self.layers.linear(x_BLD, f"{prefix}.{which}.weight")
        return split_heads(self.graph, y, self.config.num_heads, self.config.d_kv)

    def _mixed(self, prefix: str, query_BHLE: str, key_BHPE: str, value_BHPE: str, bias_BHLP: str) -> str:
        mixed = attend(self.graph, query_BHLE, key_BHPE, value_BHPE, bias_BHLP)
        return self.layers.linear(mixed, f"{prefix}.o.weight")

    def _feed_forward(self, name: str, block: str, x_BLD: str) -> str:
        config, activation = self.config, self.config.dense_act_fn
        if name in self.checkpoint.experts:
            sparse = Block(
                block, self.checkpoint.experts[name], config.d_model, config.d_ff, config.expert_capacity, activation
            )
            return capacity_experts(self.layers, self.checkpoint, sparse, x_BLD)
        gate, down = (f"{block}.{projection}" for projection in FFN_PROJECTIONS)
        gated = [f"{block}.{projection}" for projection in GATED_PROJECTIONS]
        is_gated = gated[0] in self.checkpoint.by_name
        x_TD = self.graph.node("Reshape", x_BLD, self.graph.integers(-1, config.d_model))
        y_TD = self.layers.feed_forward(x_TD, [*(gated if is_gated else [gate]), down], activation)
        return self.graph.node("Reshape", y_TD, self.graph.node("Shape", x_BLD))


class EncoderGraph(StackGraph):
    """The graph that reads a source."""

    name = "encoder"

    def __init__(self, layers: Layers, checkpoint: EncoderDecoderCheckpoint) -> None:
        graph = layers.graph
        ids_BS, mask_BS = (
            graph.input(name, INT64, ("batch_size", "encoder_sequence_length")) for name in ("input_ids", "attention_mask")
        )
        super().__init__(layers, checkpoint, ids_BS)
        place_S = graph.range(graph.size(ids_BS, 1))
        self._bias_BHSS = graph.node("Add", self._position_bias(place_S, place_S), padding_mask(graph, mask_BS))

    def _attend(self, layer: int) -> None:
        with self.graph.scope("attention"):
            sublayer = f"encoder.block.{layer}.layer.0"
            normed, prefix = self._normed(sublayer), f"{sublayer}.SelfAttention"
            query, key, value = (self._heads(normed, prefix, which) for which in ("q", "k", "v"))
            self._add(self._mixed(prefix, query, key, value, self._bias_BHSS))

    def end(self) -> None:
        self.graph.node("Identity", self._last(), name="last_hidden_state")
        shape = ("batch_size", "encoder_sequence_length", self.config.d_model)
        self.graph.output("last_hidden_state", self.graph.element_type, shape)


class DecoderGraph(StackGraph):
    """The graph that generates a target."""

    name = "decoder"

    def __init__(self, layers: Layers, checkpoint: EncoderDecoderCheckpoint) -> None:
        graph, hidden = layers.graph, checkpoint.config.d_model
        ids_BL = graph.input("input_ids", INT64, ("batch_size", "decoder_sequence_length"))
        mask_BS = graph.input("encoder_attention_mask", INT64, ("batch_size", "encoder_sequence_length"))
        states_BSD = graph.input(
            "encoder_hidden_states", graph.element_type, ("batch_size", "encoder_sequence_length", hidden)
        )
        super().__init__(layers, checkpoint, ids_BL)
        past_1, known_1 = (graph.size(f"past_key_values.0.{kind}.key", 2) for kind in STACKS[::-1])
        self._unknown_BSD = graph.node("Slice", states_BSD, known_1, graph.integers(END), graph.integers(1))
        new_1 = graph.size(ids_BL, 1)
        query_L = graph.node("Add", graph.range(new_1), past_1)
        key_P = graph.range(graph.node("Add", past_1, new_1))
        position_1HLP = self._position_bias(query_L, key_P)
        self._self_bias = graph.node("Add", position_1HLP, causal_mask(graph, query_L, key_P))
        self._cross_bias = padding_mask(graph, mask_BS)

    def _attend(self, layer: int) -> None:
        for place, (module, kind, bias) in enumerate(
            (("SelfAttention", "decoder", self._self_bias), ("EncDecAttention", "encoder", self._cross_bias))
        ):
            with self.graph.scope(f"{kind}_attention"):
                sublayer = f"decoder.block.{layer}.layer.{place}"
                normed, prefix = self._normed(sublayer), f"{sublayer}.{module}"
                read = normed if kind == "decoder" else self._unknown_BSD
                key, value = (self._extended(layer, kind, part, self._heads(read, prefix, part[0])) for part in PARTS)
                self._add(self._mixed(prefix, self._heads(normed, prefix, "q"), key, value, bias))

    def _extended(self, layer: int, kind: str, part: str, x_BHLE: str) -> str:
        """Append the new keys or values to the layer's earlier ones, declared as input and output."""
        graph, config = self.graph, self.config
        past, present = f"past_key_values.{layer}.{kind}.{part}", f"present.{layer}.{kind}.{part}"
        for declare, name, when in ((graph.input, past, "past"), (graph.output, present, "present")):
            shape = ("batch_size", config.num_heads, f"{when}_{kind}_sequence_length", config.d_kv)
            declare(name, graph.element_type, shape)
        return graph.node("Concat", past, x_BHLE, name=present, axis=2)

    def end(self) -> None:
        graph, config = self.graph, self.config
        x_BLD = self._last()
        if getattr(config, self.checkpoint.row.scaled_head_key):
            x_BLD = graph.node("Mul", x_BLD, graph.number(config.d_model**-0.5))
        self.layers.logits(x_BLD, self.checkpoint.table(self.checkpoint.row.head), (config.vocab_size, config.d_model))
        graph.output("logits", graph.element_type, ("batch_size", "decoder_sequence_length", config.vocab_size))
