"""The norm of gradients of which ranks have other parts: of experts, and of DTensors on several meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moec.runtime.ranks.groups import resolve
from moec.runtime.ranks.watch import collective

Span = str | DeviceMesh
"""The ranks that have the other parts: those of a group, by its name, or of a mesh; none ("") for replicas."""


def canonical(groups: Iterable[str]) -> dict[str, str]:
    """For each name of a group the first name of the same group: layers over the same ranks share one. "" is none."""
    first: dict[ProcessGroup, str] = {}
    return {name: first.setdefault(resolve(name), name) if name else name for name in groups}


def by_span(
    gradients: Iterable[Tensor], groups: Mapping[int, str], first: Iterable[Span] = ()
) -> dict[Span, list[Tensor]]:
    """`gradients` by their spans. `groups`: by the id of a gradient of experts, their group's name.

    The spans `first` come first, also those without a gradient.
    """
    parts: dict[Span, list[Tensor]] = {span: [] for span in first}
    for gradient in gradients:
        mesh: Span = gradient.device_mesh if isinstance(gradient, DTensor) else ""
        parts.setdefault(groups.get(id(gradient), mesh), []).append(gradient)
    return parts


def norms(parts: Mapping[Span, list[Tensor]], local: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Norms whose norm is that of all gradients, each counted once: equal on every rank, in the same order.

    `local` is the norm of this rank's gradients, a scalar. Collectives over the groups and meshes of `parts`.
    """
    span_norms: list[Tensor] = []
    for span, gradients in parts.items():
        norm = local(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        span_norms += _rank_norms(norm, span) if isinstance(span, str) and span else [norm]
    return span_norms


def _rank_norms(norm: Tensor, group: str) -> list[Tensor]:
    """The `norm` of each rank of the group. Not their sum: a maximum, an infinite norm and NaN need no case."""
    with collective("all_gather", group, "gradient norm") as peers:
        rank_norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(peers))]
        dist.all_gather(rank_norms, norm, group=peers)
    return rank_norms
