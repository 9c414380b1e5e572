"""Homes that move: experts of a layer change ranks, with all that ranks have of them.

What moves are masters, gradients and the state of every optimizer that has states of them, of a layer and of its
copies: each tensor's dim 0 are the experts of a rank.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from moec.runtime.errors import JobError
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.masters import local_part

if TYPE_CHECKING:
    from moec.runtime.weights.weights import Weights


Rows = list[list[int]]
"""For each rank of the group, slots at home."""


class MovedHomes(Protocol):
    """The homes of a model's experts, and of its copies' (`runtime/placement/model_homes.py`)."""

    @property
    def have_moved(self) -> bool:
        """Whether an expert is not in its first home."""

    def add(self, optimizer: Optimizer) -> None:
        """Moves what this optimizer keeps of experts with them."""

    def restore(self, call: str, complaint: Complaint | None = None) -> None:
        """Moves all experts to their first homes until the next step, for what the script calls."""

    def complaint(self) -> str:
        """Why nothing can move now; empty if experts can."""

    def states(self, parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
        """All that optimizers keep of a parameter, by names for messages."""


class ExpertHomes:
    """The homes of a layer's experts on a rank, which copies of the layer share: their experts move together.

    `indices`: the parameters of experts, in the order of `Weights.specs`.
    """

    def __init__(
        self, weights: Weights, indices: Sequence[int], first: Tensor, rank: int, group: str, model: MovedHomes
    ) -> None:
        self.first = first
        self._slots: Tensor | None = first
        self._indices, self._rank, self._group, self.model = indices, rank, group, model
        self._site = weights.specs[0].site
        self._users = [ref(weights)]
        self._moved_last = WeakKeyDictionary[Any, Sequence[Tensor | None]]()
        """The parameters that the last move has moved, while experts are away. Not by weak references: torch swaps no
        tensor that has one."""
        self._device = self._current_device(torch.device("cpu"))

    @property
    def slots(self) -> Tensor:
        """The expert of each slot at home [ranks, experts of a rank]: one tensor until a move, `first` at home."""
        if self._slots is None:
            words = f"a move of experts of {self._site} was interrupted: nothing says which rank has which one"
            raise JobError("MOE0754", words, "begin the job again, and load the last checkpoint")
        return self._slots

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertHomes:
        return self

    def share(self, weights: Weights) -> None:
        """Moves the experts of a copied layer too, from now on."""
        self._users = [*map(ref, self._alive()), ref(weights)]

    @property
    def have_moved(self) -> bool:
        """Whether an expert is not in its first home."""
        return self.slots is not self.first

    def parameters(self) -> Iterator[Tensor]:
        """The registered ones of experts, of the layer and of its copies."""
        registered = (p for weights in self._alive() for _, p in self._registered(weights))
        return (parameter for parameter in registered if parameter is not None)

    def are(self, slots: Tensor) -> bool:
        """Whether these are the homes."""
        return torch.equal(slots, self.slots)

    def move(self, slots: Tensor) -> None:
        """Makes `slots` the homes. A collective of the group.

        Raises `JobError` on every rank, and moves nothing, if a rank cannot: MOE0754.
        """
        parts, routes = self.require_movable(), _routes(self.slots.numpy(), slots.numpy(), self._rank)
        self._slots = None  # until all have moved
        for part in parts:  # one at a time: their copies are small
            self._move(part, routes)
        self._moved_last.clear()
        self._slots = self.first if torch.equal(slots, self.first) else slots
        for weights in self._alive():
            increment_version(self._of(weights))
            if self.have_moved:
                self._moved_last[weights] = self._of(weights)

    def require_kept(self) -> None:
        """Raises `JobError` if a parameter has been replaced by one that has not moved, while experts are in other
        homes: MOE0754."""
        users = [(weights, self._registered(weights)) for weights in self._alive()] if self.have_moved else []
        for weights, registered in users:  # a copy that was made since: its experts are where the model's are
            self._moved_last.setdefault(weights, [parameter for _, parameter in registered])
        for _, registered in users:
            for place, (name, parameter) in enumerate(registered):
                if all(parameter is not moved[place] for moved in self._moved_last.values()):
                    words = f"{name} of {self._site} has been replaced while experts were in other homes"
                    raise unmovable(f"{words}, and nothing says in which order the new ones are")

    def require_movable(self) -> list[Tensor]:
        """This rank's part of all that moves. A collective; raises MOE0754 on every rank if experts cannot move."""
        for is_last in (False, True):
            complaint, found = self.model.complaint(), _Movable([], [])
            try:
                found = self._movable()
            except _Unmovable as error:
                complaint = complaint or str(error)
            if self._are_alike(complaint, found, must_be=is_last):
                break
            gc.collect()  # a deleted copy in a cycle of references may be left on some ranks
        return found.parts

    @torch.no_grad()
    def _move(self, part: Tensor, routes: _Routes) -> None:
        """Moves the rows of a part: those of other ranks, and those that change their slot here."""
        sends, receives, shifts = routes
        rows = exchange_rows(part, sends, receives, self._group, self._site)
        shifted = part[[old for _, old in shifts]]  # a copy
        for slot, row in zip((slot for of_rank in receives for slot in of_rank), rows, strict=True):
            part[slot].copy_(row)
        for (slot, _), row in zip(shifts, shifted, strict=True):
            part[slot].copy_(row)

    def _current_device(self, last: torch.device) -> torch.device:
        """That of the parameters; the `last` one, where no model is left."""
        every = (p for weights in self._alive() for p in weights.registered().values())
        return next((parameter.device for parameter in every if parameter is not None), last)

    def _alive(self) -> list[Weights]:
        users = (weights for user in self._users if (weights := user()) is not None)
        return [weights for weights in users if weights._owner() is not None]

    def _registered(self, weights: Weights) -> list[tuple[str, Tensor | None]]:
        registered = list(weights.registered().items())
        return [registered[index] for index in self._indices]

    def _of(self, weights: Weights) -> list[nn.Parameter]:
        found = []
        for name, parameter in self._registered(weights):
            if not isinstance(parameter, nn.Parameter):
                raise _Unmovable(f"{name} of {self._site} is computed from others (a parametrization)")
            found.append(parameter)
        return found

    def _movable(self) -> _Movable:
        """What this rank has of experts."""
        parts, single = list[Tensor](), list[str]()
        for weights in self._alive():
            if weights.has_collected:
                raise _Unmovable(f"a step of {self._site} has begun, and not ended")
            for parameter in self._of(weights):
                parts.append(local_part(parameter))
                # One that `clip_grad_norm_` gave to the optimizer is inside of a placeholder (`HandedOver`).
                gradient = getattr(parameter.grad, "gradient", parameter.grad)
                parts += [] if gradient is None else [local_part(gradient)]
                for name, value in self.model.states(parameter):
                    part = self._part_of_state(name, value, parameter)
                    if isinstance(part, Tensor):
                        parts.append(part)
                    else:
                        single.append(f"{name} {part}")
        if len(devices := {str(part.device) for part in parts}) > 1:
            raise _Unmovable(
                f"copies or optimizers of {self._site} are on several devices: {', '.join(sorted(devices))}"
            )
        # An optimizer may share its states with another one, and a copy its parameters with the model.
        return _Movable(list({(part.data_ptr(), part.shape): part for part in parts}.values()), sorted(single))

    def _part_of_state(self, name: str, value: Any, parameter: nn.Parameter) -> Tensor | str:
        """This rank's part of an optimizer's value, if it has one for each expert; else that of all experts, in
        words."""
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        if isinstance(value, Tensor):
            is_cut = not isinstance(value, DTensor) or any(
                isinstance(p, Shard) and p.dim == 0 for p in value.placements
            )
            part, own = local_part(value), self.slots.shape[1]
            if is_cut and part.dim() == parameter.dim() and part.shape[0] == own:
                return part
            if value.numel() == 1:
                return repr(part.item())
        what = f"{type(value).__name__} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise _Unmovable(f"an optimizer keeps `{name}`, a {what}, of experts of {self._site}")

    def _are_alike(self, complaint: str, found: _Movable, *, must_be: bool) -> bool:
        """Whether all ranks have equally much to move, and the same single values. Raises `JobError` on every rank if
        one cannot move it, and if they `must_be` alike and are not."""
        parts, size = found.parts, sum(part[0].nbytes for part in found.parts)
        single = zlib.crc32("\n".join(found.single).encode())
        claims = torch.tensor([int(bool(complaint)), len(parts), -len(parts), size, -size, single, -single])
        self._device = self._current_device(self._device)
        claims = claims.to(self._device)
        with collective("all_reduce", self._group, f"{self._site}: experts that move") as peers:
            dist.all_reduce(claims, dist.ReduceOp.MAX, group=peers)
        failed, most, least, largest, smallest, *singles = claims.tolist()
        if failed:
            raise unmovable(complaint or f"another rank cannot move its experts of {self._site}")
        same = bool(most == -least and largest == -smallest)
        if must_be and same and sum(singles):
            raise unmovable(
                f"an optimizer keeps one value of all experts of {self._site} on a rank, which differs between ranks "
                f"({', '.join(found.single)} on this one)"
            )
        if must_be and not same:
            raise unmovable(
                f"ranks have other copies, gradients or optimizers of {self._site}: {-least} to {most} tensors, of "
                f"{-smallest:,} to {largest:,} bytes an expert"
            )
        return same and not sum(singles)


def exchange_rows(part: Tensor, sends: Rows, receives: Rows, group: str, site: str) -> Tensor:
    """The rows of a part that this rank gets from all ranks, in their order. A collective of the group."""
    # Contiguous, as `got` is: a part may be transposed, or in another memory format.
    sent = part[[row for rows in sends for row in rows]].contiguous()
    got = part.new_empty((sum(map(len, receives)), *part.shape[1:]))
    with collective("all_to_all of experts that move", group, site) as peers:
        dist.all_to_all_single(got, sent, [len(r) for r in receives], [len(r) for r in sends], group=peers)
    return got


class _Movable(NamedTuple):
    """This rank's parts of what moves, and what optimizers keep of all experts together, in words."""

    parts: list[Tensor]
    single: list[str]


class _Routes(NamedTuple):
    """The slots whose experts a rank sends to each rank, those that it fills from each, both in the order of the new
    slots; and the new and the old slot of each expert that stays on the rank and changes its slot."""

    sends: Rows
    receives: Rows
    shifts: list[tuple[int, int]]


def _routes(before: Any, after: Any, here: int) -> _Routes:
    """Those of rank `here`, from the slots at home `before` to those `after` [ranks, experts of a rank]."""
    ranks, own = after.shape
    old = np.argsort(before, axis=None)[after]  # of each new slot, the old one of its expert, counted over all ranks
    source = old // own
    sends = [(old[r][source[r] == here] % own).tolist() if r != here else [] for r in range(ranks)]
    receives = [np.flatnonzero(source[here] == r).tolist() if r != here else [] for r in range(ranks)]
    stays = [(new, int(old[here][new]) % own) for new in np.flatnonzero(source[here] == here).tolist()]
    return _Routes(sends, receives, [(new, slot) for new, slot in stays if new != slot])


class _Unmovable(Exception):
    """Why this rank cannot move its experts."""


def unmovable(words: str) -> JobError:
    """The error for experts that cannot change ranks, for the reason `words`."""
    help = (
        "copy models and make optimizers on every rank alike, with states of as many dims as the parameter and one row "
        "for each expert; load or copy an optimizer's state and replace parameters after `job.restore_homes`; or leave "
        "`greedy` out of `placement`"
    )
    return JobError("MOE0754", words, help)
