"""Summing gradients over the ranks, during backward.

The one rule: the loss is already over the global number of labels, so every reduction is a sum, over exactly the
groups that the plan names for the parameter (`ParameterData.sum_over`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from moec.runtime.groups import resolve

BUCKET_BYTES = 25 * 1024 * 1024
"""Gradients reduced together: DDP's default (Li et al. 2020, section 3.2.3)."""


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients travel together, and where they are on the way."""

    parameters: Sequence[nn.Parameter]
    groups: tuple[str, ...]
    missing: int = 0
    flat: Tensor | None = None
    works: list[dist.Work] = field(default_factory=list)


class GradientSum:
    """Sums the gradients of a module's parameters as backward produces them, bucket by bucket, in one fixed order.

    Works for `loss.backward()` however it is called: gradients that stood before (accumulation) are set aside when
    backward begins and added again when it ends, so that nothing is summed twice.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sum_over: Mapping[str, tuple[str, ...]]) -> None:
        self._buckets = _buckets([(parameters[name], groups) for name, groups in sum_over.items() if groups])
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._running = False
        self._next = 0
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))  # type: ignore[no-untyped-call]

    def watch(self, *outputs: Tensor | None) -> None:
        """Prepares for a backward pass through any of `outputs`."""
        for output in outputs:
            if output is not None and output.requires_grad and self._buckets:
                output.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        if self._running:
            return
        self._running, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            for parameter in bucket.parameters:
                if parameter.grad is not None:
                    self._held.append((parameter, parameter.grad))
                    parameter.grad = None
        # The engine calls back when this backward pass has produced its last gradient.
        Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, bucket: _Bucket) -> None:
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        with torch.no_grad():
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
            bucket.flat = torch.cat([piece.reshape(-1) for piece in pieces])
        for index, group in enumerate(bucket.groups):
            if index:
                bucket.works.pop().wait()
            work = dist.all_reduce(bucket.flat, group=resolve(group), async_op=True)
            assert work is not None
            bucket.works.append(work)

    def _finish(self) -> None:
        # A parameter that this pass did not reach still takes part: the others' ranks wait for it.
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:
            for work in bucket.works:
                work.wait()
            assert bucket.flat is not None
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, torch.split(bucket.flat, sizes), strict=True):
                parameter.grad = piece.view_as(parameter)
            bucket.flat, bucket.works = None, []
        for parameter, held in self._held:
            assert parameter.grad is not None
            parameter.grad += held
        self._held, self._running = [], False


def _buckets(parameters: Sequence[tuple[nn.Parameter, tuple[str, ...]]]) -> list[_Bucket]:
    """Backward reaches the last parameters first, so buckets fill from the end, and are launched as they fill."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
    for parameter, groups in reversed(parameters):
        together = filling.setdefault((groups, parameter.dtype), [])
        together.append(parameter)
        if sum(p.numel() for p in together) * parameter.element_size() >= BUCKET_BYTES:
            buckets.append(_Bucket(filling.pop((groups, parameter.dtype)), groups))
    buckets += [_Bucket(together, groups) for (groups, _), together in filling.items()]
    return buckets


def clip_gradient_norm(
    parameters: Mapping[str, nn.Parameter], sharded_over: Mapping[str, tuple[str, ...]], max_norm: float
) -> Tensor:
    """Scales every gradient so that their global norm is at most `max_norm`; gives the norm before, a scalar.

    Every parameter counts once across the meshes: squares are summed over the groups on which it is sharded, and over
    no other. Raises nothing; a norm that is not finite scales by it, as `torch.nn.utils.clip_grad_norm_` does.
    """
    by_groups: dict[tuple[str, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            by_groups.setdefault(sharded_over[name], []).append(parameter.grad)
    total = torch.zeros((), device=next(iter(parameters.values())).device)
    for groups, gradients in sorted(by_groups.items()):
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        squares = norms.square().sum()
        for group in groups:
            dist.all_reduce(squares, group=resolve(group))
        total = total + squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in by_groups.values():
        torch._foreach_mul_(gradients, scale)
    return norm
