"""Looks for mistakes of scripts that torch would let pass."""
