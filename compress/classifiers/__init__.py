"""Classifiers: distillation as a mixture of experts (MoE-KD), training and accuracy.

Start with `moe_kd.py` (formulas) and `distill.py` (the job).
"""
