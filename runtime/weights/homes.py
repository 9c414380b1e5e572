"""Homes that move: experts of a layer change ranks, with all that ranks have of them.

What moves are masters, gradients and the state of every optimizer that has states of them, of a layer and of its
copies: each tensor's dim 0 are the experts of a rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from moec.runtime.errors import JobError
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.movable import CannotMove, Movable, unmovable

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
        """All that optimizers keep of a parameter, by names, in an order that all ranks share."""


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
        self._moved = WeakKeyDictionary[Any, list[tuple[int, Tensor | None]]]()
        """While experts are away: the parameters whose rows are in the order of `slots`, with their places in
        `indices`. Not by weak references: torch swaps no tensor that has one."""
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

    def share(self, weights: Weights, original: Weights, memo: dict[int, Any]) -> None:
        """Moves the experts of a copied layer too, from now on. `memo`: that of the copy of `original`, by which the
        copies of its parameters are those that the copied layer gets."""
        self._users = [*map(ref, self._alive()), ref(weights)]
        if self._moved:
            registered = enumerate(parameter for _, parameter in self._registered(original))
            moved = [(place, parameter) for place, parameter in registered if self._has_moved(place, parameter)]
            self._moved[weights] = [(place, deepcopy(parameter, memo)) for place, parameter in moved]

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
        self._moved.clear()
        self._slots = self.first if torch.equal(slots, self.first) else slots
        for weights in self._alive():
            parameters = [parameter for _, parameter in self._of(weights)]
            increment_version(parameters)
            if self.have_moved:
                self._moved[weights] = list(enumerate(parameters))

    def require_kept(self) -> None:
        """Raises `JobError` if a parameter has been replaced by one that has not moved, while experts are in other
        homes: MOE0754. One that was a copy's has; it is known from then on, also when the copy is gone."""
        if not self.have_moved:
            return
        users = [(weights, list(enumerate(self._registered(weights)))) for weights in self._alive()]
        for _, registered in users:
            for place, (name, parameter) in registered:
                if not self._has_moved(place, parameter):
                    words = f"{name} of {self._site} has been replaced while experts were in other homes"
                    raise unmovable(f"{words}, and nothing says in which order the new ones are")
        for weights, registered in users:
            self._moved[weights] = [(place, parameter) for place, (_, parameter) in registered]

    def _has_moved(self, place: int, parameter: Tensor | None) -> bool:
        return any(place == at and parameter is moved for of in self._moved.values() for at, moved in of)

    def require_movable(self) -> list[Tensor]:
        """This rank's part of all that moves. A collective; raises MOE0754 on every rank if experts cannot move."""
        for is_last in (False, True):
            complaint, found = self.model.complaint(), Movable(self._site, self.slots.shape[1])
            try:
                self._add_to(found)
            except CannotMove as error:
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

    def _of(self, weights: Weights) -> list[tuple[str, nn.Parameter]]:
        """The parameters of experts by their names. Raises `CannotMove`."""
        found = []
        for name, parameter in self._registered(weights):
            if not isinstance(parameter, nn.Parameter):
                raise CannotMove(f"{name} of {self._site} is computed from others (a parametrization)")
            found.append((name, parameter))
        return found

    def _add_to(self, found: Movable) -> None:
        """Adds what this rank has of experts. Raises `CannotMove`."""
        for weights in self._alive():
            if weights.has_collected:
                raise CannotMove(f"a step of {self._site} has begun, and not ended")
            for name, parameter in self._of(weights):
                found.add(name, parameter)
                # One that `clip_grad_norm_` gave to the optimizer is inside of a placeholder (`HandedOver`).
                gradient = getattr(parameter.grad, "gradient", parameter.grad)
                if gradient is not None:
                    found.add(f"{name}.grad", gradient)
                for state, value in self.model.states(parameter):
                    found.add_state(state, value, parameter)
        found.require_apart()

    def _are_alike(self, complaint: str, found: Movable, *, must_be: bool) -> bool:
        """Whether all ranks have the same to move, and the same single values. Raises `JobError` on every rank if one
        cannot move it, and if they `must_be` alike and are not."""
        numbers = [len(found.parts), found.expert_bytes, *found.sums()]
        claims = torch.tensor([*numbers, *(-number for number in numbers), int(bool(complaint))])
        self._device = self._current_device(self._device)
        claims = claims.to(self._device)
        with collective("all_reduce", self._group, f"{self._site}: experts that move") as peers:
            dist.all_reduce(claims, dist.ReduceOp.MAX, group=peers)
        *both, failed = claims.tolist()
        if failed:
            raise unmovable(complaint or f"another rank cannot move its experts of {self._site}")
        most, least = both[:4], [-number for number in both[4:]]
        if most == least or not must_be:
            return bool(most == least)
        if most[:2] != least[:2]:
            words = (
                f"ranks have other copies, gradients or optimizers of {self._site}: {least[0]} to {most[0]} tensors, "
                f"of {least[1]:,} to {most[1]:,} bytes an expert"
            )
        elif most[2] != least[2]:
            words = f"ranks have other tensors of experts of {self._site} ({', '.join(found.names)} on this one)"
        else:
            words = (
                f"an optimizer keeps one value of all experts of {self._site} on a rank, which differs between ranks "
                f"({', '.join(found.single)} on this one)"
            )
        raise unmovable(words)


def exchange_rows(part: Tensor, sends: Rows, receives: Rows, group: str, site: str) -> Tensor:
    """The rows of a part that this rank gets from all ranks, in their order. A collective of the group."""
    # Contiguous, as `got` is: a part may be transposed, or in another memory format. Every backend sends bytes.
    sent = part[[row for rows in sends for row in rows]].contiguous()
    got = part.new_empty((sum(map(len, receives)), *part.shape[1:]))
    to, of = ([len(rows) * part[0].nbytes for rows in by_rank] for by_rank in (sends, receives))
    with collective("all_to_all of experts that move", group, site) as peers:
        dist.all_to_all_single(got.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), of, to, group=peers)
    return got


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
