"""Options of every verb that makes, measures or writes models: names, types, defaults, limits and help texts.

Nothing here imports torch, and only tables of `compress` that do not import torch are read: the command line makes its help
texts from these files. Start with `job.py`.
"""
