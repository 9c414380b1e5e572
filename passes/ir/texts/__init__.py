"""A Program as text, written and read."""
