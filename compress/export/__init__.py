"""`compress export`: ONNX directories of every kind of model, which are compared with the engine before they are kept.

Graphs are built in `engine/onnx`. `exporting.py` has the job that all
kinds share. Start with `decoder.py`.
"""
