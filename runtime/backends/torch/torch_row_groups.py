"""The rows of each expert, if rows come from several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One expert's rows: in one piece of `hidden`, and in as many pieces of `rows` as there are sources."""

    where: slice
    pieces: tuple[slice, ...]

    @property
    def size(self) -> int:
        return int(self.where.stop - self.where.start)

    def gather(self, x: Tensor) -> Tensor:
        """The expert's rows of x [R, …], side by side; a view where they are already."""
        if len(self.pieces) == 1:
            return x[self.pieces[0]]
        return torch.cat([x[piece] for piece in self.pieces])

    def scale(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [R] of the expert's rows, [N, 1], rounded: a product of two dtypes takes 15 times as long."""
        return self.gather(weights).to(dtype)[:, None]

    def room(self, out: Tensor) -> Tensor:
        """A buffer for the expert's rows of out [R, …]: a view of out if they are contiguous there."""
        return out[self.pieces[0]] if len(self.pieces) == 1 else out.new_empty((self.size, *out.shape[1:]))

    def scatter(self, own: Tensor, out: Tensor) -> None:
        """Copies the buffer of `room` to the expert's rows of out."""
        if len(self.pieces) > 1:
            start = 0
            for piece in self.pieces:
                stop = start + piece.stop - piece.start
                out[piece] = own[start:stop]
                start = stop


def row_groups(counts: Tensor, num_rows: int) -> list[RowGroup]:
    """Each expert's rows, by counts [sources, E], in rows sorted by source, then by expert."""
    by_source: list[list[int]] = counts.tolist()
    pieces: list[list[slice]] = [[] for _ in range(counts.shape[1])]
    start = 0
    for source in by_source:
        for expert, count in enumerate(source):
            if count:
                pieces[expert].append(slice(start, start + count))
                start += count
    if start != num_rows:
        message = f"moec::expert_mlp: the counts add up to {start}, but there are {num_rows} rows"
        raise RuntimeError(message)
    groups, start = [], 0
    for own in pieces:
        if all(first.stop == second.start for first, second in pairwise(own)):
            own = [slice(own[0].start, own[-1].stop)] if own else []
        size = sum(piece.stop - piece.start for piece in own)
        groups.append(RowGroup(slice(start, start + size), tuple(own)))
        start += size
    return groups


def longest(groups: list[RowGroup]) -> int:
    return max((group.size for group in groups), default=0)
