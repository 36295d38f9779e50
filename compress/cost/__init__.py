"""What a run will take: operations, bytes, and the speed of devices.

Start with `counts.py`.
"""
