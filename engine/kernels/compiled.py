"""The compiled kernels as the rest of the program calls them: functions of addresses, which validate nothing.

Importing this module loads Numba. It raises ImportError if Numba is not installed, and RuntimeError if compiled code cannot
be kept on disk. Weights are read in place, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import addressof, c_char, c_void_p, cast
from itertools import accumulate
from typing import Any

import numpy as np

from engine.kernels import expert_panels, experts, panel_tiles, panels, rounding_search
from engine.kernels import products as product_kernels
from engine.kernels.attention import grouped
from engine.kernels.attention import latent as latent_attention
from engine.kernels.attention.grouped import ATTENTION
from engine.kernels.attention.latent import LATENT as LATENT_ATTENTION
from engine.kernels.attention.prompts import PROMPT, attend_prompt
from engine.kernels.compiler.cache_directory import cache_directory
from engine.kernels.compiler.compiling import KERNELS, Kernel, prepare
from engine.kernels.compiler.crew import OWN_TABLE
from engine.kernels.compiler.instructions import LANES
from engine.kernels.compiler.parallel import ONE_THREAD_BYTES, TABLE_ADDRESS, threads_used, use_threads, uses_openmp
from engine.kernels.compiler.processor import MULTIPLIES_BFLOAT16, MULTIPLIES_INTEGERS, MULTIPLIES_QUADRUPLES
from engine.kernels.experts import EXPERT, EXPERTS
from engine.kernels.panels import multiplies_many
from engine.kernels.products import PRODUCTS
from engine.kernels.recurrences.gated_delta import GATED_DELTA
from engine.kernels.recurrences.mamba2 import MAMBA2
from engine.kernels.recurrences.short_convolution import SHORT_CONVOLUTION
from engine.kernels.rounding_search import SCALES as ROUNDING_SCALES
from engine.kernels.step import attention as step_attention
from engine.kernels.step import choices as step_choices
from engine.kernels.step import layers as step_layers
from engine.kernels.step import tokens as step_tokens
from engine.kernels.step.experts import BEFORE_EXPERTS, require_experts
from engine.kernels.step.latent import latent_layer
from engine.kernels.step.layers import (
    ATTENDS,
    CHOOSE,
    HEAD_NORM,
    LATENT,
    LAYER,
    MIX,
    NO_NORM,
    OUTSIDE,
    RECURS,
    STEP,
    WHOLE_NORM,
)
from engine.kernels.step.recurrence import RECURRENT, recurrent_layer
from engine.kernels.step.tokens import ANGLES, TEXT
from engine.kernels.stored import block_products, float_products, half_byte_products, low_bit
from engine.kernels.stored.block_types import BLOCK_KINDS
from engine.kernels.stored.float_types import FLOAT_KINDS, UNIT, WHOLE_ROWS
from engine.kernels.stored.forms import (
    BLOCKS,
    FLOAT16,
    FLOAT32,
    MIXED,
    PLAIN,
    TAKE_FLOATS,
    WIDE,
    Form,
    form_address,
    form_kernels,
    own_forms,
)
from engine.kernels.stored.low_bit import GROUP_SIZES, MULTIPLE_OF_OUTPUTS
from engine.kernels.stored.rounded_vectors import ROUNDED

__all__ = [
    "ANGLES",
    "ATTENDS",
    "BEFORE_EXPERTS",
    "BLOCKS",
    "BLOCK_KINDS",
    "CHOOSE",
    "FLOAT16",
    "FLOAT32",
    "FLOAT_KINDS",
    "GROUP_SIZES",
    "HEAD_NORM",
    "KERNELS",
    "LANES",
    "LATENT",
    "LAYER",
    "MIX",
    "MIXED",
    "MULTIPLE_OF_OUTPUTS",
    "MULTIPLIES_BFLOAT16",
    "MULTIPLIES_INTEGERS",
    "MULTIPLIES_QUADRUPLES",
    "NO_NORM",
    "ONE_THREAD_BYTES",
    "OUTSIDE",
    "PLAIN",
    "RECURRENCES",
    "RECURS",
    "ROUNDED",
    "ROUNDING_SCALES",
    "UNIT",
    "WHOLE_NORM",
    "WHOLE_ROWS",
    "WIDE",
    "WITHOUT_GATE",
    "attend",
    "attend_latent",
    "attend_texts",
    "attention_records",
    "block_products",
    "cache_directory",
    "decode_tokens",
    "dequantized",
    "expert_table",
    "float_products",
    "form_address",
    "half_byte_products",
    "load_parts",
    "multiplies_many",
    "needed",
    "needed_for_floats",
    "own_forms",
    "own_table",
    "panel_tiles",
    "prepare",
    "products",
    "recur",
    "recurrent_record",
    "recurrent_table",
    "rms_norm",
    "search_rounding",
    "step_record",
    "swiglu",
    "text_record",
    "use_states",
    "use_threads",
]
WITHOUT_GATE = 1.0, experts.NO_GATE
"""α and limit of experts without a gate."""
RECURRENCES = {"gated_delta": GATED_DELTA, "mamba2": MAMBA2, "short_convolution": SHORT_CONVOLUTION}
"""The records of the kernels of layers with a state, by the kernels' names."""
Address = int
Place = tuple[Address, Address]
"""Addresses of a weight's values and of its scales. Plain weights have no scales (0); those in blocks have their form."""

cache_directory()


def _record(kind: Any, **fields: Any) -> Any:
    """Return an array of one record with these fields. The other fields are zero."""
    value = fields.get
    return np.array([tuple([value(name, 0) for name in kind.names])], kind)  # half the time of setting them one by one


def _address(array: Any) -> Address:
    try:
        return addressof(c_char.from_buffer(array))  # a third of the time of `ctypes.data`
    except (TypeError, ValueError):  # a read-only array, or one without elements
        return int(array.ctypes.data)


def _empty_results(rows: int, size: int, form: Form) -> Any:
    """Return an array for the results of a call in this form: float32, or the bits of bfloat16."""
    return np.empty((rows, size), np.float32 if form in TAKE_FLOATS else np.uint16)


def products(
    x: Address,
    rows: int,
    weights: Sequence[Place],
    outputs: Sequence[int],
    inputs: int,
    form: Form = PLAIN,
    *,
    many: bool = False,
) -> Any:
    """Return [x·W_0ᵀ, x·W_1ᵀ, …] side by side, [T, O], as the bits of bfloat16.

    x: contiguous bfloat16. form: the form that all weights share. many: whether to use the kernel for many rows, which does
    not know the forms FLOAT16 and WIDE. In these and in FLOAT32, x and the results are float32.
    """
    ends_M, matrices = np.array(list(accumulate(outputs)), np.int64), np.array(weights, np.int64)
    y_TO = _empty_results(rows, ends_M[-1], form)
    job = _record(
        PRODUCTS,
        kernels=TABLE_ADDRESS,
        form=form_address(form),
        x=x,
        rows=rows,
        inputs=inputs,
        matrices=_address(matrices),
        ends=_address(ends_M),
        count=len(ends_M),
        threads=threads_used(),
        results=_address(y_TO),
    )
    (panels.panel_products if many else product_kernels.products)(_address(job))
    return y_TO


def expert_table(experts: Iterable[tuple[Sequence[Place], int]]) -> Any:
    """Return the table for `swiglu`: each expert's width, and the addresses of its gate, up and down, and of their plain
    biases if any. The addresses of a missing gate are 0.

    experts: addresses and width of each expert. Widths are multiples of a low-bit form's group, and of 4 for the kernel for
    many tokens.
    """
    rows = [(*each[:3], *(bias for bias, _ in each[3:]), *(0,) * (6 - len(each)), width) for each, width in experts]
    return np.array(rows, EXPERT)


def swiglu(
    x: Address,
    experts_N: Any,
    chosen_TS: Any,
    weights_TS: Any,
    hidden: int,
    form: Form = PLAIN,
    clamp: tuple[float, float] | None = None,
    scales_TS: Any = None,
    *,
    many: bool = False,
) -> Any:
    """Return Σ_s w_s · FFN_s(scale_s · x), [T, D], as the bits of bfloat16.

    Each expert's weights are read once for all tokens that chose the expert.

    x [T, D]: contiguous bfloat16. experts_N: an `expert_table`. chosen_TS: int64, negative for an empty slot; weights_TS,
    scales_TS: float32, None for scales of one. hidden: D. form: the form of the matrices. clamp: α and limit of a
    ClampedSwiglu; WITHOUT_GATE for experts without a gate. many: whether to use the kernel for many tokens of each expert.
    In the forms FLOAT32 and FLOAT16, x and the results are float32, and there are no biases.
    """
    alpha, limit = clamp or (1.0, 0.0)
    assert chosen_TS.dtype == np.int64 and weights_TS.dtype == np.float32
    (tokens, slots), y_TD = chosen_TS.shape, _empty_results(chosen_TS.shape[0], hidden, form)
    job = _record(
        EXPERTS,
        kernels=TABLE_ADDRESS,
        form=form_address(form),
        x=x,
        tokens=tokens,
        hidden=hidden,
        experts=_address(experts_N),
        count=len(experts_N),
        chosen=_address(chosen_TS),
        weights=_address(weights_TS),
        scales=0 if scales_TS is None else _address(scales_TS),
        slots=slots,
        threads=threads_used(),
        results=_address(y_TD),
        alpha=alpha,
        limit=limit,
    )
    (expert_panels.panel_swiglu if many else experts.swiglu)(_address(job))
    return y_TD


def dequantized(weight: Place, shape: tuple[int, int], form: Form) -> Any:
    """Return the dequantized matrix [O, I] of a low-bit weight, as the bits of bfloat16. Each weight is rounded once."""
    y_OI = np.empty(shape, np.uint16)
    job = _record(low_bit.WIDENED, kernels=TABLE_ADDRESS, form=form_address(form), values=weight[0], scales=weight[1])
    job["outputs"], job["inputs"], job["results"] = *shape, _address(y_OI)
    low_bit.widen_matrix(_address(job))
    return y_OI


def rms_norm(x: Address, weight: Address, epsilon: float, rows: int, size: int, *, zero_centered: bool = False) -> Any:
    """Return x / rms(x) · weight for each row, [T, D], as the bits of bfloat16. x and weight are contiguous bfloat16.

    zero_centered: whether the weight is stored as its difference from 1.
    """
    y_TD = np.empty((rows, size), np.uint16)
    kernel = product_kernels.centered_norm if zero_centered else product_kernels.rms_norm
    kernel(x, weight, epsilon, rows, size, _address(y_TD))
    return y_TD


def attend(
    inputs: Sequence[Address],
    strides: Sequence[int],
    cache: Sequence[Address],
    shape: tuple[int, int, int, int, int],
    group_stride: int,
    places: tuple[Any, Any, int, bool],
    window: int | None,
    scale: float,
    sinks_H: Any = None,
) -> Any:
    """Attend for one new position of each sequence: rotate queries and keys, append keys and values to the cache, and
    attend.

    inputs: query [B, H, E], key and value [B, G, E], cosine and sine [B, R]; strides: values from one sequence's query, key
    and value to the next one's. cache: keys and values [G, slots, E], with `group_stride` values from one group to the next,
    and where they have 8 bits, the scales of both [G, slots].
    shape: B, H, G, E and R. places: blocks int64 [B, M] of each sequence, filled positions int64 [B], positions per block,
    and whether several of the B may be positions of one sequence, each of which then also attends to those before it.
    window: size of the sliding window, a negative size of chunks, or None for neither. scale: factor of the scores.
    sinks_H: attention sinks, float32, if the heads have any. Returns [B, H, E] as the bits of bfloat16.
    """
    (sequences, heads, groups, size, rotated), (blocks_BM, past_B, block_size, repeats) = shape, places
    mixed_BHE = np.empty((sequences, heads, size), np.uint16)
    job = _record(
        ATTENTION,
        kernels=TABLE_ADDRESS,
        **dict(zip(("query", "key", "value", "cosine", "sine"), inputs, strict=True)),
        **dict(zip(("query_stride", "key_stride", "value_stride"), strides, strict=True)),
        **dict(zip(("keys", "values", "key_scales", "value_scales"), cache, strict=False)),
        group_stride=group_stride,
        sequences=sequences,
        heads=heads,
        groups=groups,
        size=size,
        rotated=rotated,
        blocks=_address(blocks_BM),
        blocks_of_one=blocks_BM.shape[1],
        past=_address(past_B),
        block_size=block_size,
        window=window or 0,
        sinks=0 if sinks_H is None else _address(sinks_H),
        repeats=int(repeats),
        results=_address(mixed_BHE),
        scale=scale,
    )
    grouped.attend(_address(job))
    return mixed_BHE


def attend_texts(
    inputs: Sequence[Address],
    strides: Sequence[tuple[int, int, int]],
    scales: tuple[Address, Address, int, int],
    shape: tuple[int, int, int, int, int, int, int],
    first: int,
    window: int | None,
    scale: float,
    sinks_H: Any = None,
) -> Any:
    """Attend for the last positions of each sequence, whose keys and values are in place.

    inputs: query [B, H, L, E], key [B, G, P, E] and value [B, G, P, V], the query in bfloat16; strides: of each, from one
    sequence, head and position to the next, in values. scales: addresses of those of keys and values, float32 [B, G, P],
    where these have 8 bits, else 0, and their strides from one sequence and group to the next. shape: B, H, G, E, V, L and
    P. first: number of the first key's position in its text. window, scale and sinks_H: as in `attend`. Returns
    [B, L, H, V] as the bits of bfloat16.
    """
    sequences, heads, groups, size, value_size, new, total = shape
    mixed_BLHV = np.empty((sequences, new, heads, value_size), np.uint16)
    steps = {
        f"{name}_{step}": own
        for name, each in zip(("query", "key", "value"), strides, strict=True)
        for step, own in zip(("sequence", "head", "position"), each, strict=True)
    }
    job = _record(
        PROMPT,
        kernels=TABLE_ADDRESS,
        **dict(zip(("query", "key", "value"), inputs, strict=True)),
        **dict(zip(("key_scales", "value_scales", "scale_sequence", "scale_head"), scales, strict=True)),
        **steps,
        sequences=sequences,
        heads=heads,
        groups=groups,
        size=size,
        value_size=value_size,
        new=new,
        total=total,
        first=first,
        window=window or 0,
        sinks=0 if sinks_H is None else _address(sinks_H),
        results=_address(mixed_BLHV),
        scale=scale,
    )
    attend_prompt(_address(job))
    return mixed_BLHV


def recurrent_record(kernel: str, **fields: Any) -> Any:
    """Return the record of the next position in a layer with a state, with its parameters filled in.

    kernel: a name in RECURRENCES. fields: those of the kernel's record that are its own.
    """
    return _record(RECURRENCES[kernel], kernels=TABLE_ADDRESS, **fields)


def attend_latent(
    inputs: Sequence[Address],
    strides: Sequence[int],
    cache: Sequence[Address],
    up: Address,
    shape: tuple[int, int, int, int, int, int],
    places: tuple[Any, Any, int, bool],
    scale: float,
    *,
    pairs: bool,
) -> Any:
    """Attend for one new position of each sequence by latent attention, and append the position to the cache.

    inputs: query [B, H, N + R], latent vector [B, C], key [B, R], cosine and sine [B, R], contiguous bfloat16; queries and
    keys are not yet rotated. strides: values from one sequence's query, latent vector and key to the next one's. cache:
    latent vectors [slots, C] and rotated keys [slots, R], and where they have 8 bits, the scales of both [slots]. up: [H, N
    + V, C]. shape: B, H, N, R, C and V. places: as in `attend`. scale: factor of the scores. pairs: whether neighbors are
    rotated together. Returns [B, H, V] as the bits of bfloat16.
    """
    (sequences, heads, _, _, _, value_size), (blocks_BM, past_B, block_size, _) = shape, places
    mixed_BHV = np.empty((sequences, heads, value_size), np.uint16)
    job = _record(
        LATENT_ATTENTION,
        kernels=TABLE_ADDRESS,
        **dict(zip(("query", "latent", "key", "cosine", "sine"), inputs, strict=True)),
        **dict(zip(("query_stride", "latent_stride", "key_stride"), strides, strict=True)),
        **dict(zip(("keys", "values", "key_scales", "value_scales"), cache, strict=False)),
        up=up,
        **dict(zip(("sequences", "heads", "plain", "rotated", "rank", "value_size"), shape, strict=True)),
        pairs=int(pairs),
        blocks=_address(blocks_BM),
        blocks_of_one=blocks_BM.shape[1],
        past=_address(past_B),
        block_size=block_size,
        results=_address(mixed_BHV),
        scale=scale,
    )
    latent_attention.attend_latent(_address(job))
    return mixed_BHV


def attention_records(layers: int, kind: int, table: Any) -> Any:
    """Return a record for each layer of a compiled step, to be filled in: of attention of the kind ATTENDS or LATENT.

    table: the `own_table` of the steps.
    """
    records, kernel = {
        ATTENDS: (ATTENTION, step_attention.attend_steps),
        LATENT: (LATENT_ATTENTION, latent_layer),
    }[kind]
    if layers:
        kernel.load()
    made = np.zeros(layers, records)
    made["kernels"] = _address(table)
    return made


def recur(kernel: str, record: Any, inputs: Address, states_2T: Any, shape: tuple[int, int]) -> Any:
    """Compute the next position of each sequence in a layer with a state, and update the states in place.

    record: of `recurrent_record`. inputs: the projections, contiguous bfloat16. states_2T: as for `use_states`. shape: T and
    X. Returns [T, X] as the bits of bfloat16.
    """
    y_TX = np.empty(shape, np.uint16)
    record["inputs"], record["results"], record["tokens"] = inputs, _address(y_TX), shape[0]
    use_states(record, states_2T)
    KERNELS[kernel](_address(record))
    return y_TX


def use_states(record: Any, states_2T: Any) -> None:
    """Let the next call with a record update these states, which must live until it ends.

    states_2T: int64, the addresses of each sequence's state and of the last inputs of its convolution, contiguous float32.
    """
    record["states"] = address = _address(states_2T)
    record["lasts"] = address + states_2T.strides[0]


def recurrent_table(
    kernel: str, record: Any, weights: Sequence[Place], rows: Sequence[int], form: Form, sources_O: Any, outputs: int
) -> tuple[Any, list[Any]]:
    """Return what a compiled step needs of a layer with a state, and objects that must live as long as it.

    record: of `recurrent_record`. weights, rows, form: of the projections of the layer's input. sources_O: the column of the
    projections that each column of the kernel's inputs is, int64; None if they are the same. outputs: X.
    """
    recurrent_layer.load()
    matrices, ends_M = np.array(weights, np.int64), np.array(list(accumulate(rows)), np.int64)
    made = _record(
        RECURRENT,
        kernel=KERNELS[kernel].address,
        job=_address(record),
        form=form_address(form),
        matrices=_address(matrices),
        ends=_address(ends_M),
        count=len(ends_M),
        inputs=ends_M[-1],
        sources=0 if sources_O is None else _address(sources_O),
        outputs=outputs,
    )
    return made, [record, matrices, ends_M, sources_O]


def own_table() -> Any:
    """Return memory for a decoder's copy of the table of kernels, which its steps fill and its layers' records name."""
    return np.zeros(1, OWN_TABLE)


def step_record(
    table: Any,
    x: Address,
    layers: Any,
    scalars: tuple[float, float],
    hidden: int,
    outside: tuple[Any, Any],
    *,
    zero_centered: bool = False,
) -> Any:
    """Return the record of the steps through all layers of a decoder.

    A step computes the next position of each sequence, or the next few positions of one sequence. The result overwrites x
    [T, D].

    table: an `own_table`. x: contiguous bfloat16. layers: records of LAYER. scalars: ε of the norms, and factor of each
    addition to the residual. hidden: D. outside: a `step.layers.MIX` and a `step.layers.CHOOSE`, for layers that need them.
    zero_centered: whether the norms of layers are.
    """
    mix, choose = (cast(function, c_void_p).value for function in outside)
    return _record(
        STEP,
        kernels=_address(table),
        plain_form=form_address(PLAIN),
        x=x,
        hidden=hidden,
        layers=_address(layers),
        layer_count=len(layers),
        zero_centered=int(zero_centered),
        mix=mix,
        choose=choose,
        **dict(zip(("epsilon", "residual"), scalars, strict=True)),
    )


def text_record(
    step: Any,
    embedding: tuple[Place, Form, int],
    norm: Address,
    head: tuple[Place, Form, int],
    factors: tuple[float, float],
    positions_T: Any,
    angles: Any,
) -> Any:
    """Return the record of the steps from tokens to logits.

    step: a `step_record`, which must live as long. embedding, head: addresses, form and number of rows of the embeddings and
    of the output head; the addresses of embeddings are zeros if x will be in place at each step. norm: address of the weight
    of the last norm. factors: of the embeddings and of the normed hidden states. positions_T: int64, the positions at each
    step. angles: records of ANGLES, with which a step copies the angles of its positions; both must live as long.
    """
    return _record(
        TEXT,
        kernels=TABLE_ADDRESS,
        step=_address(step),
        embedding=embedding[0],
        embedding_form=form_address(embedding[1]),
        embeddings=embedding[2],
        positions=_address(positions_T),
        angles=_address(angles),
        kinds=len(angles),
        norm=norm,
        head=head[0],
        head_form=form_address(head[1]),
        vocabulary=head[2],
        **dict(zip(("embedding_factor", "hidden_factor"), factors, strict=True)),
    )


def decode_tokens(
    text: Any,
    step: Any,
    ids: Address,
    tokens: int,
    results: tuple[Address, Address],
    thresholds_T: Any,
    seen: tuple[Any, Any, Any, Any] | None = None,
    before_experts: tuple[Any, Any] | None = None,
    *,
    stays: bool = True,
) -> bool:
    """Compute one step. Returns False, and computes nothing, if a token has no embedding.

    text, step: of `text_record` and `step_record`. ids: int64 [T]. results: of the hidden states [T, D] and of the logits
    [T, V], bfloat16; the latter may be 0. thresholds_T: float32, the thresholds of adaptive skipping. seen: arrays that
    receive the choices and weights [layers, T, S], the inputs [layers, T, D] and the logits [layers, T, N] of the experts.
    before_experts: a `step.experts.BEFORE_EXPERTS`, and the int64 array [layers, T, U] of the choices. stays: whether
    the threads stay with the step. They must not where it calls Python, which may need them.
    """
    threads = threads_used()
    step["threads"], step["thresholds"] = threads, _address(thresholds_T)
    step["seen_chosen"], step["before_experts"] = 0, 0
    if seen is not None:
        step_layers.tell_observers.load()
        for name, array in zip(("seen_chosen", "seen_weights", "seen_inputs", "seen_logits"), seen, strict=True):
            step[name] = _address(array)
        step["seen_slots"], step["seen_experts"] = seen[0].shape[2], seen[3].shape[2]
    if before_experts is not None:
        require_experts.load()
        function, used_LTS = before_experts
        step["before_experts"], step["used"] = cast(function, c_void_p).value, _address(used_LTS)
        step["used_slots"], step["asked"] = used_LTS.shape[2], 0
    together = stays and threads > 1 and uses_openmp()
    decode = step_tokens.decode_together if together else step_tokens.decode_tokens
    decode(_address(text), ids, tokens, *results)
    return not text["refused"][0]


def search_rounding(
    name: str, arrays: Sequence[Address], sizes: tuple[int, int, int, int, int], limits: tuple[int, int, int, int]
) -> None:
    """Search the scales and integers of blocks of a K type.

    name: "affine" or "symmetric", and the number of sub-blocks of a block, such as "affine_8".
    arrays: x, w, factors, and the results `scales` and `integers`, all contiguous. sizes: number of the first block, W, N, L
    and C. limits: of the integers of numbers and of scales. They are those of rounding_search.SEARCH.
    """
    job = _record(
        rounding_search.SEARCH,
        kernels=TABLE_ADDRESS,
        search=KERNELS[f"search_{name}"].address,
        **dict(zip(("x", "w", "factors", "scales", "integers"), arrays, strict=True)),
        **dict(zip(("first", "row", "numbers", "lanes", "count"), sizes, strict=True)),
        **dict(zip(("lowest", "highest", "lowest_scale", "highest_scale"), limits, strict=True)),
    )
    rounding_search.search(_address(job))


def load_parts(layers: Any) -> None:
    """Load the parts of a step that only some models have: a gate of shared experts, choices with a bias, skipping, …"""
    parts = (
        (layers["shared_gate"]["values"], step_layers.gate_shared),
        (layers["selection_bias"], step_choices.choose_with_bias),
    )
    more = (layers["gamma1"], step_choices.skip_slots), (layers["expert_factors"], step_choices.scale_chosen)
    for has_it, kernel in (*parts, *more):
        if has_it.any():
            kernel.load()


def needed_for_floats(form: Form) -> list[Kernel]:
    """Return the kernels that decode with plain weights of this form, FLOAT32 or FLOAT16."""
    many = [panels.panel_products, expert_panels.panel_swiglu] if form == FLOAT32 else []
    return [*form_kernels(form[0]), product_kernels.products, experts.swiglu, *many]


def needed(
    kinds: Iterable[int | str], *, is_whole: bool = True, mixers: Iterable[str] = (), zero_centered: bool = False
) -> list[Kernel]:
    """Return the kernels that decode with weights of these bits, or in blocks of these types.

    is_whole: whether to add the kernel of all layers. mixers: names of further kernels to add.
    zero_centered: whether to add that of zero-centered norms.
    """
    every = [kernel for each in dict.fromkeys((16, *kinds)) for kernel in form_kernels(each)]
    every += [product_kernels.products, product_kernels.rms_norm, experts.swiglu, grouped.attend]
    every += [product_kernels.centered_norm] if zero_centered and not is_whole else []
    every += [step_tokens.decode_together] if is_whole else []
    every += [KERNELS[name] for name in mixers]
    return [*every, panels.panel_products, expert_panels.panel_swiglu, attend_prompt]
