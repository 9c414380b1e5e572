"""Weights and gradients of a rank: its parts, and how they are gathered and summed."""
