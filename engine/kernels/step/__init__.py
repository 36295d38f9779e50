"""All layers of a decoder for one token, compiled in one call.

The parts of a layer are `attention`, `latent` and `recurrence` (its first half), `choices` (which experts it takes) and
`experts` (those that are not in memory). Start with `layers.py`, which calls them by address and has their records.
"""
