"""Boxes and chunks against numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.runtime.checkpoint.format.grid import boxes_of_run, chunk_at, chunk_box, chunk_number, chunks_overlapping

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes, st.data())
def test_boxes_of_a_run_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    first = data.draw(st.integers(0, total))
    last = data.draw(st.integers(first, total))
    numbers = np.arange(total).reshape(shape)
    found, boxes = [], list(boxes_of_run(shape, first, last))
    for start, box in boxes:
        inside = numbers[tuple(slice(*ends) for ends in box)].ravel().tolist()
        assert inside == list(range(start, start + math.prod(stop - start for start, stop in box)))
        found += inside
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=3), st.data())
def test_cells_over_a_box_cover_it_once_and_no_other_is_touched(
    dims: list[tuple[int, int]], data: st.DataObject
) -> None:
    cuts = tuple(cut for cut, _ in dims)
    shape = tuple(cut * step for cut, step in dims)
    box = tuple(tuple(sorted((data.draw(st.integers(0, d)), data.draw(st.integers(0, d))))) for d in shape)
    seen = np.zeros(shape, dtype=int)
    for number, chunk, both in chunks_overlapping(shape, cuts, box):  # type: ignore[arg-type]
        assert chunk == chunk_box(shape, cuts, chunk_at(cuts, number))
        assert chunk_number(cuts, chunk_at(cuts, number)) == number
        assert all(start < stop for start, stop in both)
        seen[tuple(slice(*ends) for ends in both)] += 1
    wanted = np.zeros(shape, dtype=int)
    wanted[tuple(slice(*ends) for ends in box)] = 1
    assert (seen == wanted).all()
