"""Compares replicas: ranks with the same part of a parameter must have the same bits of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.ranks.fingerprint import INT_DTYPES
from moec.runtime.ranks.verdict import ranks_text
from moec.runtime.ranks.watch import collective

CHUNK = 1 << 20
"""Elements hashed at a time: the int64 copies take 16 MiB."""
MAX_NAMED = 5
"""Parameters that a message names; the others are counted."""

Hash = tuple[int, int]


def bit_hash(tensor: Tensor) -> Tensor:
    """Two sums over the bit patterns, int64 `[2]` on the tensor's device: plain, and weighted by position from 1.

    Both wrap around. One changed bit changes the first sum. NaNs and signed zeros count as their bits.
    """
    bits = tensor.detach().contiguous().view(-1).view(INT_DTYPES[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        sums += torch.stack((part.sum(), (part * places).sum()))
    return sums


def check_replicas(plan: Plan, tensors: Mapping[str, Tensor], group: str) -> None:
    """Compares hashes of parameters and states, in one all_gather over `group`, all ranks' for CPU tensors: 16 bytes
    of each of the plan's.

    A collective: every rank must call it, with the `tensors` of its stages. Raises `JobError` on every rank.
    """
    if plan.world_size == 1 or not tensors:
        return
    absent = next(iter(tensors.values())).new_zeros(2, dtype=torch.int64)
    names = [*plan.parameters, *plan.states]
    local_hashes = torch.stack([bit_hash(tensors[name]) if name in tensors else absent for name in names]).cpu()
    hashes_of_ranks = [torch.empty_like(local_hashes) for _ in range(plan.world_size)]
    with collective("all_gather", group, "comparing replicas") as peers:
        dist.all_gather(hashes_of_ranks, local_hashes, group=peers)
    by_rank = torch.stack(hashes_of_ranks).tolist()
    require_equal(plan, {name: [(*hashes[place],) for hashes in by_rank] for place, name in enumerate(names)})


def require_equal(plan: Plan, hashes: Mapping[str, Sequence[Hash]]) -> None:
    """Raises `JobError` if ranks with the same part of a parameter differ in their hash; one hash per rank.

    Ranks of stages without the parameter are not compared.
    """
    differing = []
    elsewhere = {first: plan.elsewhere(first) for first in range(0, plan.world_size, plan.stage_size)}
    for name, rank_hashes in hashes.items():
        firsts = [first for first, names in elsewhere.items() if name not in names]
        parts = ([first + rank for first in firsts for rank in ranks] for ranks in replicas(plan, name))
        drifts = (_drift({rank: rank_hashes[rank] for rank in ranks}) for ranks in parts)
        if drift := "; ".join(filter(None, drifts)):
            differing.append(f"{name}: {drift}")
    if differing:
        more = f"; and {len(differing) - MAX_NAMED} more parameters" if len(differing) > MAX_NAMED else ""
        raise JobError("MOE0704", "; ".join(differing[:MAX_NAMED]) + more)


def replicas(plan: Plan, name: str) -> list[list[int]]:
    """The ranks, in a stage, of each part of parameter `name`; all ranks have each state whole."""
    if name in plan.states:
        return [list(range(plan.stage_size))]
    data = plan.parameters[name]
    mesh = plan.meshes[data.mesh]
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.ranks):
        part = tuple(s.start for s in data.cells(mesh, rank))
        parts.setdefault(part, []).append(rank)
    return list(parts.values())


def _drift(hashes: Mapping[int, Hash]) -> str:
    """Describes the difference between ranks whose hashes should be equal; empty if they are."""
    ranks_by_hash: dict[Hash, list[int]] = {}
    for rank, value in hashes.items():
        ranks_by_hash.setdefault(value, []).append(rank)
    if len(ranks_by_hash) == 1:
        return ""
    majority, *minorities = sorted(ranks_by_hash.values(), key=len, reverse=True)
    if len(majority) == len(minorities[0]):
        return " and ".join(ranks_text(ranks) for ranks in ranks_by_hash.values()) + " differ from each other"
    odd = sorted(rank for ranks in minorities for rank in ranks)
    return f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from {ranks_text(majority)}"
