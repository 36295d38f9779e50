"""Text from one model: prefill, decoding, sampling, speculation, and a report of what it cost.

Many requests at once are `engine/batching`. Start with `generate.py`.
"""
