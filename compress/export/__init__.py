"""`compress export`: ONNX directories of every kind of model, compared with the engine before they get their names.

How a graph is made of nodes is `engine/onnx`. Start with `decoder.py`.
"""
