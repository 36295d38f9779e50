"""Experts of a model that is larger than memory: which of them stay in memory, and how the others are read.

Start with `cache.py`: it makes sure that the experts that a layer has chosen are in memory. `policies.py` decides what is
evicted, `places.py` knows where each expert lies in the files, and `file_memory.py` and `readers.py` read it.
"""
