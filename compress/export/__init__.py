"""`compress export`: ONNX directories of every kind of model, and GGUF files, compared with the engine before they are kept.

Graphs are built in `engine/onnx`, GGUF files in `engine/checkpoint`. `exporting.py` has the job that all kinds of graphs
share. Start with `decoder.py`; `gguf.py` is the export to llama.cpp.
"""
