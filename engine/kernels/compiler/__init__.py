"""How compiled kernels are written, and when they are compiled: addresses, instructions, loops on threads, code on disk.

No kernel of a product lives here. Start with `compiling.py`.
"""
