"""The operators as Triton kernels."""
