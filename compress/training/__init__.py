"""The training loop, losses and divergences, and their state on disk.

Data and targets of each training are in `compress/distillation`, `compress/dense` and `compress/classifiers`. Start with
`training.py`.
"""
