"""Text from one model: prefill, decoding, sampling, speculation, and a report of time and memory.

Many requests at once are `engine/batching`. Start with `generate.py`.
"""
