"""A model of kernels' times, for the choice of ways and for predictions."""
