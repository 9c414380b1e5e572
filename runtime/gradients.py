"""Summing gradients over the ranks, during backward.

The one rule: the loss is already over the global number of labels, so every reduction is a sum, over exactly the
groups that the plan names for the parameter (`ParameterData.sum_over`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from moec.runtime.watch import collective

BUCKET_BYTES = 25 * 1024 * 1024
"""Gradients reduced together: DDP's default (Li et al. 2020, section 3.2.3)."""


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients travel together, and where they are on the way."""

    parameters: Sequence[nn.Parameter]
    groups: tuple[str, ...]
    site: str
    missing: int = 0
    flat: Tensor | None = None
    running: tuple[str, dist.Work] | None = None

    def begin(self, group: str) -> None:
        """Starts the sum over a group, of what `fill` put together and other groups have summed."""
        self.wait()
        with collective("all_reduce", group, self.site) as peers:
            work = dist.all_reduce(self.flat, group=peers, async_op=True)
        assert work is not None
        self.running = group, work

    def fill(self) -> None:
        """Puts the gradients together; one that this backward pass did not reach is zeros."""
        with torch.no_grad():
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            self.flat = torch.cat([piece.reshape(-1) for piece in pieces])

    def wait(self) -> None:
        """Until what was begun is done."""
        if self.running is not None:
            group, work = self.running
            with collective("all_reduce", group, self.site, begins=False):
                work.wait()
            self.running = None


class GradientSum:
    """Sums the gradients of a module's parameters as backward produces them, bucket by bucket, in one fixed order.

    Works for `loss.backward()` however it is called: gradients that stood before (accumulation) are set aside when
    backward begins and added again when it ends, so that nothing is summed twice.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sum_over: Mapping[str, tuple[str, ...]],
        sites: Mapping[str, str],
    ) -> None:
        """All by full name. `sites`: what of the model uses the parameter, in words."""
        summed = {name: groups for name, groups in sum_over.items() if groups}
        self._buckets = _buckets(parameters, summed, sites)
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
        bucket.fill()
        bucket.begin(bucket.groups[0])

    def _finish(self) -> None:
        # A parameter that this pass did not reach still takes part: the others' ranks wait for it.
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        # Only now what must wait for a first group: in the middle of backward it would wait for other ranks' backward.
        for bucket in self._buckets:
            for group in bucket.groups[1:]:
                bucket.begin(group)
        for bucket in self._buckets:
            bucket.wait()
            assert bucket.flat is not None
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, torch.split(bucket.flat, sizes), strict=True):
                parameter.grad = piece.view_as(parameter)
            bucket.flat = None
        for parameter, held in self._held:
            assert parameter.grad is not None
            parameter.grad += held
        self._held, self._running = [], False


def _buckets(
    parameters: Mapping[str, nn.Parameter], sum_over: Mapping[str, tuple[str, ...]], sites: Mapping[str, str]
) -> list[_Bucket]:
    """Backward reaches the last parameters first, so buckets fill from the end, and are launched as they fill."""
    filled: list[tuple[list[str], tuple[str, ...]]] = []
    filling: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
    for name, groups in reversed(list(sum_over.items())):
        dtype = parameters[name].dtype
        together = filling.setdefault((groups, dtype), [])
        together.append(name)
        if sum(parameters[n].numel() for n in together) * dtype.itemsize >= BUCKET_BYTES:
            filled.append((filling.pop((groups, dtype)), groups))
    filled += [(together, groups) for (groups, _), together in filling.items()]
    return [_Bucket([parameters[n] for n in names], groups, _site(names, sites)) for names, groups in filled]


def _site(names: Sequence[str], sites: Mapping[str, str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"gradient of {names[0]}{more}, {sites[names[0]]}"


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
            with collective("all_reduce", group, "gradient norm") as peers:
                dist.all_reduce(squares, group=peers)
        total = total + squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in by_groups.values():
        torch._foreach_mul_(gradients, scale)
    return norm
