"""Everything that is particular to a model family: what its config.json says, and what its tensors are called.

A family is a composition of parts. Start reading in `table.py`, which has one row for each family. Every part is a small
frozen dataclass in the file of its concern: `attention.py`, `rotation.py`, `router.py`, `experts.py`, `layer_pattern.py`,
`residual.py`, `head.py`, `aliases.py`. A part reads its own keys of config.json and refuses what it cannot honor. A feature
of a single family is a subclass of a part, which only that family's row mentions and whose defaults are that family's keys;
with a second family it becomes a field.

`resolve.py` makes a `DecoderConfig` (`config.py`, `layer_config.py`), plain numbers, from a config.json. `tensor_names.py`
and `tensor_shapes.py` say what a checkpoint holds, `results.py` writes config.json for smaller models, and
`rotary_embedding.py` computes rotary positions from a resolved config. `plain_config.py` fills in the defaults of a plain
config.json without transformers, from the record `config_fields.json`.

Families are named in this room and nowhere else. Weights, devices and files stay outside.
"""
