"""Many requests at once: schedule, run, postprocess.

Nothing here knows HTTP. Start with `scheduler.py`, then `loop.py`, which runs it in a thread. `drafting.py` lets a smaller
model propose tokens. `together.py` continues prompts of one decoder without requests. `disk_blocks.py` moves blocks of the
cache to and from a disk.
"""
