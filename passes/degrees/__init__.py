"""Degrees: the number of ranks that cut each part of a model, and the division of a step."""
