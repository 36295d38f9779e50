"""The families as GGUF files describe them: metadata for config.json and back, and the places of tensors.

Start with `table.py`, which has one row for each family. A row is a `GgufFamily` (`family.py`), made of parts as the
families of safetensors are. `names.py` and `forms.py` say where tensors are and what conversion did to them. `parts.py`
and the files of single families have the parts that are more than one key for one entry. `description.py` reads a
description back before it is written.
"""
