"""Plans, which say how experts become a smaller model; budgets, which select experts by score; and `apply`, which
executes a plan.

Scores are computed in `compress/methods`. Start with `plan.py`.
"""
