"""A mixture as a layer in a plain PyTorch model."""
