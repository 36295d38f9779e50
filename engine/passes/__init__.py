"""Layer-by-layer passes over a model: within a memory limit, with gradients, over several processes.

The purpose of a pass (statistics, scores, training) stays outside. Start with `streaming.py`.
"""
