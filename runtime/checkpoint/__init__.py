"""Checkpoints: written under one plan, read under any other plan of the same model."""
