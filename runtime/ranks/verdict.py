"""Decides from every rank's position which rank blocks a job. Needs neither torch nor processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

MESSAGE = "message"
"""The name of what one rank sends and another one receives."""


@dataclass(frozen=True, slots=True)
class Place:
    """A collective: its name, its group (empty: all ranks), the group's ranks, and its site.

    `site` is the part of the model or of the step that it serves, such as "layer 3 (mixtral.moe:14:5)".
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    site: str

    def __str__(self) -> str:
        return f"{self.name} over {self.group or 'all ranks'}, {self.site}"

    def key(self) -> str:
        """Identifies the communicator: disjoint groups along one axis have one name, so a rank is in the key. Messages
        between two ranks are counted by their sites."""
        return f"{self.site if self.name == MESSAGE else self.group}@{self.ranks[0]}"


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's position: `inside` the collective `place`, or outside since it left `place` (None: since the start).

    `seconds`: for how long. `counts`: collectives begun per communicator (`Place.key`). `newest`: `place` is the last
    collective that it began; false if it waits for an earlier one.
    """

    inside: bool
    place: Place | None
    seconds: float
    counts: Mapping[str, int] = field(default_factory=dict)
    newest: bool = True


@dataclass(frozen=True, slots=True)
class Departed:
    """A rank that has left the job. `error`: the exception that ended it, empty if none did."""

    error: str = ""


RankState = Position | Departed


def to_json(state: RankState) -> str:
    """The text that ranks exchange."""
    return json.dumps(asdict(state))


def from_json(text: str | bytes) -> RankState:
    """Reads the text of `to_json`. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    data = json.loads(text)
    if "error" in data:
        return Departed(str(data["error"]))
    place = data["place"]
    if place is not None:
        place = Place(place["name"], place["group"], tuple(place["ranks"]), place["site"])
    return Position(bool(data["inside"]), place, float(data["seconds"]), dict(data["counts"]), bool(data["newest"]))


LONGER = "if this is work and no fault, `moec.launch(…, timeout=…)` in seconds waits longer"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`printed`: a rank has printed it, or the exception that ended the rank."""

    text: str
    printed: bool = False


def judge(states: Mapping[int, RankState], world_size: int, *, overdue: bool) -> Verdict | None:
    """The rank that blocks the job, or None if no rank does. Ranks that are not in `states` did not answer.

    If all ranks answered and none left early, a rank is blamed only if a wait is `overdue` or collectives differ.
    """
    for rank, state in sorted(states.items()):
        if isinstance(state, Departed) and state.error:
            printed = state.error.partition(":")[0] != SystemExit.__name__  # Python prints no traceback of `sys.exit`
            return Verdict(f"rank {rank} ended with {state.error}{_waited_for(states, {rank})}", printed)
    different = _different(states)
    if different:
        return Verdict(different)
    silent = {rank for rank in range(world_size) if rank not in states}
    if silent:
        answer = "no longer answers" if len(silent) == 1 else "no longer answer"
        why = "killed, out of memory, stopped, or its machine cut off"
        return Verdict(f"{ranks_text(silent)} {answer} ({why}){_waited_for(states, silent)}")
    departed = {rank for rank, state in states.items() if isinstance(state, Departed)}
    awaited = {rank for rank in departed if _waiting_for(states, {rank}) is not None}
    if awaited:
        calls = "; every rank makes the same calls, as often: none stands under `if job.rank == 0`"
        return Verdict(f"{ranks_text(awaited)} left the job before the others{_waited_for(states, awaited)}{calls}")
    waiting = [(w.seconds, rank) for rank, w in states.items() if isinstance(w, Position) and w.inside]
    if not overdue or not waiting:
        return None
    return Verdict(_blame_for_wait(states, max(waiting)[1]))


def _different(states: Mapping[int, RankState]) -> str:
    """Describes two ranks whose n-th collectives of one communicator differ; empty if there are none."""
    first: dict[tuple[str, int], int] = {}
    for rank, state in sorted(states.items()):
        place = _collective_of(state)
        if place is None or not isinstance(state, Position) or not state.newest:
            continue
        peer = first.setdefault((place.key(), _count(state, place)), rank)
        peer_place = _collective_of(states[peer])
        if peer_place is not None and (peer_place.name, peer_place.site) != (place.name, place.site):
            return f"the ranks make different calls: rank {peer} is in {peer_place}, and rank {rank} in {place}"
    return ""


def _blame_for_wait(states: Mapping[int, RankState], rank: int) -> str:
    """Follows who waits for whom from `rank` on, to a rank outside of collectives, a cycle, or a complete group."""
    path = [rank]
    while True:
        position = states[path[-1]]
        assert isinstance(position, Position)
        assert position.place is not None
        place, count = position.place, _count(position, position.place)
        behind = [r for r in place.ranks if _count(states[r], place) < count]
        if not behind:
            members, waited = ranks_text(place.ranks), f"rank {rank} for {position.seconds:.1f} s"
            return f"{members} are all in {place}, {waited}: it does not finish; {LONGER}"
        outside = [r for r in behind if _collective_of(states[r]) is None]
        if outside:
            return _stalled(states, outside[0], path[-1])
        if behind[0] in path:
            ring = path[path.index(behind[0]) :]
            return "each waits for the next: " + "; ".join(f"rank {r} in {_place_of(states[r])}" for r in ring)
        path.append(behind[0])


def _stalled(states: Mapping[int, RankState], rank: int, waiter: int) -> str:
    state = states[rank]
    assert isinstance(state, Position)
    since = f"since {state.place}" if state.place else "since the job began"
    stalled = f"rank {rank} has stalled: it has been in no collective for {state.seconds:.1f} s, {since}"
    return f"{stalled}; rank {waiter} waits for it in {_place_of(states[waiter])}; {LONGER}"


def _waited_for(states: Mapping[int, RankState], ranks: set[int]) -> str:
    """The end of a message: where another rank waits for one of `ranks`, else the last place of any rank."""
    waiter = _waiting_for(states, ranks)
    if waiter is not None:
        return f"; rank {waiter} waits for {'it' if len(ranks) == 1 else 'them'} in {_place_of(states[waiter])}"
    last = min(((w.seconds, r) for r, w in states.items() if isinstance(w, Position) and w.place), default=None)
    return f"; rank {last[1]} was last in {_place_of(states[last[1]])}" if last else ""


def _waiting_for(states: Mapping[int, RankState], ranks: set[int]) -> int | None:
    """The rank that has waited longest for one of `ranks`."""
    waiting = [
        (state.seconds, rank)
        for rank, state in states.items()
        if isinstance(state, Position) and state.inside and state.place and not ranks.isdisjoint(state.place.ranks)
    ]
    return max(waiting)[1] if waiting else None


def _collective_of(state: RankState) -> Place | None:
    """The collective that a rank is in, or None."""
    return state.place if isinstance(state, Position) and state.inside else None


def _count(state: RankState, place: Place) -> int:
    return state.counts.get(place.key(), 0) if isinstance(state, Position) else 0


def _place_of(state: RankState) -> str:
    assert isinstance(state, Position)
    return str(state.place)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
