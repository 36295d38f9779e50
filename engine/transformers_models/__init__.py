"""Models that transformers runs: encoder-decoders and classifiers, opened and validated by this project.

Start with `transformers_model.py`, which builds and checks any of them. `experts_implementation.py` is independent of them:
it gives our expert kernels to any model of transformers.
"""
