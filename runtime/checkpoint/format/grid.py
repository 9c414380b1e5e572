"""Boxes of tensors: the cells of an even grid, and the boxes that a run of elements consists of.

A box is the range `(start, stop)` of every dim; `()` is the only box of a 0-d tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, dim) for dim in shape)


def overlap(one: Box, other: Box) -> Box | None:
    """The elements in both boxes, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def moved(box: Box, origin: Box) -> Box:
    """`box` counted from the first element of `origin`."""
    return tuple((start - zero, stop - zero) for (start, stop), (zero, _) in zip(box, origin, strict=True))


def cell_box(shape: Sequence[int], cuts: Sequence[int], cell: Sequence[int]) -> Box:
    """The box of `cell` in a tensor that `cuts[dim]` cuts into equal parts."""
    steps = [dim // cut for dim, cut in zip(shape, cuts, strict=True)]
    return tuple((step * place, step * (place + 1)) for step, place in zip(steps, cell, strict=True))


def cell_number(cuts: Sequence[int], cell: Sequence[int]) -> int:
    """The number of a cell, the last dim's counting fastest."""
    number = 0
    for cut, place in zip(cuts, cell, strict=True):
        number = number * cut + place
    return number


def cell_of(cuts: Sequence[int], number: int) -> tuple[int, ...]:
    """The cell with this number."""
    places = []
    for cut in reversed(cuts):
        number, place = divmod(number, cut)
        places.append(place)
    return tuple(reversed(places))


def cells_over(shape: Sequence[int], cuts: Sequence[int], box: Box) -> Iterator[tuple[int, Box, Box]]:
    """The cells that `box` overlaps: their numbers, their boxes, and the overlaps. Looks at no other cell."""
    if any(start >= stop for start, stop in box):
        return
    ranges = []
    for dim, cut, (start, stop) in zip(shape, cuts, box, strict=True):
        step = dim // cut
        ranges.append(range(start // step, -(-stop // step)))
    for cell in product(*ranges):
        whole_cell = cell_box(shape, cuts, cell)
        both = overlap(whole_cell, box)
        assert both is not None
        yield cell_number(cuts, cell), whole_cell, both


def boxes_of_run(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, Box]]:
    """The elements `first` to `last` (exclusive) of a C-ordered tensor as boxes, each contiguous in it.

    Each comes with the number of its first element. At most `2 * len(shape)` boxes.
    """
    if first >= last:
        return
    if not shape:
        yield 0, ()
        return
    row = math.prod(shape[1:])
    head, tail = -(-first // row), last // row
    if head > tail:  # within one row
        yield from _in_row(shape, tail, first, last)
        return
    yield from _in_row(shape, head - 1, first, head * row)
    if head < tail:
        yield head * row, ((head, tail), *whole(shape[1:]))
    yield from _in_row(shape, tail, tail * row, last)


def _in_row(shape: Sequence[int], index: int, first: int, last: int) -> Iterator[tuple[int, Box]]:
    zero = index * math.prod(shape[1:])
    for start, box in boxes_of_run(shape[1:], first - zero, last - zero):
        yield zero + start, ((index, index + 1), *box)
