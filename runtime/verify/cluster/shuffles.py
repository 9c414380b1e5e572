"""Conversions on the virtual cluster: the forward pass of each, over the tensors of one group's ranks.

Backward is the shuffle of the conversion that the class declares (`Conversion.backward`): a shuffle that autograd
differentiates would hide a missing `copy_to`. tests/distributed holds each against the real operator on gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import attributes_among
from moec.passes.ir.ops import Conversion
from moec.passes.ir.ops import ragged_conversions as rows
from moec.runtime.ops.assign_slots import counts_and_slots, rows_of_experts
from moec.runtime.ops.sharded_vocabulary import embed_rows, pick_logits
from moec.runtime.refused_derivatives import once_differentiable

Tensors = Sequence[Tensor]
"""A tensor of each rank of a group."""

Shuffle = Callable[..., Sequence[Any]]
"""Takes a conversion, and each of its operands on all ranks of a group. Returns the result on each rank."""

F = TypeVar("F", bound=Shuffle)

Args = Sequence[Any]
"""The arguments of a node, which include its operands."""

RunNode = Callable[[Args, list[list[Any]]], list[Any]]
"""Takes a node's arguments, and its operands on each rank of a group. Returns the result on each rank.

A node of two groups runs over the first, and then over the second: there its operand is the first result.
"""

NODES: dict[str, RunNode] = {}
"""Conversions, and ops that depend on a rank's index in its group, by the name of a node's target, such as
`moec.all_gather.default`."""

_SHUFFLES: dict[str, Shuffle] = {}
"""The forward pass of each conversion, by the name of its operator."""


def shuffle(kind: type[Conversion], **fixed: Any) -> Callable[[F], F]:
    """Registers the forward shuffle of a conversion; `fixed` are attributes that its operator's name says."""
    name = kind.operator_of(**fixed)

    def register(forward: F) -> F:
        def run_node(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
            conversion = kind.over("", **fixed, **attributes_among(kind, args))
            values, *extra_operands = inputs
            if conversion.backward() == "none":
                with torch.no_grad():
                    return list(forward(conversion, values, *extra_operands))
            return list(_Declared.apply(conversion, extra_operands, *values))  # type: ignore[no-untyped-call]

        _SHUFFLES[name] = forward
        NODES[f"moec.{name}.default"] = run_node
        return forward

    return register


class _Declared(torch.autograd.Function):
    """A conversion of one group's tensors, differentiated as its class declares."""

    @staticmethod
    def forward(
        ctx: Any, conversion: Conversion, extra_operands: Sequence[Tensors], *values: Tensor
    ) -> tuple[Any, ...]:
        ctx.backward_conversion, ctx.extra_operands = conversion.backward(), extra_operands
        return tuple(_SHUFFLES[conversion.torch_operator()](conversion, values, *extra_operands))

    @staticmethod
    @once_differentiable("a conversion of the virtual cluster")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        conversion = ctx.backward_conversion
        if not isinstance(conversion, Conversion):
            return (None, None, *gradients)
        return (None, None, *_SHUFFLES[conversion.torch_operator()](conversion, gradients, *ctx.extra_operands))


def forward_shuffle(conversion: Conversion) -> Shuffle:
    """The forward pass of `conversion` over the tensors of one group's ranks, without a gradient."""
    return _SHUFFLES[conversion.torch_operator()]


# ---- values of one shape -----------------------------------------------------------------------------


@shuffle(o.CopyTo)
def _identity(_: Conversion, tensors: Tensors) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@shuffle(o.AllReduce)
def _summed(_: Conversion, tensors: Tensors) -> list[Tensor]:
    """One after the other, each sum rounded to the tensors' dtype: as gloo and NCCL add around a ring."""
    total = functools.reduce(torch.add, tensors)
    return [total.clone() for _ in tensors]


@shuffle(o.AllReduce, reduce="max")
def _largest(_: Conversion, tensors: Tensors) -> list[Tensor]:
    largest = torch.stack(list(tensors)).amax(0)
    return [largest.clone() for _ in tensors]


@shuffle(o.AllGather)
@shuffle(o.AllGatherAlike)
def _gathered(op: o.AllGather, tensors: Tensors) -> list[Tensor]:
    gathered = torch.cat(list(tensors), op.dim)
    return [gathered.clone() for _ in tensors]


@shuffle(o.Slice)
def _sliced(op: o.Slice, tensors: Tensors) -> list[Tensor]:
    if tensors[0].shape[op.dim] % len(tensors):
        raise ValueError(f"{list(tensors[0].shape)} does not divide over {len(tensors)} ranks along dim {op.dim}")
    return [tensor.chunk(len(tensors), op.dim)[rank].clone() for rank, tensor in enumerate(tensors)]


@shuffle(o.KeepOnFirst)
def _kept_on_first(_: Conversion, tensors: Tensors) -> list[Tensor]:
    return [tensors[0].clone(), *map(torch.zeros_like, tensors[1:])]


@shuffle(o.ReduceScatter)
def _scattered(op: Any, tensors: Tensors) -> list[Tensor]:
    return _sliced(op, _summed(op, tensors))


@shuffle(o.AllToAllPadded)
def _swapped(op: o.AllToAllPadded, tensors: Tensors) -> list[Tensor]:
    """Splits along the dim `wanted` and concatenates along the dim `given`."""
    pieces = [tensor.chunk(len(tensors), op.wanted) for tensor in tensors]
    return [torch.cat([piece[rank] for piece in pieces], op.given) for rank in range(len(tensors))]


# ---- ragged rows and their counts --------------------------------------------------------------------


def _splits(sent: Tensors, received: Tensors) -> list[Tensor]:
    """The rows to send and to receive, from each rank's counts of them `[ranks, …]`."""
    return [torch.stack([there.sum(1), here.sum(1)]) for there, here in zip(sent, received, strict=True)]


@shuffle(rows.ExchangeCounts)
def _exchanged_counts(_: object, counts: Tensors) -> list[Any]:
    """The counts that each rank receives from each rank, `[ranks, experts]`, and its splits: rows sent and received."""
    sent = [rank_counts.reshape(len(counts), -1) for rank_counts in counts]
    received = [torch.stack([rank_counts[rank] for rank_counts in sent]) for rank in range(len(sent))]
    return list(zip(received, _splits(sent, received), strict=True))


@shuffle(rows.GatherCounts)
def _gathered_counts(_: object, counts: Tensors) -> list[Any]:
    """The counts of all ranks, and the splits of each: all its rows to every rank, and those of every rank."""
    gathered = torch.stack(list(counts))
    sent = [rank_counts.expand_as(gathered).flatten(1) for rank_counts in counts]
    splits = _splits(sent, [gathered.flatten(1)] * len(counts))
    return [(gathered.flatten(0, 1), rank_splits) for rank_splits in splits]


def _assigned_slots(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    experts, slots = inputs
    counts = [rows_of_experts(choices, args[2]) for choices in experts]
    operands = zip(experts, counts, slots, strict=True)
    return [counts_and_slots(*own[:2], torch.cat(counts), own[2], rank) for rank, own in enumerate(operands)]


def _exchanged_and_gathered_counts(args: Args, inputs: list[list[Any]]) -> list[Any]:
    (counts,) = inputs
    if isinstance(counts[0], Tensor):
        return _exchanged_counts(args, counts)
    received, splits = zip(*counts, strict=True)
    all_counts, all_splits = zip(*_gathered_counts(args, received), strict=True)
    return list(zip(received, all_counts, splits, all_splits, strict=True))


NODES[f"moec.{o.AssignSlots.operator}.default"] = _assigned_slots
NODES[f"moec.{rows.ExchangeAndGatherCounts.operator}.default"] = _exchanged_and_gathered_counts


@shuffle(rows.AllToAll)
def _exchanged(op: rows.AllToAll, tensors: Tensors, splits: Tensors) -> list[Tensor]:
    """Concatenates all ranks' rows and reorders them by receiver, then by sender.

    Raises `ValueError` if the splits do not add up to the rows.
    """
    sent = torch.stack([split[int(op.reverse)] for split in splits])
    if sent.sum(1).tolist() != [len(tensor) for tensor in tensors]:
        raise ValueError(f"{[len(tensor) for tensor in tensors]} rows, of which {sent.sum(1).tolist()} are sent")
    lengths = sent.flatten()
    starts = (lengths.cumsum(0) - lengths).view_as(sent).T.flatten()
    received = sent.T.flatten()
    within = torch.arange(int(received.sum())) - (received.cumsum(0) - received).repeat_interleave(received)
    moved = torch.cat(list(tensors))[starts.repeat_interleave(received) + within]
    return list(torch.split(moved, sent.sum(0).tolist()))


@shuffle(rows.AllGatherRows)
def _gathered_rows(_: Conversion, tensors: Tensors, splits: Tensors) -> list[Tensor]:
    sizes = [len(tensor) for tensor in tensors]
    if any(split[1].tolist() != sizes for split in splits):
        raise ValueError(f"{sizes} rows, counted as {[split[1].tolist() for split in splits]}")
    gathered = torch.cat(list(tensors))
    return [gathered.clone() for _ in tensors]


@shuffle(rows.ReduceScatterRows)
def _scattered_rows(_: Conversion, tensors: Tensors, splits: Tensors) -> list[Tensor]:
    """Each rank sums the terms of its rows in a wide accumulator, as the operator does."""
    total = torch.stack(list(tensors)).sum(0)
    return [torch.split(total, split[1].tolist())[rank].clone() for rank, split in enumerate(splits)]


# ---- ops that depend on a rank's index in its group, and communicate nothing -------------------------


def _embed_part(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    return [embed_rows(ids, table, rank) for rank, (ids, table) in enumerate(zip(*inputs, strict=True))]


def _label_logit(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    return [pick_logits(logits, labels, rank) for rank, (logits, labels) in enumerate(zip(*inputs, strict=True))]


NODES |= {"moec.embed_part.default": _embed_part, "moec.label_logit.default": _label_logit}
