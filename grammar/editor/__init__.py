"""Highlighting for editors and for the documentation, from one table of tokens."""
