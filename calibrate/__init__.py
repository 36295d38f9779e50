"""Calibration: text in, statistics of every MoE layer out, collected once for all methods.

Nothing here decides which experts stay. Start with `collect.py`.
"""
