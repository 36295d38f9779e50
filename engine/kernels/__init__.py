"""Products and attention at the speed of this machine: kernels for the CPU and the GPU, low-bit weights, devices.

Kernels take tensors, numbers and addresses; they know neither families nor checkpoints, which may not come in here.
Importing this package loads nothing. Start with `linear`, which chooses between torch and the compiled kernels, then
`compiled`, the functions that call those.

The compiled kernels for the CPU (Numba, optional: `pip install moe-compress[fast]`) are one file for each thing they
do: `products` and `dot_products` (matrices times a few vectors), `low_bit` (those of 8 and 4 bits), `panels` (times
many vectors), `experts` and `expert_panels` (SwiGLU of chosen experts), `attention`, and `step` (all layers for one
token). Each file begins with the record that its kernels are given. `compiling` tells when a kernel is compiled,
`cache_directory` where it is kept; `instructions`, `memory` and `arithmetic` are what kernels are written with.

Decoding is bound by the memory that its weights come from. The kernels read each weight once for all vectors, a block
of rows after the other, one or two streams per thread, and add up in float32. One call does what torch needs a dozen
for: several matrices on the same vectors, or all chosen experts of a layer, each on the tokens that chose it.

Products are written as LLVM instructions, because a compiler that vectorizes a loop adds up in another order for each
number of vectors. Here there is one order, so that a sequence gets the same bits whatever is computed beside it.

Compiled kernels call each other by address, never by name: each is compiled once and by itself, at its first use, and a
model of 8-bit weights compiles nothing that is for 4-bit ones.

Shape suffixes: T tokens, O output features, I input features, S slots (chosen experts), N experts, D hidden, F expert
width, M matrices or pairs of token and slot, B sequences, G key-value heads, H query heads, R query heads of one group,
P positions or panels, E head dimension, W matrix rows of a block, Z places of panels, C pairs of inputs.
"""
