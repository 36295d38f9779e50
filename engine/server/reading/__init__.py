"""The processes that read requests: bodies parsed, validated and tokenized, apart from the model and without torch.

Nothing here knows endpoints or the engine. Start with `reading_process.py`, which shows both sides of such a process, then
read `body_reader.py`, which says what happens to a body.
"""
