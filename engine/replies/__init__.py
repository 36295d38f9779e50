"""Replies of a model taken apart: reasoning, content, and calls of tools in the form of each family.

Everything here is plain text without a model: parsers that take a reply in pieces, and grammars of calls. Nothing here knows
HTTP or tokens. Start with `table.py`, which has one row for each form, then `source.py`, which all parsers read from.
"""
