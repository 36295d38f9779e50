"""The training loop, losses and divergences, and what they keep on disk.

What is trained on which data stays in `compress/distillation`, `compress/dense` and `compress/classifiers`. Start
with `training.py`.
"""
