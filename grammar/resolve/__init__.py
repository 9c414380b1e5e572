"""Syntax tree to Spec, against the schema: merges files, evaluates `let`s, checks values, expands layers.

`top.py` is the entry point. These files read the language's words from the schema.
"""
