"""Sums of gradients over ranks, and their norm.

The loss is divided by the global number of labels already, so every reduction is a sum and never a mean. It runs over
the groups that the plan names for the parameter (`PlanParameter.sum_over`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.errors import wrong_argument
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.gathering import reduce_scatter_single
from moec.runtime.weights.weight_spec import ZeroPart

EPS = 1e-6
"""Added to a norm before it divides, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """A gradient to sum: its index among a layer's parameters, the shape of the sum, and the groups to sum over.

    With `zero` this rank keeps a part of the sum over `zero.group`, which has `shape`; `groups` then sum the parts.
    """

    index: int
    shape: tuple[int, ...]
    groups: tuple[str, ...]
    zero: ZeroPart | None = None


@dataclass(slots=True)
class Bucket:
    """The gradients of a layer that are summed over the same groups, in one flat tensor.

    Its last elements count, for each parameter, the ranks with a gradient: a gradient that no rank has stays None.
    Where ZeRO cuts the members, the first sum is a reduce_scatter, and later sums are of this rank's parts.
    """

    members: Sequence[SummedGradient]
    site: str
    dtype: torch.dtype
    device: torch.device
    flat: Tensor = field(init=False)
    _present: Sequence[bool] = field(init=False, default=())
    _work: dist.Work | None = field(init=False, default=None)
    _scatter_input: Tensor | None = field(init=False, default=None)

    def begin(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Starts the sums of its members in `gradients` (by `index`); returns the tensors that will hold them.

        A rank without a gradient sends zeros, so that every rank sends as many bytes.
        """
        members_gradients = [gradients[member.index] for member in self.members]
        self._present = [gradient is not None for gradient in members_gradients]
        if self._zero is not None:
            self._scatter(members_gradients, self._zero)
            return self._split()
        pieces = [
            torch.zeros(member.shape, dtype=self.dtype, device=self.device) if gradient is None else gradient
            for member, gradient in zip(self.members, members_gradients, strict=True)
        ]
        counts = torch.tensor(self._present, dtype=self.dtype).to(self.device, non_blocking=True)
        self.flat = torch.cat([*(piece.reshape(-1) for piece in pieces), counts])
        self._start(self.members[0].groups[0])
        return self._split()

    @property
    def _zero(self) -> ZeroPart | None:
        return self.members[0].zero

    def _scatter(self, gradients: Sequence[Tensor | None], zero: ZeroPart) -> None:
        """Starts the reduce_scatter of `[ranks, elements]`: a row has one rank's parts, and the counts."""
        sizes = [torch.Size(member.shape).numel() for member in self.members]
        self._scatter_input = torch.empty((zero.ranks, sum(sizes) + len(sizes)), dtype=self.dtype, device=self.device)
        *rows, counts = torch.split(self._scatter_input, [*sizes, len(sizes)], 1)
        for row, gradient, member in zip(rows, gradients, self.members, strict=True):
            if gradient is None or member.zero is None:
                row.zero_()
            else:
                dim = member.zero.dim
                cut = torch.unflatten(gradient, dim, (zero.ranks, member.shape[dim])).movedim(dim, 0)
                torch.unflatten(row, 1, member.shape).copy_(cut)
        counts.copy_(torch.tensor(self._present, dtype=self.dtype))
        self.flat = self._scatter_input.new_empty(self._scatter_input.shape[1])
        with collective("reduce_scatter", zero.group, self.site) as peers:
            self._work = reduce_scatter_single(self.flat, self._scatter_input.view(-1), group=peers, async_op=True)

    @property
    def is_running(self) -> bool:
        """Whether one of its collectives has begun and not been waited for."""
        return self._work is not None

    def wait_scattered(self) -> None:
        """Waits for the reduce_scatter and frees its input; does nothing to a bucket of whole gradients."""
        if self._zero is not None and self._work is not None:
            self._wait(self._zero.group, "reduce_scatter")
            self._scatter_input = None

    def finish(self) -> list[Tensor | None]:
        """Waits for the sums. Each has its own storage; None for a gradient that no rank has."""
        groups = self.members[0].groups
        if self._zero is not None:
            self.wait_scattered()
        else:
            self._wait(groups[0])
            groups = groups[1:]
        # The second group sums the first group's result: started in `begin`, it would make backward wait for the first.
        for group in groups:
            self._start(group)
            self._wait(group)
        counts = self.flat[-len(self.members) :]
        return [
            piece.clone() if present or bool(counts[i] > 0) else None
            for i, (piece, present) in enumerate(zip(self._split(), self._present, strict=True))
        ]

    def _split(self) -> list[Tensor]:
        sizes = [torch.Size(member.shape).numel() for member in self.members]
        pieces = torch.split(self.flat, [*sizes, len(sizes)])[:-1]
        return [piece.view(member.shape) for piece, member in zip(pieces, self.members, strict=True)]

    def _start(self, group: str) -> None:
        with collective("all_reduce", group, self.site) as peers:
            self._work = dist.all_reduce(self.flat, group=peers, async_op=True)

    def _wait(self, group: str, name: str = "all_reduce") -> None:
        assert self._work is not None
        with collective(name, group, self.site, begins=False):
            self._work.wait()
        self._work = None


def by_groups(gradients: Iterable[SummedGradient]) -> list[list[SummedGradient]]:
    """The gradients, grouped by the groups that sum them; without gradients that no group sums."""
    grouped: dict[tuple[str, ...], list[SummedGradient]] = {}
    for gradient in gradients:
        scattered = (gradient.zero.group,) if gradient.zero is not None else ("",)
        grouped.setdefault((*scattered, *gradient.groups), []).append(gradient)
    return [members for groups, members in grouped.items() if groups != ("",)]


def require_max_norm(max_norm: float) -> None:
    """Raises `CallError` for NaN, for a negative norm, which would reverse gradients, and for other types."""
    is_number = isinstance(max_norm, SupportsFloat) and not isinstance(max_norm, str)
    if not is_number or not max_norm >= 0:
        help = "`job.clip_grad_norm_(model, 1.0)`; an optimizer goes by name: `optimizer=optimizer`"
        raise wrong_argument(f"max_norm must be a number, at least 0, not {_shown(max_norm)}", help)


def _shown(value: object) -> str:
    return (
        repr(value)
        if value is None or isinstance(value, SupportsFloat | str)
        else f"an object of class {type(value).__name__}"
    )


def gradient_norm(
    gradients: Mapping[str, Tensor],
    sharded_over: Mapping[str, tuple[str, ...]],
    device: torch.device,
    pipeline: str = "",
) -> Tensor:
    """The global norm of all gradients, a scalar, equal on every rank.

    `gradients`: this rank's part of each, a plain tensor. Every parameter counts once: squares are summed only over the
    groups that shard it, and over the group `pipeline`, whose ranks have other parameters.
    """
    by_shards: dict[tuple[str, ...], list[Tensor]] = {}
    for name, groups in sharded_over.items():
        # Every rank calls the collectives of all groups, even without a gradient: other ranks wait for it.
        by_shards.setdefault(groups, []).extend([gradients[name]] if name in gradients else [])
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, parts in sorted(by_shards.items()):
        squares = torch.zeros((), dtype=torch.float32, device=device)
        if parts:
            squares = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).square().sum()
        for group in groups:
            with collective("all_reduce", group, "gradient norm") as peers:
                dist.all_reduce(squares, group=peers)
        total = total + squares
    if pipeline:
        with collective("all_reduce", pipeline, "gradient norm") as peers:
            dist.all_reduce(total, group=peers)
    return total.sqrt()


def scale_to(max_norm: float, norm: Tensor, gradients: Collection[Tensor]) -> None:
    """Scales gradients of the global `norm`, in place, so that it is at most `max_norm`."""
    if gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + EPS)).clamp(max=1.0))


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to the parameter's gradient in place, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
