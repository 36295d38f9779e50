"""Weights that products multiply as they are stored: low-bit integers, packed floats and blocks of GGUF's types.

Each kind has its numbers as instructions (`unpacking`, `float_types`, `block_types`), the kernels of its products
(`low_bit`, `float_products` and `half_byte_products`, `block_products`) and a weight that takes the place of a tensor
(`quantized_weight`, `float_weight`, `block_weight`). Start with `forms.py`, which lists the kernels of each kind.
"""
