"""Optimizers, and the clipping of gradients before their steps."""
