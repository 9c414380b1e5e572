"""The rows of `layer.py` as bars in an SVG: time relative to the dense layer, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

BAR, GAP, LABEL, PLOT = 18, 44, 190, 480
COLOURS = {"moec": "#0b7285", "dense": "#868e96"}
OTHER = "#ced4da"


def chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """One block of bars per shape and dtype, in the order of the rows."""
    ratios = [row["ratio_to_dense"] for row in rows]
    low, high = math.log(min([*ratios, 1]) / 1.3), math.log(max([*ratios, 1]) * 1.1)

    def across(ratio: float) -> float:
        return LABEL + PLOT * (math.log(ratio) - low) / (high - low)

    drawn, y = [], 0
    for block in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
        y += GAP
        drawn.append(f'<text x="4" y="{y - 8}" font-weight="bold">{escape(", ".join(block))}</text>')
        for row in rows:
            if (row["shape"], row["dtype"]) == block:
                end, colour = across(row["ratio_to_dense"]), COLOURS.get(row["impl"], OTHER)
                drawn += [
                    f'<text x="{LABEL - 6}" y="{y + 13}" text-anchor="end">{escape(row["impl"])}</text>',
                    f'<rect x="{LABEL}" y="{y}" width="{end - LABEL:.1f}" height="{BAR - 4}" fill="{colour}"/>',
                    f'<text x="{end + 4:.1f}" y="{y + 13}">{row["ratio_to_dense"]:.2f}</text>',
                ]
                y += BAR
    one, height = across(1), y + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + PLOT + 60}" height="{height}"'
            ' font-family="sans-serif" font-size="12">',
            f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{GAP - 6}" y2="{y}" stroke="#495057" stroke-dasharray="3 3"/>',
            *drawn,
            f'<text x="4" y="{height - 6}">forward + backward, relative to a dense layer of the same FLOPs</text>',
            "</svg>\n",
        ]
    )
