"""Dense models made from mixtures: selection of experts, student and training, for decoders and encoder-decoders.

Start with `dense_plan.py`.
"""
