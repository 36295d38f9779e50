"""Matrix products and attention: kernels for the CPU and the GPU, low-bit weights, and devices.

Kernels take tensors, numbers and addresses. They know neither families nor checkpoints, and no code about those may come in
here. Importing this package loads nothing. Start with `linear`, which chooses between torch and the compiled kernels, then
read `compiled`, which holds the functions that call the kernels.

Each file of the compiled kernels for the CPU (Numba, optional: `pip install moe-compress[fast]`) has one task: `products`
and `dot_products` (matrices times a few vectors; plain ones in bfloat16, float32 and float16), `panels` and `panel_tiles`
(matrices times many vectors), `experts` and `expert_panels` (SwiGLU of the chosen experts) and `rounding_search` (scales of
GGUF's K types).
Each file begins with the record that its kernels are given. The folder `attention` reads caches of keys and values,
`recurrences` has layers with a state, and `step` computes all layers in one call. The folder `stored` has the products of
low-bit weights, packed floats and GGUF's blocks, and `compiler` what kernels are written with.

Decoding is bound by memory bandwidth. The kernels read each weight once for all vectors, one block of rows after another,
in one or two streams per thread, and accumulate in float32. One call does the work of a dozen torch operations:
several matrices on the same vectors, or all chosen experts of a layer, each on the tokens that chose it.

Products are written as LLVM instructions, because a compiler that vectorizes a loop chooses another order of summation for
each number of vectors. Here the order is fixed, so that the results of a sequence are bit-identical in every batch.

Compiled kernels call each other by address, never by name. Each is compiled separately, at its first use, and a
model of 8-bit weights compiles no kernel for 4-bit weights.

Shape suffixes: T tokens, O output features, I input features, S slots (chosen experts), N experts, D hidden, F expert
width, M matrices or pairs of token and slot, B sequences, G key-value heads, H query heads, R query heads of one group,
P positions or panels, E head dimension, W matrix rows of a block, Z places of panels, C pairs of inputs, U experts that some
token chose, K blocks of hidden units.
"""
