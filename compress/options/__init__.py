"""The options of every verb that makes, measures or writes models: names, types, defaults, limits and help texts.

Nothing here imports torch, and of `compress` only tables without it: the command line reads these files to print its help
texts.
Start with `job.py`.
"""
