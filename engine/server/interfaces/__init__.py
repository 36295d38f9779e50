"""Other interfaces to the same chats: OpenAI's Responses and Anthropic's Messages.

A body of another interface becomes the body of a chat completion, and the chunks of the chat become the answer and the
events of that interface. Nothing here knows the engine, tokens or sockets. Start with `table.py`.
"""
