"""Syntax tree to Spec, against the schema: files put together, `let`s followed, values checked, layers spread out.

`top.py` is the way in. No file here knows a word of the language; they read the schema.
"""
