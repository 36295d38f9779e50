"""The Triton kernels, and how graphs of their launches are recorded. Triton itself is imported when a GPU is used.

Start with `triton_step.py`.
"""
