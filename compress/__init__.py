"""Compression of models: one file for each verb of the command line, and folders for shared code.

Start with `prune.py`.
"""
