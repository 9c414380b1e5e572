"""The attributes of the op `rope` from the words of the language: which dims of a head turn."""

from __future__ import annotations

from typing import Any

from moec.grammar.spec import Rope


def rotation(rope: Rope, width: int) -> dict[str, Any]:
    """Attributes of `rope` on heads `width` wide. A part of them turns as a head of that part's width would (GPT-NeoX,
    Black et al. 2022, section 2.1.1)."""
    turning = rope.turning(width)
    return {"theta": rope.theta, "width": 0 if turning == width else turning, "interleaved": rope.interleaved}
