"""Implementations of the larger commands; `moec/cli.py` has their options."""
