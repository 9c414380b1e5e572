"""Lowers a `Spec` to a `Program` for one device: the reference semantics."""
