"""A decoder from tokens to logits in one compiled call, for the next position of each sequence or the next few of one.

The parts of a layer are `attention`, `latent` and `recurrence` (its first half), `choices` (which experts it takes) and
`experts` (those that are not in memory). Start with `tokens.py`, and then `layers.py`, which calls the parts by address and
has the record of a layer.
"""
