"""Weights of Hugging Face: into a model or a checkpoint, and back."""
