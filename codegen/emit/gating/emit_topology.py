"""Emits the ops of the gate `topology`.

The graph of a rank has one data rank; a reference has all data ranks, once for each micro-batch. Graphs contain no
tables of data ranks and experts, but compute them from a few numbers. No function reads a shape: a batch may have no
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moec.codegen.emit.emitter import Emissions, Emitter
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.ops.gating.topology_ops import Placed

aten = torch.ops.aten


def _data_ranks(e: Emitter, op: Op) -> None:
    program = e.program
    count = program.mesh("dense").size("dp") if program.meshes else program.routing_groups("rank")
    numbers = e.trace(op, partial(_numbers, count=count), *e.refs(op))
    e.result(op, aten.remainder.Scalar, numbers, count if program.meshes else program.data_ranks)


def _topology_loss(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.TopologyLoss)
    e.set_results(op, e.trace(op, partial(_loss, op, e.program.routing_groups("rank")), *e.refs(op)))


def _bound_far(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.BoundFar)
    e.set_results(op, e.trace(op, partial(_bounded, op, e.program.routing_groups("rank")), *e.refs(op)))


def _choose_near(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.ChooseNear)
    e.set_results(op, e.trace(op, partial(_chosen_near, op, e.program.routing_groups("rank")), *e.refs(op)))


TOPOLOGY: Emissions = {
    o.BoundFar: _bound_far,
    o.ChooseNear: _choose_near,
    o.DataRanks: _data_ranks,
    o.TopologyLoss: _topology_loss,
}


# ---- functions of tensors ------------------------------------------------------------------------------


def _loss(
    op: o.TopologyLoss, groups: int, probabilities: Tensor, choices: Tensor, ranks: Tensor, real: Tensor | None = None
) -> Tensor:
    """Sums P over a sequence before weighing it, so that backward keeps one number per sequence and expert."""
    if real is not None:
        probabilities = aten.where.ScalarOther(_mask(real), probabilities, 0)
    total = aten.clamp_min.default(aten.sum.dim_IntList(choices, [1], True), 1)
    shares = aten.div.Tensor(aten.mul.Tensor(_penalties(op, probabilities, ranks), choices), total)
    sequence_shares = _rows_by_sequence(aten.mul.Scalar(shares, sum(op.parts)), probabilities, groups)
    loss: Tensor = aten.sum.default(aten.mul.Tensor(aten.sum.dim_IntList(probabilities, [1]), sequence_shares))
    return loss


def _penalties(op: o.TopologyLoss, like: Tensor, data_ranks: Tensor) -> Tensor:
    """Seconds per byte from each data rank to each expert [data ranks, E], over their mean over experts."""
    ranks = _ranks_of_tokens(op, data_ranks)
    experts_on = _ranks_of_experts(op, ranks)
    local_seconds, *level_seconds = (op.bandwidths[0] / bandwidth for bandwidth in op.bandwidths)
    zeros = aten.mul.Tensor(aten.zeros_like.default(experts_on), aten.new_zeros.default(like, []))
    seconds = aten.add.Scalar(zeros, local_seconds)
    for size, level_second in zip(_inside_of_levels(op), level_seconds, strict=True):
        crosses_level = aten.ne.Tensor(_floor_divided(ranks, size), _floor_divided(experts_on, size))
        seconds = aten.where.ScalarSelf(crosses_level, level_second, seconds)
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
    """Counts the far choices of each data rank in descending order of weight, and drops those beyond its limit."""
    counted = aten.ge.Scalar(experts, 0)
    if real is not None:
        counted = aten.logical_and.default(counted, _mask(real))
    near = _values_of_choices(_rows_by_sequence(_near(op, ranks), experts, groups), experts)
    far = aten.logical_and.default(counted, aten.logical_not.default(near))
    scores = aten.reshape.default(aten.where.ScalarOther(far, aten.detach.default(weights), -1.0), [-1])
    order = aten.argsort.stable(scores, stable=True, dim=0, descending=True)
    in_rank = _choices_in_groups(experts, groups)
    far_in_rank = aten.logical_and.default(in_rank, _column(far))
    numbers = aten.cumsum.default(aten.index_select.default(far_in_rank, 0, order), 0)
    numbers = aten.index_copy.default(aten.zeros_like.default(numbers), 0, order, numbers)
    total = aten.sum.dim_IntList(aten.logical_and.default(in_rank, _column(counted)), [0])
    limit = _floor_divided(aten.mul.Scalar(total, op.share), op.whole)
    beyond = aten.any.dim(aten.logical_and.default(far_in_rank, aten.gt.Tensor(numbers, limit)), 1)
    is_dropped = aten.logical_and.default(aten.view_as.default(beyond, experts), aten.ne.Scalar(training, 0))
    bounded: Tensor = aten.where.ScalarSelf(is_dropped, -1, experts)
    return bounded


def _chosen_near(op: o.ChooseNear, groups: int, scores: Tensor, kept: Tensor, ranks: Tensor) -> Tensor:
    """Choices of −1 become the token's best near experts, by its scores, that it has not chosen already.

    The kept choices need not be the best by these scores: probabilities may be equal where scores are not.
    """
    k, is_missing = op.results[0].shape[-1], aten.lt.Scalar(kept, 0)
    assert isinstance(k, int)
    near = aten.unsqueeze.default(_rows_by_sequence(_near(op, ranks), kept, groups), 1)
    candidates = aten.where.ScalarOther(near, aten.detach.default(scores), -math.inf)
    excluded = aten.where.ScalarSelf(is_missing, sum(op.parts), kept)  # choices of -1 are in a column of their own
    padded = aten.constant_pad_nd.default(candidates, [0, 1], -math.inf)
    candidates = aten.scatter.value(padded, -1, excluded, -math.inf)
    best = [aten.argmax.default(candidates, -1, True)]
    for _ in range(k - 1):
        candidates = aten.scatter.value(candidates, -1, best[-1], -math.inf)
        best.append(aten.argmax.default(candidates, -1, True))
    place = aten.clamp_min.default(aten.sub.Scalar(aten.cumsum.default(is_missing, -1), 1), 0)
    replacements = aten.gather.default(aten.cat.default(best, -1), -1, place)
    choices: Tensor = aten.where.self(is_missing, replacements, kept)
    return choices


# ---- where ranks and experts are -----------------------------------------------------------------------


def _ranks_of_tokens(op: Placed, data_ranks: Tensor) -> Tensor:
    """The ranks that share the sequences of each data rank: `data_rank · sharers` and the next ones,
    [data ranks, sharers, 1]."""
    first = aten.mul.Scalar(aten.unsqueeze.default(data_ranks, -1), op.sharers)
    ranks: Tensor = aten.unsqueeze.default(aten.add.Tensor(first, _numbers(data_ranks, op.sharers)), -1)
    return ranks


def _ranks_of_experts(op: Placed, ranks: Tensor) -> Tensor:
    """The rank to which each of `ranks` sends the tokens of each expert, [data ranks, sharers, E].

    The `ep` group of rank r is `ep` ranks, `etp` apart, from `⌊r / (ep · etp)⌋ · ep · etp + r mod etp` on. The i-th of
    them has the i-th of `ep` equal pieces of each part of the experts.
    """
    places = aten.cat.default([_floor_divided(aten.mul.Scalar(_numbers(ranks, n), op.ep), n) for n in op.parts])
    distances = aten.mul.Scalar(places, op.etp)
    size = op.ep * op.etp
    first = aten.mul.Scalar(_floor_divided(ranks, size), size)
    first = aten.add.Tensor(first, aten.remainder.Scalar(ranks, op.etp))
    experts_on: Tensor = aten.add.Tensor(first, distances)
    return experts_on


def _near(op: Placed, data_ranks: Tensor) -> Tensor:
    """Whether each expert is in the node of all ranks of a data rank [data ranks, E]."""
    ranks = _ranks_of_tokens(op, data_ranks)
    experts_on = _ranks_of_experts(op, ranks)
    *_, node = _inside_of_levels(op)
    near: Tensor = aten.all.dim(aten.eq.Tensor(_floor_divided(ranks, node), _floor_divided(experts_on, node)), 1)
    return near


def _inside_of_levels(op: Placed) -> Iterator[int]:
    """For each level, the number of ranks in each of the units that it joins."""
    return (math.prod(op.levels[:number]) for number in range(len(op.levels)))


def _floor_divided(x: Tensor, divisor: int) -> Tensor:
    quotient: Tensor = aten.floor_divide.Scalar(x, divisor)
    return quotient


def _numbers(like: Tensor, count: int) -> Tensor:
    """0 … count − 1, int64, on the device of `like`."""
    ones = aten.new_ones.default(like, [count], dtype=torch.int64)
    numbers: Tensor = aten.sub.Scalar(aten.cumsum.default(ones, 0), 1)
    return numbers


# ---- sequences of data ranks ---------------------------------------------------------------------------


def _rows_by_sequence(table: Tensor, x: Tensor, groups: int) -> Tensor:
    """For each sequence of x `[batch, sequence, …]`, the row of its data rank in `table` [groups, n]: [batch, n]."""
    sequence_rows: Tensor = aten.index_select.default(table, 0, _groups(x, groups))
    return sequence_rows


def _values_of_choices(rows: Tensor, experts: Tensor) -> Tensor:
    """The value in `rows` [batch, E] of each choice [batch, sequence, k]; of expert 0 for a choice of −1."""
    gathered = aten.gather.default(rows, 1, aten.flatten.using_ints(aten.clamp_min.default(experts, 0), 1, 2))
    values: Tensor = aten.view_as.default(gathered, experts)
    return values


def _groups(x: Tensor, groups: int) -> Tensor:
    """The index, among this process's data ranks, of that of each sequence of x `[batch, sequence, …]`: [batch]."""
    column = aten.zeros_like.default(aten.narrow.default(x, -1, 0, 1), dtype=torch.int64)
    zeros: Tensor = aten.sum.dim_IntList(column, [1, 2])
    if groups == 1:
        return zeros
    ones = aten.add.Scalar(zeros, 1)
    numbers = aten.mul.Scalar(aten.sub.Scalar(aten.cumsum.default(ones, 0), 1), groups)
    sequences = aten.clamp_min.default(aten.sum.default(ones), 1)
    numbers_of: Tensor = aten.floor_divide.default(numbers, sequences)
    return numbers_of


def _choices_in_groups(experts: Tensor, groups: int) -> Tensor:
    """Whether each choice belongs to each of this process's data ranks: bool [choices, groups]."""
    sequence_groups = aten.unsqueeze.default(aten.unsqueeze.default(_groups(experts, groups), -1), -1)
    choice_groups = aten.add.Tensor(aten.zeros_like.default(experts), sequence_groups)
    is_in_group: Tensor = aten.eq.Tensor(_column(choice_groups), _numbers(experts, groups))
    return is_in_group


def _column(x: Tensor) -> Tensor:
    column: Tensor = aten.unsqueeze.default(aten.reshape.default(x, [-1]), -1)
    return column


def _mask(real: Tensor) -> Tensor:
    """Which tokens are real, [batch, sequence, 1]."""
    mask: Tensor = aten.unsqueeze.default(aten.ne.Scalar(real, 0), -1)
    return mask
