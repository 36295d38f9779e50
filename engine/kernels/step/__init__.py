"""All layers of a decoder in one compiled call, for the next position of each sequence or the next few of one.

The parts of a layer are `attention`, `latent` and `recurrence` (its first half), `choices` (which experts it takes) and
`experts` (those that are not in memory). Start with `layers.py`, which calls them by address and has the record of a layer.
"""
