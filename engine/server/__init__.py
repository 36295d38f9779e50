"""HTTP: OpenAI's endpoints, access, limits of connections, and the processes that read requests.

No file outside this room knows HTTP. Start with `server.py` (endpoints) and `serve.py` (the process). The folder `doors` has
other interfaces to the same chats.
"""
