"""A model of kernels' times, by which ways are chosen and predicted."""
