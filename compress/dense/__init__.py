"""Dense models out of mixtures: the choice of experts, the student, its training; decoders and encoder-decoders.

Start with `dense_plan.py`.
"""
