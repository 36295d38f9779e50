"""Low-bit weights: which tensors are rounded, how, and with which scales.

Storage of such weights is `engine/checkpoint/pack_quantized.py`. Start with `quantizer.py`.
"""
