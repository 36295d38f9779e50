"""Costs of runs: counts of operations and bytes, and the speeds of devices.

Start with `counts.py`.
"""
