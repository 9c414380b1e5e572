"""ZeRO 3: autograd saves handles in place of gathered weights, and backward gathers the weights again.

Rajbhandari et al. 2020, "ZeRO", section 5.3: parameters are sent once for forward and once for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moec.runtime.errors import JobError
from moec.runtime.weights.gathering import Gathering, Snapshot


class RegatheredWeights:
    """The weights of one use of a layer, gathered again at their first use in backward.

    That first use starts the gather of `previous`, the use before this one in forward, which backward needs next, and
    drops the weights of the use after this one. `drop` frees the weights; the next use of a handle gathers them again.
    `begin` starts a gather.
    """

    def __init__(
        self,
        begin: Callable[[], Gathering],
        parameters: Sequence[Tensor],
        site: str,
        previous: RegatheredWeights | None,
    ) -> None:
        self._begin, self._site = begin, site
        self._in_forward = Snapshot(parameters)
        self.is_saved = False
        while previous is not None and not previous.is_saved:
            previous = previous._previous  # backward needs none of its weights
        self._previous: RegatheredWeights | None = previous
        self._next: Callable[[], RegatheredWeights | None] = lambda: None
        if previous is not None:
            previous._next = ref(self)  # a weak reference: the graph of the later use holds the earlier ones
        self._prefetched: Gathering | None = None
        self._weights: list[Tensor] | None = None
        self._has_prefetched = False

    def weight(self, index: int) -> Tensor:
        """The gathered weight. Raises `JobError` if a parameter has changed since forward."""
        if self._weights is None:
            if self._in_forward.has_changed:
                raise changed(self._site)
            gathering, self._prefetched = self._prefetched or self._begin(), None
            self._weights = gathering.finish()
            if (next_use := self._next()) is not None:
                next_use.drop()
            if self._previous is not None and not self._has_prefetched:
                self._has_prefetched = True
                self._previous.prefetch()
        return self._weights[index]

    def prefetch(self) -> None:
        """Starts the gather, so that it runs beside the backward pass of the next layer."""
        if self._weights is None and self._prefetched is None:
            self._prefetched = self._begin()

    def drop(self) -> None:
        """Frees the weights."""
        self._weights = self._prefetched = None


def changed(site: str) -> JobError:
    """The error for parameters of the layer `site` that have other values in backward."""
    return JobError(
        "MOE0722",
        f"a parameter of {site} was changed in place after the forward pass, and before its backward",
        "call `backward()` before `optimizer.step()` and before `load_state_dict`",
    )


@dataclass(frozen=True, slots=True)
class _Handle:
    """A view of a gathered weight, as autograd saves it."""

    regathered: RegatheredWeights
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Any other tensor, with its version: autograd does not check versions where saved-tensor hooks are active."""

    tensor: Tensor
    version: int


class Handles:
    """The gathered weights that autograd must not save. No two of them share a storage."""

    def __init__(self) -> None:
        # A weak reference to a storage keeps its address from being used again.
        self._by_storage: dict[int, tuple[StorageWeakRef, RegatheredWeights, int]] = {}

    def add(self, regathered: RegatheredWeights, weights: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Adds the `weights` at `indices`."""
        for index in indices:
            storage = weights[index].untyped_storage()
            self._by_storage[storage._cdata] = (StorageWeakRef(storage), regathered, index)  # type: ignore[no-untyped-call]

    def saved_as_handles(self) -> AbstractContextManager[Any]:
        """Inside the block autograd saves handles of these weights.

        Hooks that are active already, such as those of `torch.utils.checkpoint`, stay in place of handles.
        """
        if not self._by_storage or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _SavedTensor | _Handle:
        gathered = self._by_storage.get(tensor.untyped_storage()._cdata)
        if gathered is None:
            return _SavedTensor(tensor, tensor._version)
        _, regathered, index = gathered
        regathered.is_saved = True
        return _Handle(regathered, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: _SavedTensor | _Handle) -> Tensor:
    if isinstance(saved, _SavedTensor):
        if saved.tensor._version != saved.version:
            shape = f"{saved.tensor.dtype} {list(saved.tensor.shape)}"
            raise RuntimeError(
                f"a tensor that backward needs, {shape}, has been modified by an inplace operation since the forward "
                "pass: call `backward()` before, or change a copy of it"
            )
        return saved.tensor
    return saved.regathered.weight(saved.index).as_strided(saved.size, saved.stride, saved.offset)
