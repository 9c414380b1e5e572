"""The operators in plain PyTorch: the definition of correct."""
