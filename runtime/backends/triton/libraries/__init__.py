"""Grouped products of libraries in the place of rendered kernels."""
