"""The choice of `compress fit`: which hidden units and experts go, and how many bits the others get, within a size.

`costs.py` says what each option of each expert costs, from the scores of hidden units (compress/methods/unit_obs.py) and the
errors of rounding (`rounding_costs.py`). `choices.py` is the knapsack, `sizes.py` counts bytes. `candidate.py` carries out a
choice, and `divergence.py` measures it. Nothing here knows the command line. Start with `costs.py`.
"""
