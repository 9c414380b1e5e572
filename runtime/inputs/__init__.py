"""What a model is given, and what is refused of it."""
