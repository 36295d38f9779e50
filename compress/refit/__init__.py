"""The refit of a run, which lets the hidden units or experts that stay make up for those that left.

`closed_form.py` fits each down projection to the outputs of its whole FFN; `correction.py` then goes through the smaller
model layer by layer and fits what is left of the error. The equations are in compress/methods/least_squares.py. Nothing here
decides which units stay. Start with `refitted` in closed_form.py.
"""
