"""Where a key stands in the text of a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

SPACE = re.compile(r"[ \t\n\r]*")


def place_of(text: str, path: Sequence[str]) -> tuple[int, int] | None:
    """The start and end of the last key of `path`, quotes included; None where the object has no such key.

    Of a key that an object has twice the last one counts, as it does to `json.loads`. `text` is JSON.
    """
    at, start, end = _next(text, 0), 0, 0
    for part in path:
        key = _keys(text, at).get(part) if text[at : at + 1] == "{" else None
        if key is None:
            return None
        start, end, at = key
    return start, end


def _keys(text: str, at: int) -> dict[str, tuple[int, int, int]]:
    """The keys of the object that begins at `at`: where each begins and ends, and where its value begins."""
    decoder = json.JSONDecoder(parse_constant=float)
    places = {}
    at = _next(text, at + 1)
    while text[at] == '"':
        key, end = decoder.raw_decode(text, at)
        value = _next(text, _next(text, end) + 1)  # after the colon
        places[key] = (at, end, value)
        at = _next(text, decoder.raw_decode(text, value)[1])
        at = _next(text, at + 1) if text[at] == "," else at
    return places


def _next(text: str, at: int) -> int:
    """The first place from `at` on that is no space."""
    match = SPACE.match(text, at)
    assert match is not None
    return match.end()
