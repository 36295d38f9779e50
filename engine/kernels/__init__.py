"""Kernels for the CPU: the products and the attention that decoding and prompts consist of, compiled by Numba.

What lives here: code that works on memory addresses and is compiled for this processor, and the little that compiles it,
keeps it on disk and calls it. What may not come in: models, families, files, torch. Numba is optional
(`pip install moe-compress[fast]`), so importing this package loads nothing; `compiled` is the module to import.

Start reading in `compiled` (the functions that other rooms call), then `products` and `dot_products` (a matrix times a few
vectors), `panels` (times many), `experts`, `attention` and `step` (all layers for one token). Each file begins with the
record that its kernels are given. `compiling` tells when a kernel is compiled, and `cache_directory` where it is kept.

Decoding is bound by the memory that its weights come from. The kernels read each weight once for all vectors, a block of
rows after the other, one or two streams per thread, and add up in float32. One call does what torch needs a dozen for:
several matrices on the same vectors, or all chosen experts of a layer, each on the tokens that chose it.

Products are written as LLVM instructions, because a compiler that vectorizes a loop adds up in another order for each number
of vectors. Here there is one order, so that a sequence gets the same bits whatever is computed beside it.

Kernels call each other by address, never by name: each is compiled once and by itself, at its first use, and a model of
8-bit weights compiles nothing that is for 4-bit ones.

Shape suffixes: T tokens, O output features, I input features, S slots (chosen experts), N experts, D hidden, F expert width,
M matrices or pairs of token and slot, B sequences, G key-value heads, H query heads, R query heads of one group,
P positions or panels, E head dimension, W matrix rows of a block, Z places of panels, C pairs of inputs.
"""
