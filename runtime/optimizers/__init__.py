"""Optimizers, and what is done to gradients before they step."""
