"""Attention of new positions over a cache of keys and values, compiled for the CPU.

`grouped` is attention with groups of heads, `latent` that over latent vectors. Both read what the cache holds through
`cached_vectors`, whose products are written as LLVM instructions in `scores`, `byte_values` and `instructions`. Start with
`grouped.py`.
"""
