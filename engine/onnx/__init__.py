"""The decoder, encoder-decoders and classifiers as ONNX graphs, and such graphs run by onnxruntime.

Nodes are written here, one file for each part of a model; comparing a graph with the engine is `compress/export`.
Start with `decoder.py` (writing) and `runtime.py` (running).
"""
