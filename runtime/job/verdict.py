"""Decides from every rank's position which rank blocks a job, in one sentence. Needs no torch, and no process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """A collective: its name, its group (empty: all ranks), the members, and what of the model it serves.

    `site` is as `codegen.fx` writes it, "layer 3 (mixtral.moe:14:5)", or what of the training step it is.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    site: str

    def __str__(self) -> str:
        return f"{self.name} over {self.group or 'all ranks'}, {self.site}"

    def key(self) -> str:
        """The communicator: groups along one axis share a name, and no rank."""
        return f"{self.group}@{self.ranks[0]}"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: `inside` a collective, or outside of any since it left the `place` (None: it was in none yet).

    `seconds`: since when. `counts`: how many collectives of each communicator it has begun (`Place.key`). `newest`: it
    is in the last of these, and does not wait for one that was begun earlier.
    """

    inside: bool
    place: Place | None
    seconds: float
    counts: Mapping[str, int] = field(default_factory=dict)
    newest: bool = True


@dataclass(frozen=True, slots=True)
class Left:
    """A rank that has left the job; `error`: with which exception, and empty if as it should."""

    error: str = ""


Word = Position | Left


def to_json(word: Word) -> str:
    """As ranks send it to each other."""
    return json.dumps(asdict(word))


def from_json(text: str | bytes) -> Word:
    """What `to_json` wrote. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    data = json.loads(text)
    if "error" in data:
        return Left(str(data["error"]))
    place = data["place"]
    if place is not None:
        place = Place(place["name"], place["group"], tuple(place["ranks"]), place["site"])
    return Position(bool(data["inside"]), place, float(data["seconds"]), dict(data["counts"]), bool(data["newest"]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """`said`: a rank ended by an exception, and has printed it itself."""

    text: str
    said: bool = False


def judge(words: Mapping[int, Word], world_size: int, *, overdue: bool) -> Verdict | None:
    """The rank that blocks the job, or None if no rank does. A rank that is not in `words` did not answer.

    If all ranks answered and none left early, a rank is blamed only if a wait is `overdue` or collectives differ.
    """
    for rank, word in sorted(words.items()):
        if isinstance(word, Left) and word.error:
            return Verdict(f"rank {rank} ended with {word.error}{_waited_for(words, {rank})}", said=True)
    different = _different(words)
    if different:
        return Verdict(different)
    silent = {rank for rank in range(world_size) if rank not in words}
    if silent:
        answer = "no longer answers" if len(silent) == 1 else "no longer answer"
        why = "killed, out of memory, stopped, or its machine cut off"
        return Verdict(f"{_ranks(silent)} {answer} ({why}){_waited_for(words, silent)}")
    left = {rank for rank, word in words.items() if isinstance(word, Left)}
    awaited = {rank for rank in left if _waiting_for(words, {rank}) is not None}
    if awaited:
        return Verdict(f"{_ranks(awaited)} left the job before the others{_waited_for(words, awaited)}")
    waiting = [(w.seconds, rank) for rank, w in words.items() if isinstance(w, Position) and w.inside]
    if not overdue or not waiting:
        return None
    return Verdict(_follow(words, max(waiting)[1]))


def _different(words: Mapping[int, Word]) -> str:
    """Describes two ranks whose n-th collectives of one communicator differ; empty if there are none."""
    first: dict[tuple[str, int], int] = {}
    for rank, word in sorted(words.items()):
        place = _where(word)
        if place is None or not isinstance(word, Position) or not word.newest:
            continue
        other = first.setdefault((place.key(), _count(word, place)), rank)
        there = _where(words[other])
        if there is not None and (there.name, there.site) != (place.name, place.site):
            return f"the ranks do not do the same: rank {other} is in {there}, and rank {rank} in {place}"
    return ""


def _follow(words: Mapping[int, Word], rank: int) -> str:
    """Goes from a waiting rank to one that it waits for, until that is in no collective, repeats, or there is none."""
    path = [rank]
    while True:
        here = words[path[-1]]
        assert isinstance(here, Position)
        assert here.place is not None
        behind = [r for r in here.place.ranks if _count(words[r], here.place) < _count(here, here.place)]
        if not behind:
            members = _ranks(set(here.place.ranks))
            return f"{members} are all in {here.place}, rank {rank} for {here.seconds:.1f} s: it does not get through"
        outside = [r for r in behind if _where(words[r]) is None]
        if outside:
            return _outside(words, outside[0], path[-1])
        if behind[0] in path:
            ring = path[path.index(behind[0]) :]
            return "each waits for the next: " + "; ".join(f"rank {r} in {_place(words[r])}" for r in ring)
        path.append(behind[0])


def _outside(words: Mapping[int, Word], rank: int, waiter: int) -> str:
    word = words[rank]
    assert isinstance(word, Position)
    since = f"since {word.place}" if word.place else "since the job began"
    stalled = f"rank {rank} has stalled: it has been in no collective for {word.seconds:.1f} s, {since}"
    return f"{stalled}; rank {waiter} waits for it in {_place(words[waiter])}"


def _waited_for(words: Mapping[int, Word], ranks: set[int]) -> str:
    """The end of a sentence: where another rank waits for one of `ranks`, else where a rank was last."""
    waiter = _waiting_for(words, ranks)
    if waiter is not None:
        return f"; rank {waiter} waits for {'it' if len(ranks) == 1 else 'them'} in {_place(words[waiter])}"
    last = min(((w.seconds, r) for r, w in words.items() if isinstance(w, Position) and w.place), default=None)
    return f"; rank {last[1]} was last in {_place(words[last[1]])}" if last else ""


def _waiting_for(words: Mapping[int, Word], ranks: set[int]) -> int | None:
    """The rank that has waited longest for one of `ranks`: the others have come further since."""
    waiting = [
        (word.seconds, rank)
        for rank, word in words.items()
        if isinstance(word, Position) and word.inside and word.place and not ranks.isdisjoint(word.place.ranks)
    ]
    return max(waiting)[1] if waiting else None


def _where(word: Word) -> Place | None:
    """The collective that a rank is in."""
    return word.place if isinstance(word, Position) and word.inside else None


def _count(word: Word, place: Place) -> int:
    return word.counts.get(place.key(), 0) if isinstance(word, Position) else 0


def _place(word: Word) -> str:
    assert isinstance(word, Position)
    return str(word.place)


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
