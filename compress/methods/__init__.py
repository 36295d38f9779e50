"""Criteria: which experts to remove or to merge, one file for each method, with the paper's formulas.

A method gives scores, sets or groups; writing the smaller model is `compress/plans`. Start with `saliency.py`.
"""
