"""Models in GGUF files, read and written.

Start with `model.py`: a model's config and views of its tensors, and `blocks.py`, the quantized types as numbers.
`writer.py` writes a file with the numbers that `rounding.py` has rounded, `tokenizer.py` and `vocabulary.py` read and
write the tokenizer, and `imatrix_file.py` the importance matrix. What is particular to a family lives in
engine/families/gguf.
"""
