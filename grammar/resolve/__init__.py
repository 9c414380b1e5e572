"""Syntax tree to Spec, against the schema: files put together, `let`s followed, values checked, layers spread out.

`top.py` is the entry point. These files read the language's words from the schema.
"""
