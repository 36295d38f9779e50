"""The decoder on a GPU: its experts through Triton kernels, and its steps and prompts as CUDA graphs.

Start with `step.py`.
"""
