"""Calibration: text in, statistics of every MoE layer out, collected once for all methods.

Nothing here decides which experts stay. Start with `collect.py`. Sums that only one job needs have a
pass of their own: `unit_statistics.py` for hidden units, `product_inputs.py` for rounding.
"""
