"""Quantization to low-bit weights: which tensors are rounded, how, and with which scales.

Such weights are stored by `engine/checkpoint/pack_quantized.py`. Start with `quantizer.py`.
"""
