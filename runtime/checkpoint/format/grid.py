"""Boxes of tensors: the chunks of an even grid, and the boxes that together hold a range of elements.

A box is the range `(start, stop)` of every dim; `()` is the only box of a 0-d tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, dim) for dim in shape)


def overlap(one: Box, other: Box) -> Box | None:
    """The elements in both boxes, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative_to(box: Box, origin: Box) -> Box:
    """`box` counted from the first element of `origin`."""
    return tuple((start - zero, stop - zero) for (start, stop), (zero, _) in zip(box, origin, strict=True))


def chunk_box(shape: Sequence[int], cuts: Sequence[int], chunk: Sequence[int]) -> Box:
    """The box of `chunk` in a tensor that `cuts[dim]` cuts into equal parts."""
    steps = [dim // cut for dim, cut in zip(shape, cuts, strict=True)]
    return tuple((step * index, step * (index + 1)) for step, index in zip(steps, chunk, strict=True))


def chunk_number(cuts: Sequence[int], chunk: Sequence[int]) -> int:
    """The number of a chunk, the last dim's counting fastest."""
    number = 0
    for cut, index in zip(cuts, chunk, strict=True):
        number = number * cut + index
    return number


def chunk_at(cuts: Sequence[int], number: int) -> tuple[int, ...]:
    """The indices of the chunk with this number."""
    indices = []
    for cut in reversed(cuts):
        number, index = divmod(number, cut)
        indices.append(index)
    return tuple(reversed(indices))


def chunks_overlapping(shape: Sequence[int], cuts: Sequence[int], box: Box) -> Iterator[tuple[int, Box, Box]]:
    """The number and the box of every chunk that `box` overlaps, and the overlap. Visits no other chunk."""
    if any(start >= stop for start, stop in box):
        return
    ranges = []
    for dim, cut, (start, stop) in zip(shape, cuts, box, strict=True):
        step = dim // cut
        ranges.append(range(start // step, -(-stop // step)))
    for chunk in product(*ranges):
        whole_chunk = chunk_box(shape, cuts, chunk)
        common = overlap(whole_chunk, box)
        assert common is not None
        yield chunk_number(cuts, chunk), whole_chunk, common


def boxes_of_run(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, Box]]:
    """The elements `first` to `last` (exclusive) of a C-ordered tensor as at most `2 * len(shape)` contiguous boxes.

    Each box comes with the number of its first element.
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
        yield head * row, ((head, tail), *full_box(shape[1:]))
    yield from _in_row(shape, tail, tail * row, last)


def _in_row(shape: Sequence[int], index: int, first: int, last: int) -> Iterator[tuple[int, Box]]:
    zero = index * math.prod(shape[1:])
    for start, box in boxes_of_run(shape[1:], first - zero, last - zero):
        yield zero + start, ((index, index + 1), *box)
