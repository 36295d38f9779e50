"""Models that transformers runs as a whole: encoder-decoders, classifiers, and sequences with images.

Start with `transformers_model.py`, which builds and checks any of them. `image_reader.py` is the processor of an
image-and-text model, and `image_sequence.py` one sequence whose prompt has images. Decoders that transformers runs layer by
layer have a room of their own, engine/adapted.
"""
