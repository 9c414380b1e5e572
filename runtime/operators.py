"""Registers every operator that a plan may name: `torch.ops.moec.*`."""

from moec.runtime import collectives, conversions, ops, vocabulary

__all__ = ["collectives", "conversions", "ops", "vocabulary"]
