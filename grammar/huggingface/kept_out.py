"""MoE decoders of transformers that moec does not import, each with the module or config key that keeps it out."""

from __future__ import annotations

KEPT_OUT: dict[str, str] = {}
