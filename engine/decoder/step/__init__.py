"""A whole step of decoding in one compiled call.

Start with `decode_step.py`, then `records.py` and `tables.py`.
"""
