"""Attention as ONNX nodes, in two forms with equal inputs and equal logits.

`GroupedQuery` is one com.microsoft::GroupQueryAttention node per layer. The node needs sequences that begin at the
first position, so a batch padded on the left is shifted there in its first call, and its hidden states are shifted back
before the head. The node counts positions, applies the rotary embedding, and writes into a cache that may be the one it
reads. `Standard` is the formula in standard operators with a mask, for any head dimension.

If a long text uses other rotary angles, the cosine and sine tables hold both kinds, one below the other.

Latent attention uses standard operators in both forms, and in its absorbed form (`latent_attention.py` of the decoder)
for any number of positions: queries are projected to the latent space, and the cache holds the latent vector and the
rotated key of each position.

Shape suffixes: B batch, L new positions, P all positions so far, G key-value heads, Q query heads of each key-value
head, H query heads, E head dimension, R its rotated dimensions, N its other dimensions, C half of the rotated
dimensions or the latent dimension, V value dimension, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.decoder.latent_attention import LATENT_NORM_EPSILON, softmax_scale
from engine.families.config import DecoderConfig
from engine.families.layer_config import Chunk
from engine.families.rotary_embedding import Rotary
from engine.families.tensor_names import LATENT_UP, sinks_tensor
from engine.onnx.graph import BOOL, INT32, INT64, MICROSOFT, Graph
from engine.onnx.layers import Parts
from engine.onnx.runtime import HEAD_MULTIPLE

MASKED = -6e4
"""Replacement of −∞ in scores that float16 can represent."""


class Projected(NamedTuple):
    """Queries, keys and values of the new positions, [B, L, heads · E] each."""

    query: str
    key: str
    value: str


class AttentionForm(Protocol):
    """Interface of a graph's form of attention. Its constructor creates the nodes that all layers share."""

    shares_cache: bool
    """Whether new keys and values may be written into the memory of the past ones."""

    def arrange(self, tokens_BL: str) -> str:
        """Return the tokens in the order in which the layers read them."""

    def restore(self, x_BLD: str) -> str:
        """Return hidden states in the order of the input."""

    def attend(self, layer: int, projected: Projected) -> str:
        """Return the attention output, [B, L, heads · E], and declare the layer's cache as inputs and outputs."""


def attention(parts: Parts, form: AttentionForm, layer: int, x_BLD: str) -> str:
    """Add the nodes of one layer's self-attention, [B, L, D] to [B, L, D]."""
    config, prefix = parts.config, f"model.layers.{layer}.self_attn"
    if isinstance(form, Latent):
        return form.attention(layer, x_BLD)
    projected = Projected(*(_projection(parts, layer, x_BLD, which) for which in ("q", "k", "v")))
    mixed = form.attend(layer, projected)
    return parts.linear(mixed, f"{prefix}.o_proj.weight", f"{prefix}.o_proj.bias" if config.output_bias else None)


def _projection(parts: Parts, layer: int, x_BLD: str, which: str) -> str:
    """Add the projection of queries, keys or values, including bias, norm and clipping."""
    graph, config, prefix = parts.graph, parts.config, f"model.layers.{layer}.self_attn"
    y = parts.linear(x_BLD, f"{prefix}.{which}_proj.weight", f"{prefix}.{which}_proj.bias" if config.qkv_bias else None)
    norm = "none" if which == "v" else config.qk_norm
    if norm == "full":
        y = parts.rms_norm(y, f"{prefix}.{which}_norm.weight")
    if config.clip_qkv is not None:
        y = graph.node("Clip", y, graph.number(-config.clip_qkv), graph.number(config.clip_qkv))
    if norm == "head":
        heads = graph.node("Reshape", y, graph.integers(0, 0, -1, config.head_dimension))
        y = graph.node("Reshape", parts.rms_norm(heads, f"{prefix}.{which}_norm.weight"), graph.integers(0, 0, -1))
    return y


def attention_form(parts: Parts, tokens_BL: str, mask_BP: str) -> AttentionForm:
    """Return GroupedQuery, or Standard for standard operators only and for head dimensions that the node cannot rotate."""
    if parts.config.latent is not None:
        return Latent(parts, tokens_BL, mask_BP)
    rotates = parts.config.head_dimension % HEAD_MULTIPLE == 0 == parts.config.rotary_dimension % HEAD_MULTIPLE
    return (GroupedQuery if rotates and not parts.portable else Standard)(parts, tokens_BL, mask_BP)


class _Tables:
    """Cosines and sines by position; from row `switch` on, those for a text longer than `switch`."""

    def __init__(self, graph: Graph, config: DecoderConfig) -> None:
        rotary = Rotary(config)
        self.switch = rotary.switch
        lengths = [config.max_positions] if self.switch is None else [self.switch, config.max_positions]
        tables = [rotary(torch.arange(length)[None], torch.float32) for length in lengths]
        half = config.rotary_dimension // 2
        cosine_PC, sine_PC = (torch.cat([table[which][0, 0, :, :half] for table in tables]) for which in (0, 1))
        self.cosine = graph.weight("rotary.cosine", lambda: cosine_PC.to(graph.dtype))
        self.sine = graph.weight("rotary.sine", lambda: sine_PC.to(graph.dtype))

    def first_row(self, graph: Graph, positions: str) -> str | None:
        """Return the row of position 0 as an int64 scalar, or None for 0.

        The row depends on the last position of the call, which is the largest of `positions`.
        """
        if self.switch is None:
            return None
        last = graph.node("ReduceMax", positions, keepdims=0)
        is_long = graph.node("GreaterOrEqual", last, graph.integer(self.switch))
        return graph.node("Mul", graph.node("Cast", is_long, to=INT64), graph.integer(self.switch))


def _cache(parts: Parts, layer: int, part: str, length: str) -> tuple[str, str]:
    """Declare a layer's cached keys or values as input and output, and return both names.

    `length`: the past dimension's name.
    """
    graph = parts.graph
    past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
    heads, key, value = parts.config.cached
    size = key if part == "key" else value
    graph.input(past, graph.element_type, ("batch_size", heads, length, size))
    graph.output(present, graph.element_type, ("batch_size", heads, "total_sequence_length", size))
    return past, present


class GroupedQuery:
    """Attention by one com.microsoft::GroupQueryAttention node per layer."""

    shares_cache = True

    def __init__(self, parts: Parts, tokens_BL: str, mask_BP: str) -> None:
        self._parts, graph = parts, parts.graph
        new_1, total_1 = graph.size(tokens_BL, 1), graph.size(mask_BP, 1)
        real_B1 = graph.node("ReduceSum", mask_BP, graph.integers(1), keepdims=1)
        last_B1 = graph.node("Sub", real_B1, graph.integer(1))
        self._last_B = graph.node("Cast", graph.node("Squeeze", last_B1, graph.integers(1)), to=INT32)
        self._total = graph.node("Cast", graph.node("Squeeze", total_1), to=INT32)
        # Only the first call can be padded: afterwards, each sequence's next token follows its own last one.
        is_first_1 = graph.node("Cast", graph.node("Equal", new_1, total_1), to=INT64)
        padding_B1 = graph.node("Mul", graph.node("ArgMax", mask_BP, axis=1, keepdims=1), is_first_1)
        place_L = graph.range(new_1)
        self._from_BL = graph.node("Mod", graph.node("Add", place_L, padding_B1), new_1)
        self._back_BL = graph.node("Mod", graph.node("Sub", place_L, padding_B1), new_1)
        self._tables = _Tables(graph, parts.config)
        self._positions = ""
        row = self._tables.first_row(graph, last_B1)
        if row is not None:
            # In the first call the node adds the padding itself; afterwards it uses the positions as they are.
            before_B1 = graph.node("Mul", graph.node("Sub", real_B1, new_1), graph.node("Sub", graph.integer(1), is_first_1))
            self._positions = graph.node("Add", graph.node("Add", before_B1, place_L), row)

    def arrange(self, tokens_BL: str) -> str:
        return self._parts.graph.node("GatherElements", tokens_BL, self._from_BL, axis=1)

    def restore(self, x_BLD: str) -> str:
        graph = self._parts.graph
        return graph.node("GatherND", x_BLD, graph.node("Unsqueeze", self._back_BL, graph.integers(2)), batch_dims=1)

    def attend(self, layer: int, projected: Projected) -> str:
        graph, config = self._parts.graph, self._parts.config
        past_key, key = _cache(self._parts, layer, "key", "past_sequence_length")
        past_value, value = _cache(self._parts, layer, "value", "past_sequence_length")
        window = config.layers[layer].window
        mixed, *_ = graph.nodes(
            "GroupQueryAttention",
            *projected,
            past_key,
            past_value,
            self._last_B,
            self._total,
            self._tables.cosine,
            self._tables.sine,
            *self._optional(layer),
            outputs=["", key, value],
            domain=MICROSOFT,
            num_heads=config.attention_heads,
            kv_num_heads=config.key_value_heads,
            local_window_size=-1 if window is None else window,
            do_rotary=1,
            rotary_interleaved=int(config.rotary_pairs),
            **({} if config.multipliers.attention is None else {"scale": config.multipliers.attention}),
        )
        return mixed

    def _optional(self, layer: int) -> list[str]:
        """Return the node's last inputs: positions, a bias of scores, sinks."""
        sinks = ["", self._parts.stored(sinks_tensor(layer))] if self._parts.config.has_sinks else []
        return [self._positions, *sinks] if self._positions or sinks else []


class Standard:
    """Scores, mask, softmax and weighted sum, with the query heads of one key-value head side by side."""

    shares_cache = False

    def __init__(self, parts: Parts, tokens_BL: str, mask_BP: str) -> None:
        self._parts, graph = parts, parts.graph
        new_1, total_1 = graph.size(tokens_BL, 1), graph.size(mask_BP, 1)
        past_1 = graph.node("Sub", total_1, new_1)
        counted_BP = graph.node("Sub", graph.node("CumSum", mask_BP, graph.integer(1)), graph.integer(1))
        counted_BP = graph.node("Max", counted_BP, graph.integer(0))
        positions_BL = graph.node("Slice", counted_BP, past_1, total_1, graph.integers(1))
        tables = _Tables(graph, parts.config)
        row = tables.first_row(graph, positions_BL)
        if row is not None:
            positions_BL = graph.node("Add", positions_BL, row)
        self._cosine_B1LC, self._sine_B1LC = (
            graph.node("Unsqueeze", graph.node("Gather", table, positions_BL, axis=0), graph.integers(1))
            for table in (tables.cosine, tables.sine)
        )
        self._real_B1P = graph.node("Cast", graph.node("Unsqueeze", mask_BP, graph.integers(1)), to=BOOL)
        self._key_P = graph.range(total_1)
        query_L = graph.node("Add", graph.range(new_1), past_1)
        self._query_L1 = graph.node("Unsqueeze", query_L, graph.integers(1))
        self._masks: dict[int | None, str] = {}

    def arrange(self, tokens_BL: str) -> str:
        return tokens_BL

    def restore(self, x_BLD: str) -> str:
        return x_BLD

    def _mask(self, window: int | None) -> str:
        """Return the mask [B, 1, 1, L, P] to add to scores: causal, within the window, and without padding.

        A query at padding attends to its own position.
        """
        if window not in self._masks:
            graph = self._parts.graph
            allowed_LP = graph.node("LessOrEqual", self._key_P, self._query_L1)
            if window is not None:
                first_L1 = graph.node("Sub", self._query_L1, graph.integer(window))
                allowed_LP = graph.node("And", allowed_LP, graph.node("Greater", self._key_P, first_L1))
            own_LP = graph.node("Equal", self._key_P, self._query_L1)
            allowed_BLP = graph.node("Or", graph.node("And", self._real_B1P, allowed_LP), own_LP)
            mask_BLP = graph.node("Where", allowed_BLP, graph.number(0.0), graph.number(MASKED))
            self._masks[window] = graph.node("Unsqueeze", mask_BLP, graph.integers(1, 2))
        return self._masks[window]

    def attend(self, layer: int, projected: Projected) -> str:
        graph, config = self._parts.graph, self._parts.config
        groups, size = config.key_value_heads, config.head_dimension
        query_BHLE = self._rotate_first(self._heads(projected.query))
        key_BGPE = self._extended(layer, "key", self._rotate_first(self._heads(projected.key)))
        value_BGPE = self._extended(layer, "value", self._heads(projected.value))
        query_BHLE = self._parts.times(query_BHLE, config.multipliers.attention or size**-0.5)
        split = graph.integers(0, groups, config.attention_heads // groups, -1, size)
        query_BGQLE = graph.node("Reshape", query_BHLE, split)
        key_BG1EP = graph.node("Unsqueeze", graph.node("Transpose", key_BGPE, perm=[0, 1, 3, 2]), graph.integers(2))
        window = config.layers[layer].window
        assert not isinstance(window, Chunk)
        mask_B11LP = self._mask(window)
        scores_BGQLP = graph.node("Add", graph.node("MatMul", query_BGQLE, key_BG1EP), mask_B11LP)
        weights_BGQLP = self._shares(layer, scores_BGQLP)
        mixed_BGQLE = graph.node("MatMul", weights_BGQLP, graph.node("Unsqueeze", value_BGPE, graph.integers(2)))
        mixed_BLGQE = graph.node("Transpose", mixed_BGQLE, perm=[0, 3, 1, 2, 4])
        return graph.node("Reshape", mixed_BLGQE, graph.integers(0, 0, config.attention_heads * size))

    def _shares(self, layer: int, scores_BGQLP: str) -> str:
        """Apply the softmax over the keys, with a head's sink as one more key whose share is dropped."""
        graph, config = self._parts.graph, self._parts.config
        if not config.has_sinks:
            return graph.node("Softmax", scores_BGQLP, axis=-1)
        per_group = config.attention_heads // config.key_value_heads
        sinks = graph.node(
            "Reshape",
            self._parts.stored(sinks_tensor(layer)),
            graph.integers(1, config.key_value_heads, per_group, 1, 1),
        )
        shape = graph.node("Slice", graph.node("Shape", scores_BGQLP), graph.integers(0), graph.integers(4))
        shape = graph.node("Concat", shape, graph.integers(1), axis=0)
        scores = graph.node("Concat", scores_BGQLP, graph.node("Expand", sinks, shape), axis=-1)
        shares = graph.node("Softmax", scores, axis=-1)
        return graph.node("Slice", shares, graph.integers(0), graph.integers(-1), graph.integers(-1))

    def _heads(self, x: str) -> str:
        """Reshape [B, L, heads · E] to [B, heads, L, E]."""
        graph = self._parts.graph
        split = graph.node("Reshape", x, graph.integers(0, 0, -1, self._parts.config.head_dimension))
        return graph.node("Transpose", split, perm=[0, 2, 1, 3])

    def _rotate_first(self, x_BHLE: str) -> str:
        """Rotate the first dimensions of each head, which may be all."""
        graph, config = self._parts.graph, self._parts.config
        rest = config.head_dimension - config.rotary_dimension
        if not rest:
            return self._rotate(self._paired(x_BHLE))
        first, last = graph.nodes("Split", x_BHLE, graph.integers(config.rotary_dimension, rest), outputs=["", ""], axis=-1)
        return graph.node("Concat", self._rotate(self._paired(first)), last, axis=-1)

    def _paired(self, x_BHLR: str) -> str:
        """Reorder neighboring pairs so that the first half is paired with the second half."""
        graph, half = self._parts.graph, self._parts.config.rotary_dimension // 2
        if not self._parts.config.rotary_pairs:
            return x_BHLR
        pairs = graph.node("Reshape", x_BHLR, graph.integers(0, 0, 0, half, 2))
        halves = graph.node("Transpose", pairs, perm=[0, 1, 2, 4, 3])
        return graph.node("Reshape", halves, graph.integers(0, 0, 0, 2 * half))

    def _rotate(self, x_BHLR: str) -> str:
        graph, half = self._parts.graph, self._parts.config.rotary_dimension // 2
        first, second = graph.nodes("Split", x_BHLR, graph.integers(half, half), outputs=["", ""], axis=-1)
        cosine, sine = self._cosine_B1LC, self._sine_B1LC
        turned_first = graph.node("Sub", graph.node("Mul", first, cosine), graph.node("Mul", second, sine))
        turned_second = graph.node("Add", graph.node("Mul", second, cosine), graph.node("Mul", first, sine))
        return graph.node("Concat", turned_first, turned_second, axis=-1)

    def _extended(self, layer: int, part: str, x_BGLE: str) -> str:
        """Append the new keys or values to the layer's cached ones."""
        past, present = _cache(self._parts, layer, part, "past_sequence_length")
        return self._parts.graph.node("Concat", past, x_BGLE, name=present, axis=2)


class Latent(Standard):
    """Latent attention: the queries of all heads attend to one latent vector per position."""

    def attention(self, layer: int, x_BLD: str) -> str:
        """Add the nodes of one layer's self-attention, [B, L, D] to [B, L, D]."""
        parts, graph, config = self._parts, self._parts.graph, self._parts.config
        assert config.latent is not None
        sizes, heads, prefix = config.latent, config.attention_heads, f"model.layers.{layer}.self_attn"
        latent, key = self._down(f"{prefix}.kv_a_proj_with_mqa", x_BLD, (sizes.key_value_rank, sizes.rotary_dimension))
        latent = parts.rms_norm(latent, f"{prefix}.kv_a_layernorm.weight", LATENT_NORM_EPSILON)
        one = graph.integers(1)
        latent_B1PC = self._extended(layer, "key", graph.node("Unsqueeze", latent, one))
        key_B1PR = self._extended(layer, "value", self._rotate(self._paired(graph.node("Unsqueeze", key, one))))
        query_BHLN, query_BHLR = self._queries(prefix, x_BLD)
        up_key_HNC, up_value_HCV = self._up(prefix)
        scores_BHLP = graph.node(
            "Add",
            graph.node("MatMul", graph.node("MatMul", query_BHLN, up_key_HNC), self._turned(latent_B1PC)),
            graph.node("MatMul", self._rotate(self._paired(query_BHLR)), self._turned(key_B1PR)),
        )
        scores_BHLP = graph.node("Mul", scores_BHLP, graph.number(softmax_scale(config)))
        mask_B1LP = graph.node("Squeeze", self._mask(None), graph.integers(2))
        weights_BHLP = graph.node("Softmax", graph.node("Add", scores_BHLP, mask_B1LP), axis=-1)
        mixed_BHLV = graph.node("MatMul", graph.node("MatMul", weights_BHLP, latent_B1PC), up_value_HCV)
        mixed = graph.node("Transpose", mixed_BHLV, perm=[0, 2, 1, 3])
        mixed = graph.node("Reshape", mixed, graph.integers(0, 0, heads * sizes.value_dimension))
        return parts.linear(mixed, f"{prefix}.o_proj.weight", f"{prefix}.o_proj.bias" if config.output_bias else None)

    def _queries(self, prefix: str, x_BLD: str) -> tuple[str, str]:
        """Return queries without rotary embedding, [B, H, L, N], and with it, [B, H, L, R]."""
        parts, graph, config = self._parts, self._parts.graph, self._parts.config
        assert config.latent is not None
        if config.latent.query_rank:
            (x_BLD,) = self._down(f"{prefix}.q_a_proj", x_BLD, ())
            x_BLD = parts.rms_norm(x_BLD, f"{prefix}.q_a_layernorm.weight", LATENT_NORM_EPSILON)
        query = parts.linear(x_BLD, f"{prefix}.{'q_b_proj' if config.latent.query_rank else 'q_proj'}.weight")
        parted = graph.integers(config.latent.plain_dimension, config.latent.rotary_dimension)
        plain, rotary = graph.nodes("Split", self._heads(query), parted, outputs=["", ""], axis=-1)
        return plain, rotary

    def _down(self, name: str, x_BLD: str, sizes: tuple[int, ...]) -> list[str]:
        """Add a product, with a bias if the config has one, split into pieces of these sizes."""
        bias = f"{name}.bias" if self._parts.config.qkv_bias else None
        y = self._parts.linear(x_BLD, f"{name}.weight", bias)
        graph = self._parts.graph
        return graph.nodes("Split", y, graph.integers(*sizes), outputs=[""] * len(sizes), axis=-1) if sizes else [y]

    def _up(self, prefix: str) -> tuple[str, str]:
        """Return the up-projections from latent vectors to keys [H, N, C] and values [H, C, V]; they are never quantized."""
        parts, name = self._parts, f"{prefix}.{LATENT_UP}"
        sizes = parts.config.latent
        assert sizes is not None

        def up(place: int) -> Tensor:
            made_HEC = parts.source(name).view(parts.config.attention_heads, -1, sizes.key_value_rank)
            parted: tuple[Tensor, ...] = made_HEC.split((sizes.plain_dimension, sizes.value_dimension), dim=1)
            return parted[place]

        return parts.graph.weight(f"{name}.keys", lambda: up(0)), parts.graph.weight(f"{name}.values", lambda: up(1).mT)

    def _turned(self, x_B1PC: str) -> str:
        return self._parts.graph.node("Transpose", x_B1PC, perm=[0, 1, 3, 2])
