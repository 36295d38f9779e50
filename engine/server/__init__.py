"""HTTP: OpenAI's endpoints, the models behind them, and the process of `compress serve`.

No file outside this room knows HTTP. Start with `server.py` (endpoints) and `serve.py` (the process). The folder
`connections` has the guards before the endpoints, `reading` the processes that read bodies, and `interfaces` what other
interfaces to the same chats need.
"""
