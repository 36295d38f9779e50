"""Speed and memory, measured side by side: models, classifiers, numbers of requests at once, and a running server.

Start with `side_by_side.py`.
"""
