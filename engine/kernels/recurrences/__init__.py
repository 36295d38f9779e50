"""Layers that keep a state in place of keys and values, compiled for the CPU: one new position of each sequence.

`gated_delta` and `mamba2` are linear attention, both with the filters of `convolution`; `short_convolution` has only
filters. Start with `recurrence.py`, the part of a record that all of them share.
"""
