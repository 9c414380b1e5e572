"""The rules of a Spec, beyond the kinds of its values."""
