"""Classifiers: distillation as a mixture of experts (MoE-KD), their training and accuracy.

Start with `moe_kd.py` (formulas) and `distill.py` (the job).
"""
