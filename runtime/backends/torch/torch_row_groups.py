"""The rows of each expert, if rows come from several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One expert's rows: `span` is their slice of `hidden`; `rows` selects them in x, with indices [N] if there are
    several sources and experts.
    """

    span: slice
    rows: slice | Tensor

    @property
    def size(self) -> int:
        return int(self.span.stop - self.span.start)

    def gather(self, x: Tensor) -> Tensor:
        """The expert's rows of x [R, …], side by side; a view where they are already."""
        return x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)

    def scale(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [R] of the expert's rows, [N, 1], rounded: a product of two dtypes takes 15 times as long."""
        return self.gather(weights).to(dtype)[:, None]

    def buffer_for(self, out: Tensor) -> Tensor:
        """A buffer for the expert's rows of out [R, …]: a view of out if they are contiguous there."""
        return out[self.rows] if isinstance(self.rows, slice) else out.new_empty((self.size, *out.shape[1:]))

    def scatter(self, buffer: Tensor, out: Tensor) -> None:
        """Copies the buffer of `buffer_for` to the expert's rows of out."""
        if not isinstance(self.rows, slice):
            out.index_copy_(0, self.rows, buffer)


def row_groups(counts: Tensor, num_rows: int) -> list[RowGroup]:
    """Each expert's rows, by counts [sources, E], in rows sorted by source, then by expert.

    Raises `RuntimeError` if the counts do not add up to the rows.
    """
    sources, experts = counts.shape
    stops = list(accumulate(counts.sum(0).tolist(), initial=0))
    if stops[-1] != num_rows:
        message = f"moec::expert_mlp: the counts add up to {stops[-1]}, but there are {num_rows} rows"
        raise RuntimeError(message)
    pieces = [slice(start, stop) for start, stop in pairwise(stops)]
    if sources == 1 or experts == 1:
        return [RowGroup(piece, piece) for piece in pieces]
    expert_of_row = torch.arange(experts, device=counts.device).repeat(sources).repeat_interleave(counts.flatten())
    order = expert_of_row.argsort(stable=True)
    return [RowGroup(piece, order[piece]) for piece in pieces]


def longest(groups: list[RowGroup]) -> int:
    return max((group.size for group in groups), default=0)
