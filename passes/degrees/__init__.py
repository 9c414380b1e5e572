"""Degrees: over how many ranks each part is cut, and how a step is worked through."""
