"""Calibration: text in, statistics out, once for all methods.

Nothing here decides what becomes of an expert. Start with `collect.py`.
"""
