"""Models that transformers runs: encoder-decoders and classifiers, opened and validated by this project.

Start with `transformers_model.py`, which builds and checks any of them.
"""
