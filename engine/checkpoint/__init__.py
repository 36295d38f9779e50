"""A model on disk: opened with full validation, then read tensor by tensor, in whatever format it is stored.

The hub, the artifact's own files, tokenizers with their checks, and the modeling file that travels with non-uniform
artifacts live here too. No layer is computed here. Start with `model_directory.py` and `checkpoint.py`; each
storage format is one file (`block_float8.py`, `mxfp4.py`, `nvfp4.py`, `pack_quantized.py`), and GGUF is a folder (`gguf/`).
"""
