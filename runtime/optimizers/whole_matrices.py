"""Applies functions of whole matrices to sharded stacks of matrices: each rank gets some whole matrices.

Each of n ranks along an axis gets 1/n of the matrices: one all_to_all collects their parts, and another returns the
parts of the results. This sends less than an all_gather, and no matrix is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.ranks.watch import collective


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of matrices over the ranks of `group`, along dim 1 (rows) or dim 2 (columns) of `[matrices, …]`."""

    group: str
    dim: int


def apply_to_whole(x: Tensor, cuts: Sequence[Cut], function: Callable[[Tensor], Tensor], site: str) -> Tensor:
    """This rank's part of `function(whole)`; x `[matrices, rows, columns]` is this rank's part of the whole matrices.

    `function` keeps shapes and commutes with permutations of rows and of columns: parts are joined in the order of
    ranks, which need not be the order of rows in the parameter. A collective over the groups of all cuts.
    """
    if not cuts:
        return function(x)
    cut, *other_cuts = cuts
    with collective("all_to_all", cut.group, site) as peers:
        ranks, rank = peers.size(), peers.rank()
        counts = [part.numel() for part in torch.arange(len(x)).tensor_split(ranks)]
        local, (rows, columns) = counts[rank], x.shape[1:]
        received = x.new_empty(ranks * local, rows, columns)
        dist.all_to_all_single(received, x.contiguous(), [local] * ranks, counts, group=peers)
    matrices = torch.cat(received.view(ranks, local, rows, columns).unbind(), dim=cut.dim)
    del received
    results = apply_to_whole(matrices, other_cuts, function, site)
    with collective("all_to_all", cut.group, site) as peers:
        returned = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = torch.cat(results.tensor_split(ranks, dim=cut.dim))
        dist.all_to_all_single(returned, parts, counts, [local] * ranks, group=peers)
    return returned
