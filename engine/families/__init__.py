"""Everything that is particular to a model family: what its config.json says, and what its tensors are called.

A family is a composition of parts. `table.py` has one row for each family (start reading there); every part is a small
frozen dataclass in the file of its concern: `attention.py`, `rotation.py`, `router.py`, `experts.py`, `layer_pattern.py`,
`residual.py`, `head.py`, `aliases.py`. A part reads its own keys of config.json and refuses what it
cannot honor. A feature of a single family is a subclass of a part, which only that family's row mentions; with the second
family it becomes a field of the part.

`resolve.py` makes a `DecoderConfig` (`config.py`), plain numbers, of a config.json; `tensor_names.py` and
`tensor_shapes.py` say what a checkpoint holds; `results.py` writes config.json for smaller models.

Families are named here and nowhere else. Weights, devices and files stay outside.
"""
