"""moec: the compiler for Mixture-of-Experts models."""
