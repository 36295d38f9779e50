"""Makes a model smaller: one file for each verb of the command line, and rooms for what they share.

Start with `prune.py`.
"""
