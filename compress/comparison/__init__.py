"""The parts of `compress compare`: the models, their quality and speed, notes on the figures, and the files.

Start with `subject.py`; `compress/compare.py` calls the parts in order.
"""
