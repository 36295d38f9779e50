"""A model run layer by layer: within a limit of memory, with gradients, over several processes.

What a pass is for (statistics, scores, training) stays outside. Start with `streaming.py`.
"""
