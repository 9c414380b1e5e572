"""The inputs of a model and their checks."""
