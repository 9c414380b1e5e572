"""Emits the ops of the gate `topology`.

In the graph of a rank there is one data rank, in a reference there are several, and again for each micro-batch. Tables
of data ranks and experts are computed from a few numbers, so that no graph holds one. No function reads a shape: a
batch may have no sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moec.codegen.emit.emitter import Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.ops.gating.topology_ops import Placed

aten = torch.ops.aten


def _data_ranks(e: Emitter, op: Op) -> None:
    program = e.program
    count = program.mesh("dense").size("dp") if program.meshes else program.routing_groups("rank")
    numbers = e.traced(op, partial(_numbers, count=count), *e.refs(op))
    e.result(op, aten.remainder.Scalar, numbers, count if program.meshes else program.data_ranks)


def _topology_loss(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.TopologyLoss)
    e.several(op, e.traced(op, partial(_loss, op, e.program.routing_groups("rank")), *e.refs(op)))


def _bound_far(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.BoundFar)
    e.several(op, e.traced(op, partial(_bounded, op, e.program.routing_groups("rank")), *e.refs(op)))


def _choose_near(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ChooseNear)
    e.several(op, e.traced(op, partial(_chosen_near, op, e.program.routing_groups("rank")), *e.refs(op)))


TOPOLOGY: dict[type[Op], Callable[[Emitter, Op], None]] = {
    o.BoundFar: _bound_far,
    o.ChooseNear: _choose_near,
    o.DataRanks: _data_ranks,
    o.TopologyLoss: _topology_loss,
}


# ---- functions of tensors ------------------------------------------------------------------------------


def _loss(
    op: o.TopologyLoss, groups: int, probabilities: Tensor, choices: Tensor, ranks: Tensor, real: Tensor | None = None
) -> Tensor:
    """P of a sequence is summed before it is weighed: backward keeps a number of each sequence and expert."""
    if real is not None:
        probabilities = aten.where.ScalarOther(_mask(real), probabilities, 0)
    total = aten.clamp_min.default(aten.sum.dim_IntList(choices, [1], True), 1)
    shares = aten.div.Tensor(aten.mul.Tensor(_penalties(op, probabilities, ranks), choices), total)
    rows = _of_sequences(aten.mul.Scalar(shares, sum(op.parts)), probabilities, groups)
    loss: Tensor = aten.sum.default(aten.mul.Tensor(aten.sum.dim_IntList(probabilities, [1]), rows))
    return loss


def _penalties(op: o.TopologyLoss, like: Tensor, ranks: Tensor) -> Tensor:
    """Seconds per byte from each data rank to each expert [data ranks, E], over their mean over experts."""
    own, holders = _places(op, ranks)
    inside, *of_levels = (op.bandwidths[0] / bandwidth for bandwidth in op.bandwidths)
    zeros = aten.mul.Tensor(aten.zeros_like.default(holders), aten.new_zeros.default(like, []))
    seconds = aten.add.Scalar(zeros, inside)
    for size, of_level in zip(_inside_of_levels(op), of_levels, strict=True):
        apart = aten.ne.Tensor(_divided(own, size), _divided(holders, size))
        seconds = aten.where.ScalarSelf(apart, of_level, seconds)
    mean = aten.mean.dim(seconds, [1])
    penalties: Tensor = aten.div.Tensor(mean, aten.mean.dim(mean, [-1], True))
    return penalties


def _bounded(
    op: o.BoundFar,
    groups: int,
    weights: Tensor,
    experts: Tensor,
    ranks: Tensor,
    training: Tensor,
    real: Tensor | None = None,
) -> Tensor:
    """Far choices, sorted by weight, are counted from the largest, each data rank's by themselves."""
    counted = aten.ge.Scalar(experts, 0)
    if real is not None:
        counted = aten.logical_and.default(counted, _mask(real))
    near = _of_choices(_of_sequences(_near(op, ranks), experts, groups), experts)
    far = aten.logical_and.default(counted, aten.logical_not.default(near))
    scores = aten.reshape.default(aten.where.ScalarOther(far, aten.detach.default(weights), -1.0), [-1])
    order = aten.argsort.stable(scores, stable=True, dim=0, descending=True)
    of_rank = _of_ranks(experts, groups)
    far_of_rank = aten.logical_and.default(of_rank, _column(far))
    numbers = aten.cumsum.default(aten.index_select.default(far_of_rank, 0, order), 0)
    numbers = aten.index_copy.default(aten.zeros_like.default(numbers), 0, order, numbers)
    total = aten.sum.dim_IntList(aten.logical_and.default(of_rank, _column(counted)), [0])
    most = _divided(aten.mul.Scalar(total, op.share), op.whole)
    beyond = aten.any.dim(aten.logical_and.default(far_of_rank, aten.gt.Tensor(numbers, most)), 1)
    again = aten.logical_and.default(aten.view_as.default(beyond, experts), aten.ne.Scalar(training, 0))
    kept: Tensor = aten.where.ScalarSelf(again, -1, experts)
    return kept


def _chosen_near(op: o.ChooseNear, groups: int, scores: Tensor, kept: Tensor, ranks: Tensor) -> Tensor:
    """Choices of −1 become the token's best near experts, by its scores, that it has not chosen already.

    Choices are not taken to be the best by these scores: probabilities may be equal where scores are not.
    """
    k, wanted = op.results[0].shape[-1], aten.lt.Scalar(kept, 0)
    assert isinstance(k, int)
    near = aten.unsqueeze.default(_of_sequences(_near(op, ranks), kept, groups), 1)
    left = aten.where.ScalarOther(near, aten.detach.default(scores), -math.inf)
    taken = aten.where.ScalarSelf(wanted, sum(op.parts), kept)  # choices of -1 are in a column of their own
    left = aten.scatter.value(aten.constant_pad_nd.default(left, [0, 1], -math.inf), -1, taken, -math.inf)
    best = [aten.argmax.default(left, -1, True)]
    for _ in range(k - 1):
        left = aten.scatter.value(left, -1, best[-1], -math.inf)
        best.append(aten.argmax.default(left, -1, True))
    place = aten.clamp_min.default(aten.sub.Scalar(aten.cumsum.default(wanted, -1), 1), 0)
    again = aten.gather.default(aten.cat.default(best, -1), -1, place)
    chosen: Tensor = aten.where.self(wanted, again, kept)
    return chosen


# ---- where ranks and experts are -----------------------------------------------------------------------


def _places(op: Placed, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The tp ranks of each data rank [data ranks, tp, 1], and where each has the experts [data ranks, tp, E]."""
    first = aten.mul.Scalar(aten.unsqueeze.default(ranks, -1), op.tp)
    own = aten.unsqueeze.default(aten.add.Tensor(first, _numbers(ranks, op.tp)), -1)
    of_parts = [_divided(aten.mul.Scalar(_numbers(ranks, n), op.ep), n) for n in op.parts]
    group = aten.mul.Scalar(_divided(own, op.ep), op.ep)
    return own, aten.add.Tensor(group, aten.cat.default(of_parts))


def _near(op: Placed, ranks: Tensor) -> Tensor:
    """Whether each expert is in the node of each of a data rank's tp ranks [data ranks, E]."""
    own, holders = _places(op, ranks)
    *_, node = _inside_of_levels(op)
    near: Tensor = aten.all.dim(aten.eq.Tensor(_divided(own, node), _divided(holders, node)), 1)
    return near


def _inside_of_levels(op: Placed) -> Iterator[int]:
    """The ranks of each of the equals that a level joins."""
    return (math.prod(op.levels[:number]) for number in range(len(op.levels)))


def _divided(x: Tensor, by: int) -> Tensor:
    whole: Tensor = aten.floor_divide.Scalar(x, by)
    return whole


def _numbers(like: Tensor, count: int) -> Tensor:
    """0 … count − 1, int64, on the device of `like`."""
    ones = aten.new_ones.default(like, [count], dtype=torch.int64)
    numbers: Tensor = aten.sub.Scalar(aten.cumsum.default(ones, 0), 1)
    return numbers


# ---- sequences of data ranks ---------------------------------------------------------------------------


def _of_sequences(table: Tensor, x: Tensor, groups: int) -> Tensor:
    """For each sequence of x `[batch, sequence, …]`, the row of its data rank in `table` [groups, n]: [batch, n]."""
    rows: Tensor = aten.index_select.default(table, 0, _groups(x, groups))
    return rows


def _of_choices(rows: Tensor, experts: Tensor) -> Tensor:
    """What `rows` [batch, E] has of each choice [batch, sequence, k]; of a choice of −1, that of expert 0."""
    found = aten.gather.default(rows, 1, aten.flatten.using_ints(aten.clamp_min.default(experts, 0), 1, 2))
    of: Tensor = aten.view_as.default(found, experts)
    return of


def _groups(x: Tensor, groups: int) -> Tensor:
    """Which of the data ranks in this process each sequence of x `[batch, sequence, …]` belongs to: [batch]."""
    one = aten.zeros_like.default(aten.narrow.default(x, -1, 0, 1), dtype=torch.int64)
    zeros: Tensor = aten.sum.dim_IntList(one, [1, 2])
    if groups == 1:
        return zeros
    ones = aten.add.Scalar(zeros, 1)
    numbers = aten.mul.Scalar(aten.sub.Scalar(aten.cumsum.default(ones, 0), 1), groups)
    sequences = aten.clamp_min.default(aten.sum.default(ones), 1)
    of: Tensor = aten.floor_divide.default(numbers, sequences)
    return of


def _of_ranks(experts: Tensor, groups: int) -> Tensor:
    """Which of the data ranks in this process each choice belongs to: bool [choices, groups]."""
    of = aten.unsqueeze.default(aten.unsqueeze.default(_groups(experts, groups), -1), -1)
    each = aten.add.Tensor(aten.zeros_like.default(experts), of)
    own: Tensor = aten.eq.Tensor(_column(each), _numbers(experts, groups))
    return own


def _column(x: Tensor) -> Tensor:
    column: Tensor = aten.unsqueeze.default(aten.reshape.default(x, [-1]), -1)
    return column


def _mask(real: Tensor) -> Tensor:
    """Which tokens are real, [batch, sequence, 1]."""
    mask: Tensor = aten.unsqueeze.default(aten.ne.Scalar(real, 0), -1)
    return mask
