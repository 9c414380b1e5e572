"""Numbers of layers as a message lists them."""

from __future__ import annotations

from collections.abc import Sequence


def numbered(layers: Sequence[int]) -> str:
    """`layer 5`, `layers 0..3, 7`."""
    texts = ranges(layers)
    listed = ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")
    return f"layer{'s' * (len(layers) > 1)} {listed}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending `numbers` as a selector lists them: runs as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [f"{first}" if first == last else f"{first}..{last}" for first, last in runs]
