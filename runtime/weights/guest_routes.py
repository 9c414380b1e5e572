"""The way of guests' weights to their ranks, and of their gradients home.

Of an expert with several guests each guest's rank gets a part and passes it on to the others (a scatter and an
all-gather): its home sends it once, and as many bytes travel. Gradients take the same way back: each guest's rank adds
up one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.guests.choice import DIRECT
from moec.runtime.ranks.watch import collective


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """An expert with guests: the rank of its home, its place there, and the slots of its guests by their ranks."""

    home: int
    place: int
    slots: Mapping[int, int]

    @property
    def is_passed_on(self) -> bool:
        """Whether its guests' ranks send parts to each other."""
        return len(self.slots) > DIRECT

    def part(self, rank: int, elements: int) -> slice:
        """What of so many elements a guest's rank gets from the home."""
        if not self.is_passed_on:
            return slice(0, elements)
        number, ranks = list(self.slots).index(rank), len(self.slots)
        return slice(elements * number // ranks, elements * (number + 1) // ranks)


class Letter(NamedTuple):
    """What this rank sends to a peer, or gets from it: the part of an expert that belongs to the guest's rank `of`."""

    peer: int
    expert: Hosted
    of: int


Mail = list[tuple[Letter, Tensor]]
"""Letters in the order of peers, and the elements of each."""


class Routes:
    """What one rank of a group sends and gets. `slots` [ranks, slots of a rank]: the expert of each slot, −1 for none,
    the `own` ones of each rank first."""

    def __init__(self, slots: Any, own: int, rank: int, group: str, site: str) -> None:
        self._rank, self._ranks, self._group, self._site = rank, len(slots), group, site
        experts = _hosted(slots, own)
        self.here = [expert for expert in experts if rank in expert.slots]
        at_home = [expert for expert in experts if expert.home == rank]
        shared = (expert for expert in self.here if expert.is_passed_on)
        passed = [(expert, peer) for expert in shared for peer in expert.slots if peer != rank]
        self._from_home = [Letter(peer, expert, peer) for expert in at_home for peer in expert.slots]
        self._to_guest = [Letter(expert.home, expert, rank) for expert in self.here]
        self._given_on = [Letter(peer, expert, rank) for expert, peer in passed]
        self._got_on = [Letter(peer, expert, peer) for expert, peer in passed]
        self._passes_on = any(expert.is_passed_on for expert in experts)

    def to_guests(self, weights: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Fills the slots of the guests here. Dim 0 of `weights` are the experts at home here, that of `slots` all
        slots here. A collective of the group."""
        parts = self._sent(self._from_home, self._to_guest, weights, lambda letter: letter.expert.place)
        if self._passes_on:
            own = {letter.expert: part for letter, part in parts}
            parts += self._sent(self._given_on, self._got_on, weights, lambda letter: own[letter.expert])
        for (_, expert, of), part in parts:
            for view, values in _along(slots, expert.slots[self._rank], expert.part(of, _elements(slots)), part):
                view.copy_(values)

    def to_homes(self, gradients: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Adds gradients of guests to those of their homes. Dim 0 of `gradients` are all slots
        here, that of `own` the experts at home here. A collective of the group."""
        sums = self._sums(gradients) if self._passes_on else {}
        parts = self._sent(
            self._to_guest,
            self._from_home,
            gradients,
            lambda letter: sums.get(letter.expert, letter.expert.slots[self._rank]),
        )
        for (_, expert, of), part in parts:
            for view, values in _along(own, expert.place, expert.part(of, _elements(own)), part):
                view.add_(values)

    def _sums(self, gradients: Sequence[Tensor]) -> dict[Hosted, Tensor]:
        """This rank's part of each expert that is passed on, added up over its guests in the order of ranks. A
        collective."""
        got = self._sent(self._got_on, self._given_on, gradients, lambda letter: letter.expert.slots[self._rank])
        of_peers = {(letter.expert, letter.peer): part for letter, part in got}
        sums = dict[Hosted, Tensor]()
        for expert in (expert for expert in self.here if expert.is_passed_on):
            part, slot = expert.part(self._rank, _elements(gradients)), expert.slots[self._rank]
            own = gradients[0].new_empty(part.stop - part.start)
            for view, values in _along(gradients, slot, part, own):
                values.copy_(view)
            total, *others = (own if rank == self._rank else of_peers[expert, rank] for rank in expert.slots)
            for other in others:
                total += other
            sums[expert] = total
        return sums

    def _sent(
        self,
        out: Sequence[Letter],
        into: Sequence[Letter],
        tensors: Sequence[Tensor],
        content: Callable[[Letter], Tensor | int],
    ) -> Mail:
        """Sends a part of each expert of `out`, and gets those of `into`. `content`: the elements to send, or where in
        dim 0 of `tensors` they are."""
        elements = _elements(tensors)
        sent, to = _by_peers(out, elements, self._ranks)
        expected, of = _by_peers(into, elements, self._ranks)
        flat, got = tensors[0].new_empty(sum(to)), tensors[0].new_empty(sum(of))
        for letter, values in _cut(sent, flat, elements):
            found = content(letter)
            if isinstance(found, Tensor):
                values.copy_(found)
            else:
                for view, piece in _along(tensors, found, letter.expert.part(letter.of, elements), values):
                    piece.copy_(view)
        with collective("all_to_all of guests", self._group, self._site) as peers:
            dist.all_to_all_single(got, flat, of, to, group=peers)
        return list(_cut(expected, got, elements))


def _hosted(slots: Any, own: int) -> list[Hosted]:
    """The experts with guests, in order."""
    guests = dict[int, dict[int, int]]()
    for rank, slot in np.argwhere(slots[:, own:] >= 0).tolist():
        guests.setdefault(int(slots[rank, own + slot]), {})[rank] = own + slot
    homes = np.argsort(slots[:, :own], axis=None)
    return [Hosted(*divmod(int(homes[expert]), own), of_ranks) for expert, of_ranks in sorted(guests.items())]


def _by_peers(letters: Sequence[Letter], elements: int, ranks: int) -> tuple[list[Letter], list[int]]:
    """The letters in the order of peers, and the elements for each peer."""
    sizes = [0] * ranks
    for letter in letters:
        sizes[letter.peer] += _size(letter, elements)
    return sorted(letters, key=lambda letter: letter.peer), sizes


def _cut(letters: Sequence[Letter], flat: Tensor, elements: int) -> Iterator[tuple[Letter, Tensor]]:
    return zip(letters, torch.split(flat, [_size(letter, elements) for letter in letters]), strict=True)


def _size(letter: Letter, elements: int) -> int:
    part = letter.expert.part(letter.of, elements)
    return int(part.stop - part.start)


def _elements(tensors: Sequence[Tensor]) -> int:
    """Those of one expert."""
    return sum(tensor[0].numel() for tensor in tensors)


def _along(tensors: Sequence[Tensor], index: int, part: slice, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views that are equally long: of a part of expert `index` of these tensors, behind each other, and of its
    `values`."""
    begin = 0
    for tensor in tensors:
        flat = tensor[index].view(-1)
        first, last = max(part.start, begin), min(part.stop, begin + len(flat))
        if first < last:
            yield flat[first - begin : last - begin], values[first - part.start : last - part.start]
        begin += len(flat)
