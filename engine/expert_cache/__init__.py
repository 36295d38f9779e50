"""Experts of a model that is larger than memory: which of them stay in memory, and how the others are read.

Nothing here knows attention or HTTP. Start with `policies.py`, which decides what is evicted.
"""
