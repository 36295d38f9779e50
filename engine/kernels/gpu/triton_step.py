"""The kernels of one step of decoding on a GPU, beside those of the experts (triton_kernels.py).

A step is bound by its launches: layer by layer, torch launches some forty kernels a layer. These fuse what one layer does
beside its experts into six: queries, keys and values from the norm of x; attention with the rotation and the cache; its
joined parts; the output projection with the residual; the router; its choice. Nothing depends on a number that the host
knows, so that a CUDA graph of the step serves any length (engine/decoder/gpu/step.py).

Sums are in float32, each by one program in one order. Normed and rotated values are rounded where torch rounds them.

Shape suffixes: T tokens, one for each sequence, I inputs and O outputs of a product, H query heads, G key-value heads, E
head dimension, R its rotated dimensions, N experts, S splits of a text, K experts of a token, M blocks of a cache, X
queries, keys and values of all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(x, like):
    """Return x rounded to the dtype that the pointer `like` has, in float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _chosen(first, a, b, c, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Return the value of the part of a product that output `first` belongs to. SECOND, THIRD: where these parts begin."""
    return tl.where(first >= THIRD, c, tl.where(first >= SECOND, b, a))


@triton.jit
def _part(first, weight_1, weight_2, weight_3, SECOND: tl.constexpr, THIRD: tl.constexpr, like):
    """Return the matrix of a part, given the addresses of all three, and its first output."""
    # The guarantee of 16-byte alignment lets the compiler read 16 bytes at once.
    weight_OI = tl.multiple_of(_chosen(first, weight_1, weight_2, weight_3, SECOND, THIRD).to(like.dtype), 16)
    return weight_OI, _chosen(first, 0, SECOND, THIRD, SECOND, THIRD)


@triton.jit
def products_of_few(
    x_TI,
    norm_I,
    normed_TI,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    residual_TO,
    y_TO,
    epsilon,
    factor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute W·norm(x) + b, or residual + factor · (W·x + b), for ROWS outputs of one token. Vector by vector.

    Weights and biases are addresses; W is up to three matrices one below the other.
    """
    token = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    weight_OI, start = _part(first, weight_1, weight_2, weight_3, SECOND, THIRD, x_TI)
    outputs = first + tl.arange(0, ROWS)
    places = (outputs - start)[:, None] * INPUTS
    x_I = x_TI + token * INPUTS
    scale = 1.0
    if HAS_NORM:
        squares = tl.zeros((COLUMNS,), tl.float32)
        for begin in range(0, INPUTS, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            x = tl.load(x_I + columns, mask=columns < INPUTS, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + epsilon)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, INPUTS, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        x = tl.load(x_I + columns, mask=columns < INPUTS, other=0.0).to(tl.float32)
        if HAS_NORM:
            norm = tl.load(norm_I + columns, mask=columns < INPUTS, other=0.0).to(tl.float32)
            x = _rounded(_rounded(x * scale, x_TI) * norm, x_TI)
            if KEEPS_NORMED:
                is_kept = (columns < INPUTS) & (first == 0)
                tl.store(normed_TI + token * INPUTS + columns, x.to(x_TI.dtype.element_ty), mask=is_kept)
        mask = (outputs[:, None] < OUTPUTS) & (columns[None, :] < INPUTS)
        sums += tl.load(weight_OI + places + columns[None, :], mask=mask, other=0.0).to(tl.float32) * x[None, :]
    y = tl.sum(sums, axis=1)
    if HAS_BIAS:
        bias_O = _chosen(first, bias_1, bias_2, bias_3, SECOND, THIRD).to(x_TI.dtype)
        y += tl.load(bias_O + outputs - start, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y = tl.load(residual_TO + token * OUTPUTS + outputs, mask=outputs < OUTPUTS, other=0.0).to(tl.float32) + y * factor
    tl.store(y_TO + token * OUTPUTS + outputs, y.to(y_TO.dtype.element_ty), mask=outputs < OUTPUTS)


@triton.jit
def products_of_many(
    x_TI,
    norm_I,
    normed_TI,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    residual_TO,
    y_TO,
    tokens,
    epsilon,
    factor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute as `products_of_few`, for up to T tokens at once, which are multiplied together."""
    first = tl.program_id(0) * ROWS
    weight_OI, start = _part(first, weight_1, weight_2, weight_3, SECOND, THIRD, x_TI)
    outputs = first + tl.arange(0, ROWS)
    rows = tl.arange(0, T)
    scale_T = tl.zeros((T,), tl.float32)
    if HAS_NORM:
        squares = tl.zeros((T, COLUMNS), tl.float32)
        for begin in range(0, INPUTS, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            mask = (rows[:, None] < tokens) & (columns[None, :] < INPUTS)
            x = tl.load(x_TI + rows[:, None] * INPUTS + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        scale_T = tl.rsqrt(tl.sum(squares, axis=1) / INPUTS + epsilon)
    y = tl.zeros((T, ROWS), tl.float32)
    for begin in range(0, INPUTS, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        mask = (rows[:, None] < tokens) & (columns[None, :] < INPUTS)
        places = rows[:, None] * INPUTS + columns[None, :]
        x = tl.load(x_TI + places, mask=mask, other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_I + columns, mask=columns < INPUTS, other=0.0).to(tl.float32)
            normed = _rounded(x.to(tl.float32) * scale_T[:, None], x_TI) * norm[None, :]
            x = normed.to(x_TI.dtype.element_ty)
            if KEEPS_NORMED:
                tl.store(normed_TI + places, x, mask=mask & (first == 0))
        own = (outputs - start)[None, :] * INPUTS + columns[:, None]
        mask = (outputs[None, :] < OUTPUTS) & (columns[:, None] < INPUTS)
        y = tl.dot(x, tl.load(weight_OI + own, mask=mask, other=0.0), y, input_precision="ieee")
    if HAS_BIAS:
        bias_O = _chosen(first, bias_1, bias_2, bias_3, SECOND, THIRD).to(x_TI.dtype)
        y += tl.load(bias_O + outputs - start, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    mask = (rows[:, None] < tokens) & (outputs[None, :] < OUTPUTS)
    places = rows[:, None] * OUTPUTS + outputs[None, :]
    if HAS_RESIDUAL:
        y = tl.load(residual_TO + places, mask=mask, other=0.0).to(tl.float32) + y * factor
    tl.store(y_TO + places, y.to(y_TO.dtype.element_ty), mask=mask)


@triton.jit
def _placed(
    x_HE,
    norm_E,
    whole_scale,
    head,
    cosine_R,
    sine_R,
    epsilon,
    heads: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return heads after their norm and the rotation, [ROWS, WIDE]. NORM: 0 for none, 1 of each head, 2 of all heads.

    Dimension i is rotated with dimension i + R/2, from x_HE, where the first of these heads begins; `head` is its number.
    """
    rows, here = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    other = tl.where(here < R // 2, here + R // 2, here - R // 2)
    mask, is_turned = (rows < heads) & (here < E), (rows < heads) & (here < R)
    x = tl.load(x_HE + rows * E + here, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(x_HE + rows * E + other, mask=is_turned, other=0.0).to(tl.float32)
    if NORM > 0:
        scale = whole_scale
        own_E = norm_E
        if NORM == 1:
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / E + epsilon)[:, None]
            before = 0
        else:
            before = (head + rows) * E
        norm = tl.load(own_E + before + here, mask=mask, other=0.0).to(tl.float32)
        norm_of_partner = tl.load(own_E + before + other, mask=is_turned, other=0.0).to(tl.float32)
        x = _rounded(_rounded(x * scale, x_HE) * norm, x_HE)
        partner = _rounded(_rounded(partner * scale, x_HE) * norm_of_partner, x_HE)
    if R > 0:
        cosine = tl.load(cosine_R + here, mask=here < R, other=1.0).to(tl.float32)
        sine = tl.load(sine_R + here, mask=here < R, other=0.0).to(tl.float32)
        turned = tl.where(here < R // 2, -partner, partner)
        x = _rounded(x * cosine, x_HE) + _rounded(turned * sine, x_HE)
    return x.to(x_HE.dtype.element_ty)


@triton.jit
def _scale_of_all(x, epsilon, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return 1 / rms of the SIZE numbers at x."""
    here = tl.arange(0, WIDE)
    numbers = tl.load(x + here, mask=here < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(numbers * numbers, axis=0) / SIZE + epsilon)


@triton.jit
def attend_next(
    x_TX,
    query_norm,
    key_norm,
    cosine_TR,
    sine_TR,
    past_T,
    first_T,
    blocks_TM,
    cache_3,
    block_size_1,
    mixed_THSE,
    largest_THS,
    sums_THS,
    epsilon,
    scale,
    M,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    ALL_QUERIES: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute attention of the next position of each sequence to one split of its text, and write its key and value.

    x_TX: queries, keys and values. past_T, first_T: positions in the cache, and the first of them that is no padding.
    blocks_TM: where each sequence lies, in blocks of `block_size_1` positions. cache_3: addresses of the keys and of the
    values, and the distance of two groups. Each split has a part of the softmax: its largest score, the sum of the
    exponentials, and their mixture of values. The first split has the new position too. WINDOW, CHUNK: 0 for none.
    """
    token, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past, first = tl.load(past_T + token).to(tl.int32), tl.load(first_T + token).to(tl.int32)
    if WINDOW > 0:
        first = tl.maximum(first, past + 1 - WINDOW)
    if CHUNK > 0:
        first += (past - first) // CHUNK * CHUNK
    each = tl.cdiv(tl.cdiv(past - first, S), BLOCK) * BLOCK
    begin = first + split * each
    end = tl.minimum(begin + each, past)
    block_size, distance = tl.load(block_size_1).to(tl.int32), tl.load(cache_3 + 2)
    key_SE = tl.multiple_of(tl.load(cache_3).to(x_TX.dtype), 16) + group * distance
    value_SE = tl.multiple_of(tl.load(cache_3 + 1).to(x_TX.dtype), 16) + group * distance
    blocks_M = blocks_TM + token * M

    each_group: tl.constexpr = H // G
    x_X = x_TX + token * (H + 2 * G) * E
    query_scale, key_scale = 1.0, 1.0
    if NORM == 2:
        query_scale = _scale_of_all(x_X, epsilon, H * E, ALL_QUERIES)
        key_scale = _scale_of_all(x_X + H * E, epsilon, G * E, ALL_KEYS)
    cosine_R, sine_R = cosine_TR + token * R, sine_TR + token * R
    head = group * each_group
    query = _placed(
        x_X + head * E, query_norm, query_scale, head, cosine_R, sine_R, epsilon, each_group, E, R, NORM, WIDE, HEADS
    )
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    sums = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDE), tl.float32)
    here = tl.arange(0, WIDE)
    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_there = places < end
        blocks = tl.load(blocks_M + places // block_size, mask=is_there, other=0)
        slots = blocks * block_size + places % block_size
        mask = is_there[:, None] & (here[None, :] < E)
        keys = tl.load(key_SE + slots[:, None] * E + here[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        shares = tl.exp(scores - larger[:, None])
        fades = tl.exp(largest - larger)
        values = tl.load(value_SE + slots[:, None] * E + here[None, :], mask=mask, other=0.0)
        mixed = tl.dot(shares.to(values.dtype), values, mixed * fades[:, None], input_precision="ieee")
        sums = sums * fades + tl.sum(shares, axis=1)
        largest = larger
    if split == 0:
        key = _placed(x_X + (H + group) * E, key_norm, key_scale, group, cosine_R, sine_R, epsilon, 1, E, R, NORM, WIDE, 1)
        value = tl.load(x_X + (H + G + group) * E + here, mask=here < E, other=0.0)
        slot = tl.load(blocks_M + past // block_size) * block_size + past % block_size
        tl.store(key_SE + slot * E + here[None, :], key, mask=here[None, :] < E)
        tl.store(value_SE + slot * E + here, value, mask=here < E)
        score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
        larger = tl.maximum(largest, score)
        share, fades = tl.exp(score - larger), tl.exp(largest - larger)
        mixed = mixed * fades[:, None] + share[:, None] * value.to(tl.float32)[None, :]
        sums = sums * fades + share
        largest = larger
    heads = tl.arange(0, HEADS)
    parts = (token * H + head + heads) * S + split
    tl.store(largest_THS + parts, largest, mask=heads < each_group)
    tl.store(sums_THS + parts, sums, mask=heads < each_group)
    mask = (heads[:, None] < each_group) & (here[None, :] < E)
    tl.store(mixed_THSE + parts[:, None] * E + here[None, :], mixed, mask=mask)


@triton.jit
def join_splits(
    mixed_THSE,
    largest_THS,
    sums_THS,
    sinks_H,
    y_THE,
    H: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute the attention of one head of one token from those of all splits. S: a power of two."""
    row = tl.program_id(0)
    splits, here = tl.arange(0, S), tl.arange(0, WIDE)
    largest = tl.load(largest_THS + row * S + splits)
    top = tl.max(largest, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_H + row % H).to(tl.float32)
        top = tl.maximum(top, sink)
    factors = tl.exp(largest - top)
    total = tl.sum(tl.load(sums_THS + row * S + splits) * factors, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - top)
    places = (row * S + splits)[:, None] * E + here[None, :]
    mixed = tl.load(mixed_THSE + places, mask=here[None, :] < E, other=0.0)
    y = tl.sum(mixed * factors[:, None], axis=0) / total
    tl.store(y_THE + row * E + here, y.to(y_THE.dtype.element_ty), mask=here < E)


@triton.jit
def choose(
    logits_TO,
    gamma1_K,
    gamma2_NN,
    experts_TK,
    weights_TK,
    scale,
    threshold,
    N: tl.constexpr,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    NORMALISES: tl.constexpr,
    SKIPS: tl.constexpr,
    KEEP: tl.constexpr,
    RESTORES: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_K: tl.constexpr,
):
    """Choose the K largest of a softmax over N logits of one token (routing.TopK), of which each row has OUTPUTS.

    SHARED: 0, or 1 for a further slot of expert N with weight one, or 2 with the sigmoid of its logit. SKIPS: whether slots
    from KEEP on are skipped as in routing.Skipping, and RESTORES whether the others then have all the weight.
    """
    token = tl.program_id(0)
    experts, slots = tl.arange(0, WIDE), tl.arange(0, WIDE_K)
    logits = tl.load(logits_TO + token * OUTPUTS + experts, mask=experts < N, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, axis=0))
    shares = tl.where(experts < N, shares / tl.sum(shares, axis=0), -1.0)
    # Experts whose shares are no numbers are chosen in their order, with weights that are no numbers either.
    is_lost = tl.max((shares != shares).to(tl.int32), axis=0) > 0
    shares = tl.where(shares == shares, shares, 0.0)
    chosen = tl.full((WIDE_K,), -1, tl.int32)
    weights = tl.zeros((WIDE_K,), tl.float32)
    for slot in tl.static_range(K):
        best = tl.minimum(tl.argmax(shares, axis=0), N - 1)
        chosen = tl.where(slots == slot, best, chosen)
        weights = tl.where(slots == slot, tl.max(shares, axis=0), weights)
        shares = tl.where(experts == best, -2.0, shares)
    if NORMALISES:
        weights = weights / tl.sum(weights, axis=0)
    weights = weights * scale
    if SKIPS:
        first = tl.sum(tl.where(slots == 0, chosen, 0), axis=0)
        largest = tl.sum(tl.where(slots == 0, weights, 0.0), axis=0)
        later = (slots > 0) & (slots < K)
        gamma = tl.load(gamma1_K + slots - 1, mask=later, other=0.0)
        gamma *= tl.load(gamma2_NN + first * N + chosen, mask=later, other=0.0)
        skipped = later & (slots >= KEEP) & (weights < threshold * gamma * largest)
        left = tl.where(skipped, 0.0, weights)
        if RESTORES:
            restored = left * (tl.sum(weights, axis=0) / tl.sum(left, axis=0))
            left = tl.where(tl.max(skipped.to(tl.int32), axis=0) > 0, restored, left)
        chosen, weights = tl.where(skipped, -1, chosen), left
    weights = tl.where(is_lost, float("nan"), weights)
    places = token * (K + (SHARED > 0)) + slots
    if SHARED > 0:
        weight = 1.0
        if SHARED == 2:
            weight = tl.sigmoid(tl.load(logits_TO + token * OUTPUTS + N).to(tl.float32))
        chosen, weights = tl.where(slots == K, N, chosen), tl.where(slots == K, weight, weights)
    tl.store(experts_TK + places, chosen.to(tl.int64), mask=slots < K + (SHARED > 0))
    tl.store(weights_TK + places, weights, mask=slots < K + (SHARED > 0))


@triton.jit
def norm_rows(x_TI, norm_I, y_TI, epsilon, INPUTS: tl.constexpr, WIDE: tl.constexpr):
    """Compute the RMS norm of one token."""
    token, here = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)  # a prompt may have many numbers
    x = tl.load(x_TI + token * INPUTS + here, mask=here < INPUTS, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / INPUTS + epsilon)
    norm = tl.load(norm_I + here, mask=here < INPUTS, other=0.0).to(tl.float32)
    y = _rounded(x * scale, x_TI) * norm
    tl.store(y_TI + token * INPUTS + here, y.to(y_TI.dtype.element_ty), mask=here < INPUTS)
