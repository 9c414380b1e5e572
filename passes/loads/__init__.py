"""Loads of experts that were measured: traces, placements of experts on ranks, and what of both a plan needs."""
