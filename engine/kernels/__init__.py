"""Products and attention at the speed of this machine: what the processor can do, low-bit weights, GPU kernels.

The kernels take tensors and numbers; they know neither families nor checkpoints. Start with `linear.py`, which chooses
between torch and the compiled kernels.
"""
