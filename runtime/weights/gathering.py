"""Gathers the weights of a layer from the parts of ranks, in the compute dtype: one all_gather per group (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.ranks.watch import collective
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.masters import local_part
from moec.runtime.weights.weight_spec import WeightSpec, ZeroPart

# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Snapshot:
    """Parameters at one time. It tells later whether they are the same tensors with the same values.

    It keeps no parameter alive: a new tensor at the address of one that is gone is another one. An in-place change
    changes a version: `load_state_dict` changes the version of the DTensor alone, `job.load` that of the rank's part
    alone; a snapshot has both. Changes by `.data`, by fused optimizers and by `foreach` optimizers on DTensors change
    no version, so a job's optimizers increment it themselves (`runtime/optimizers/optimizer.py`).
    """

    __slots__ = ("_states",)

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._states = [(ref(parameter), _state_of(parameter), _OwnerState(parameter)) for parameter in parameters]

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether `parameters` are these, unchanged."""
        pairs = zip(self._states, parameters, strict=True)
        return all(reference() is p and state == _state_of(p) for (reference, state, _), p in pairs)

    @property
    def has_changed(self) -> bool:
        """Whether one of the tensors that own their memory, and still exist, has changed."""
        return any(owner.has_changed for *_, owner in self._states)


def _state_of(parameter: Tensor) -> tuple[int, int, int]:
    """The address and the version of this rank's part, and the parameter's version."""
    local = local_part(parameter)
    return local.data_ptr(), version_of(local), version_of(parameter)


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights that a step cast and gathered once for all its micro-batches, and their parameters then."""

    parameters: Snapshot
    weights: list[Tensor]
    guests: Guests | None


class _OwnerState:
    """The state of the tensor that owns a parameter's memory: a parametrization may give a view, which is gone soon."""

    __slots__ = ("_owner", "_state")

    def __init__(self, parameter: Tensor) -> None:
        owner = owner_of(parameter)
        self._owner, self._state = ref(owner), _state_of(owner)

    @property
    def has_changed(self) -> bool:
        owner = self._owner()
        return owner is not None and self._state != _state_of(owner)


def owner_of(tensor: Tensor) -> Tensor:
    """The tensor of which this is a view, or the tensor itself."""
    return tensor._base if tensor._base is not None else tensor


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes that autograd has counted."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parts that one all_gather sends: their indices, the flat result `[ranks, elements]`, and the running work."""

    members: Sequence[int]
    flat: Tensor
    work: dist.Work | None
    group: str
    site: str


class Gathering:
    """The weights of a layer while their all_gathers run. `parts` of `parameters` are in the compute dtype.

    `guests` get theirs once the weights are whole.
    """

    def __init__(
        self, specs: Sequence[WeightSpec], parts: Sequence[Tensor], parameters: Snapshot, guests: Guests | None = None
    ) -> None:
        self.parameters, self.guests = parameters, guests
        self._specs, self._parts = specs, parts
        members: dict[tuple[str, torch.dtype], list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.zero is not None:
                members.setdefault((spec.zero.group, parts[index].dtype), []).append(index)
        self._buckets = [self._begin(group, indices) for (group, _), indices in members.items()]

    def _begin(self, group: str, members: list[int]) -> _Bucket:
        first = self._specs[members[0]]
        assert first.zero is not None
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        site = f"weight {first.name}{more}, {first.site}"
        sent = torch.cat([self._parts[index].reshape(-1) for index in members])
        flat = sent.new_empty((first.zero.ranks, sent.numel()))
        with collective("all_gather", group, site) as peers:
            work = all_gather_single(flat.view(-1), sent, group=peers, async_op=True)
        return _Bucket(members, flat, work, group, site)

    def finish(self) -> list[Tensor]:
        """Waits; gives each weight, contiguous. A weight that was not gathered is its part."""
        weights = list(self._parts)
        for bucket in self._buckets:
            if bucket.work is not None:
                with collective("all_gather", bucket.group, bucket.site, begins=False):
                    bucket.work.wait()
            sizes = [self._parts[index].numel() for index in bucket.members]
            for index, pieces in zip(bucket.members, torch.split(bucket.flat, sizes, 1), strict=True):
                zero = self._specs[index].zero
                assert zero is not None
                weights[index] = _joined(pieces, self._parts[index].shape, zero)
        return weights if self.guests is None else self.guests.hosted(weights)


def _joined(pieces: Tensor, shape: torch.Size, zero: ZeroPart) -> Tensor:
    """The whole weight of the flat pieces `[ranks, elements]`, each of `shape`."""
    shaped = pieces.reshape(zero.ranks, *shape)
    return shaped.flatten(0, 1).contiguous() if zero.dim == 0 else torch.cat(shaped.unbind(0), zero.dim)
