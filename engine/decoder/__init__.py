"""The decoder of this project: attention, routing, experts and caches, assembled from a family's parts.

It gets its weights from a function and knows no files. Start with `model.py`, then `experts.py` and `routing.py`.
"""
