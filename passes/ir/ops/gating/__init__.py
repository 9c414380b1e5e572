"""Ops of gates: choices, places, loads and balance terms."""
