"""Collectives on the virtual cluster: what each declares, forward and backward, on the tensors of one group's ranks.

As autograd functions with the declared backward: a shuffle that autograd differentiates would hide a missing `copy_to`.
tests/distributed holds each against the real operator on gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moec.runtime.ops.sharded_vocabulary import embed_rows, pick_logits

Shuffle = Callable[[Sequence[Tensor]], list[Tensor]]
Args = Sequence[Any]
"""The arguments of the node, its operands among them."""

Convert = Callable[[Args, list[list[Tensor]]], list[Any]]
"""From a node's arguments and its operands on each rank of a group: the results on each."""


class _Declared(torch.autograd.Function):
    """A shuffle of one group's tensors with a declared backward, itself a shuffle."""

    @staticmethod
    def forward(ctx: Any, forward: Shuffle, backward: Shuffle, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_shuffle = backward
        return tuple(forward(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.backward_shuffle(gradients))


def declared(forward: Shuffle, backward: Shuffle, *inputs: Tensor) -> Sequence[Tensor]:
    """`forward` of the group's tensors, differentiated as `backward`."""
    results: Sequence[Tensor] = _Declared.apply(forward, backward, *inputs)  # type: ignore[no-untyped-call]
    return results


# ---- shuffles ----------------------------------------------------------------------------------------


def _identity(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One after the other, each sum rounded to the tensors' dtype: as gloo and NCCL add around a ring."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return [total.clone() for _ in tensors]


def _gathered(dim: int) -> Shuffle:
    def gather(tensors: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(tensors), dim)
        return [whole.clone() for _ in tensors]

    return gather


def _sliced(dim: int) -> Shuffle:
    def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
        if tensors[0].shape[dim] % len(tensors):
            raise ValueError(f"{list(tensors[0].shape)} does not divide over {len(tensors)} ranks along dim {dim}")
        return [tensor.chunk(len(tensors), dim)[rank].clone() for rank, tensor in enumerate(tensors)]

    return cut


def _scattered(dim: int) -> Shuffle:
    cut = _sliced(dim)
    return lambda tensors: cut(_summed(tensors))


def _whole(forward: Shuffle, backward: Shuffle) -> Convert:
    return lambda args, inputs: list(declared(forward, backward, *inputs[0]))


def _along(forward: Callable[[int], Shuffle], backward: Callable[[int], Shuffle]) -> Any:
    def convert(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
        dim = args[1]
        assert isinstance(dim, int)
        return list(declared(forward(dim), backward(dim), *inputs[0]))

    return convert


def _all_reduce_max(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    """Not differentiated."""
    largest = torch.stack(inputs[0]).amax(0)
    return [largest.clone() for _ in inputs[0]]


def _exchange_counts(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    """Each rank's counts for each rank's experts; not differentiated."""
    sent = [counts.reshape(len(inputs[0]), -1) for counts in inputs[0]]
    received = [torch.stack([counts[rank] for counts in sent]) for rank in range(len(sent))]
    return [(got, torch.stack([out.sum(1), got.sum(1)])) for out, got in zip(sent, received, strict=True)]


def _all_to_all(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    """Forward: rows to their peers. Backward: the other direction."""
    rows, splits = inputs
    out, back = [s[0].tolist() for s in splits], [s[1].tolist() for s in splits]
    if args[2]:
        out, back = back, out

    def moving(counts: list[list[int]]) -> Shuffle:
        def move(tensors: Sequence[Tensor]) -> list[Tensor]:
            pieces = [torch.split(tensor, split) for tensor, split in zip(tensors, counts, strict=True)]
            return [torch.cat([piece[rank] for piece in pieces]) for rank in range(len(pieces))]

        return move

    return list(declared(moving(out), moving(back), *rows))


def _all_to_all_padded(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    """Forward: pieces along one dim for pieces along another. Backward: the other direction."""
    _, given, wanted, _ = args
    assert isinstance(given, int)
    assert isinstance(wanted, int)

    def moving(held: int, cut: int) -> Shuffle:
        def move(tensors: Sequence[Tensor]) -> list[Tensor]:
            pieces = [tensor.chunk(len(tensors), cut) for tensor in tensors]
            return [torch.cat([piece[rank] for piece in pieces], held) for rank in range(len(tensors))]

        return move

    return list(declared(moving(given, wanted), moving(wanted, given), *inputs[0]))


# ---- ops that depend on a rank's index in its group, and communicate nothing -------------------------


def _embed_part(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    return [embed_rows(ids, table, rank) for rank, (ids, table) in enumerate(zip(*inputs, strict=True))]


def _label_logit(args: Args, inputs: list[list[Tensor]]) -> list[Any]:
    return [pick_logits(logits, labels, rank) for rank, (logits, labels) in enumerate(zip(*inputs, strict=True))]


SHUFFLES: Mapping[str, Convert] = {
    "moec.all_gather.default": _along(_gathered, _scattered),
    "moec.all_gather_alike.default": _along(_gathered, _sliced),
    "moec.all_reduce.default": _whole(_summed, _identity),
    "moec.all_reduce_max.default": _all_reduce_max,
    "moec.all_to_all.default": _all_to_all,
    "moec.all_to_all_padded.default": _all_to_all_padded,
    "moec.copy_to.default": _whole(_identity, _summed),
    "moec.embed_part.default": _embed_part,
    "moec.exchange_counts.default": _exchange_counts,
    "moec.label_logit.default": _label_logit,
    "moec.reduce_scatter.default": _along(_scattered, _gathered),
    "moec.slice.default": _along(_sliced, _gathered),
}
