"""Plans: what the weights become, budgets that choose experts by score, and `apply`, which carries out any plan.

How scores are made stays in `compress/methods`. Start with `plan.py`.
"""
