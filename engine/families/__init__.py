"""Everything that is particular to a model family: the meaning of its config.json and the names of its tensors.

A family is a composition of parts. Start with `table.py`, which has one row for each family. Every part is a small
frozen dataclass in the file of its concern: `attention.py`, `rotation.py`, `router.py`, `experts.py`, `layer_pattern.py`,
`residual.py`, `head.py`, `aliases.py`. A part reads its own keys of config.json and refuses settings that it cannot honor. A
feature of a single family is a subclass of a part: only that family's row mentions it, and its defaults are that family's
keys. When a second family has the feature, it becomes a field.

`resolve.py` turns a config.json into a `DecoderConfig` (`config.py`, `layer_config.py`), which holds plain numbers.
`tensor_names.py` and `tensor_shapes.py` list the tensors of a checkpoint, `results.py` writes config.json for smaller
models, and `rotary_embedding.py` computes rotary positions from a resolved config. `plain_config.py` fills in the defaults
of a plain config.json without transformers, from the record `config_fields.json`.

Families are named in this room, and in `engine/replies` for how they write; nowhere else. Code about weights, devices
and files stays outside.
"""
