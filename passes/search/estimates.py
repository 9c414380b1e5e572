"""The estimated time and memory of every candidate of a table, with each ZeRO stage, recomputation and schedule.

The time of a pipeline is that of its slowest rank, and the share of a bubble that its schedule leaves; memory is what
stays, what micro-batches under way keep, and the larger of two moments of a layer. The prediction of a placed plan
follows its orders instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.groups import outermost_between
from moec.passes.cost.liveness import Run, Step, steps_of
from moec.passes.cost.memory import DEVICE_BYTES
from moec.passes.cost.pass_time import BlockWork
from moec.passes.cost.rates import Rates
from moec.passes.cost.seconds import EXPOSED
from moec.passes.cost.totals import runs_of
from moec.passes.degrees.schedules import Pipeline
from moec.passes.ir import Recompute
from moec.passes.ir.interface import is_forward
from moec.passes.ir.work.arrays import larger
from moec.passes.search.held import Held, held, parts
from moec.passes.search.space import STAGES, Pipelined, Sizes, Space
from moec.passes.search.tables import Shares, Table
from moec.passes.search.waiting import Waiting, worst_of

Array = Any
Steps = Mapping[str, Sequence[Step]]
"""The ops of each layer's block."""

QUEUES = frozenset({"zero_bubble", "zero_bubble_v", "dual_pipe_v"})
"""The schedules that put products of weights off, and keep what these need."""

BUBBLES: Mapping[str, float] = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6, "dual_pipe_v": 1 / 6}
"""The bubble of a schedule over that of 1F1B, where all parts of a stage's passes take equally long."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Candidates of one table with one ZeRO stage and recomputation: rows of the table, each with a schedule."""

    table: Table
    zero: int
    recompute: Recompute
    rows: Array
    pipelined: Sequence[Pipelined]
    seconds: Array
    memory: Array


@dataclass(frozen=True, slots=True)
class _Turns:
    """Rows of a table, each with every schedule that takes it."""

    rows: Array
    pipelined: Sequence[Pipelined]
    virtual: Array
    bubble: Array
    backward: Sequence[tuple[Array, Array]]
    loss: Sequence[tuple[Array, Array]]
    """The micro-batches that are kept and that are queued at the worst moments."""

    @classmethod
    def of(cls, space: Space, sizes: Array) -> _Turns:
        sequences = space.sequences(Sizes(*sizes.T))
        kinds, where = np.unique(np.stack([sizes[:, 0], sequences, sizes[:, 5]], 1), axis=0, return_inverse=True)
        of_kinds = [
            [(each, Pipeline(pp, each.virtual, parts)) for each in space.pipelined(pp, of_rank, parts)]
            for pp, of_rank, parts in kinds.tolist()
        ]
        every = [pair for of_kind in of_kinds for pair in of_kind]
        firsts = np.cumsum([0, *map(len, of_kinds)])
        where = where.reshape(-1)
        number = np.diff(firsts)[where]
        rows = np.repeat(np.arange(len(where)), number)
        taken = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number) + firsts[where[rows]]
        worst = [worst_of(each.schedule, pipeline) for each, pipeline in every]
        return cls(
            rows,
            [every[index][0] for index in taken.tolist()],
            np.array([each.virtual for each, _ in every])[taken],
            np.array([BUBBLES.get(each.schedule, 1 / each.virtual) for each, _ in every])[taken],
            _in_arrays([of.backward for of in worst], taken),
            _in_arrays([of.loss for of in worst], taken),
        )


def _in_arrays(worst: Sequence[Sequence[Waiting]], taken: Array) -> list[tuple[Array, Array]]:
    """What is kept and queued at each of the worst moments; who has fewer of them has the first one again."""
    longest = max(map(len, worst), default=0)
    filled = np.array([(*moments, *[moments[0]] * (longest - len(moments))) for moments in worst])
    return [(filled[taken, moment, 0], filled[taken, moment, 1]) for moment in range(longest)]


def estimates(space: Space, table: Table, rates: Rates) -> Iterator[Estimates]:
    """The estimates of a table's plans, with every option that is open."""
    turns = _Turns.of(space, table.sizes)
    if not len(turns.rows):
        return
    shares, works, stages = table.shares(), table.works(rates), space.values("zero", STAGES, 0)
    of_table = parts(table, shares)
    of_stages = {stage: held(table, shares, of_table, stage, rates) for stage in stages}
    message = _message(space, table, rates)
    splits = any(each.schedule in QUEUES for each in turns.pipelined)
    ends, device = _Ends.of(table, shares), DEVICE_BYTES.get(space.spec.cluster.device.kind, 0.0)
    steps = {cost.block.name: steps_of(cost) for cost, _ in shares if cost.block.name in table.program.layer_blocks}
    for word in space.recomputed:
        passes = _passes(works, table, word)
        busy, seconds = _pipeline(space.spec, turns, table.sizes, passes, message)
        activations = _Activations.of(table, shares, word, steps, splits=splits)
        computed = passes.computing * _spread(busy, turns.rows, len(table.sizes))
        for stage, of in of_stages.items():
            after: Array = of.work.seconds(computed, table.sizes[:, 5]).total
            memory = device + _memory(of, activations, ends, turns)
            total = seconds + after[turns.rows]
            is_new = np.flatnonzero(of.cuts[turns.rows] | (stage == stages[0]))  # else it is the plan of another stage
            if len(is_new) == len(turns.rows):
                yield Estimates(table, stage, word, turns.rows, turns.pipelined, total, memory)
            elif len(is_new):
                pipelined = [turns.pipelined[row] for row in is_new.tolist()]
                yield Estimates(table, stage, word, turns.rows[is_new], pipelined, total[is_new], memory[is_new])


def _spread(values: Array, rows: Array, number: int) -> Array:
    """For each of `number` rows a value of one of its candidates."""
    spread = np.zeros(number)
    spread[rows] = values
    return spread


# ---- time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of all layers and of the rest for a micro-batch, and the share of computations."""

    body: Array
    head: Array
    computing: Array


def _passes(works: Mapping[str, BlockWork], table: Table, word: Recompute) -> _Passes:
    body = head = sent = 0.0
    for name, count in runs_of(table.program).items():
        is_layer = name in table.program.layer_blocks
        passes = works[name].passes(word if is_layer else "none")
        seconds = count * sum(part.total for part in passes)
        sent = sent + count * sum(part.of.get(term, 0.0) for part in passes for term in EXPOSED)
        body, head = (body + seconds, head) if is_layer else (body, head + seconds)
    return _Passes(body, head, 1 - sent / (body + head))


def _pipeline(spec: Spec, turns: _Turns, sizes: Array, passes: _Passes, message: Array) -> tuple[Array, Array]:
    """Seconds in which the slowest rank computes in a step, and of all passes with the bubble.

    With more micro-batches than ranks, each takes the slowest rank's seconds, or those of its way through all stages
    over the number in flight, whichever is longer. With fewer, they follow each other one stage apart.
    """
    at, depth = turns.rows, spec.subject.depth
    pp, parts, head = sizes[at, 0], sizes[at, 5], passes.head[at]
    layer, stages = passes.body[at] / depth, pp * turns.virtual
    total, way = depth * layer + head, 2 * (stages - 1) * message[at]
    slowest = np.where(pp > 1, np.inf, total)
    for of_last in range(-(-depth // 2) + 1 if np.max(pp) > 1 else 0):
        rest = layer * np.ceil((depth - of_last) / np.maximum(stages - 1, 1))
        slow = np.maximum(turns.virtual * rest, (turns.virtual - 1) * rest + of_last * layer + head)
        slowest = np.where(pp > 1, np.minimum(slowest, slow), slowest)
    each = np.maximum(slowest, (total + way) / under_way(pp, turns.virtual, parts))
    in_rounds = parts * each + turns.bubble * np.maximum(total - each, 0)
    one_by_one = total + (parts - 1) * slowest / turns.virtual
    return parts * slowest, np.where(parts > pp, in_rounds, one_by_one) + way


def under_way(pp: Array, virtual: Array, parts: Array) -> Array:
    """The micro-batches in flight at once, over all stages of the first rank."""
    return np.minimum(parts, np.where(virtual > 1, pp + (pp - 1) / virtual, pp))


def _message(space: Space, table: Table, rates: Rates) -> Array:
    """Seconds of a message from stage to stage, on average."""
    cluster, pp, seconds = space.spec.cluster, table.sizes[:, 0], np.zeros(len(table.sizes))
    layer = table.costs[table.program.layers[0].body]
    size = layer.workload.bytes(*(v for v in layer.block.inputs if v.role == "residual"))
    for number in np.unique(pp[pp > 1]):
        ranks = cluster.ranks // int(number)
        stages = [range(stage * ranks, (stage + 1) * ranks) for stage in range(int(number))]
        for crossed in (outermost_between(*pair, cluster) for pair in itertools.pairwise(stages)):
            seconds = seconds + (pp == number) * rates.message(size, crossed) / (number - 1)
    return seconds


# ---- memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes on the rank with most layers, with one word of `recompute`: `kept` by a micro-batch in all of its layers,
    `queued` by one whose products of weights wait, and of one layer kept and at its worst moment (`turns`)."""

    kept: Array
    queued: Array
    turns: Mapping[str, tuple[Array, Array]]

    @classmethod
    def of(cls, table: Table, shares: Shares, word: Recompute, steps: Steps, *, splits: bool) -> _Activations:
        kept, queued, turns = 0.0, 0.0, {}
        for cost, share in shares:
            block = cost.block
            if block.name in table.program.layer_blocks:
                run = Run.of_steps(steps[block.name], cost, word, splits=splits)
                residual = [v for v in block.inputs if v.role == "residual" and v.name in run.inputs]
                of_layer = run.kept.total + cost.workload.bytes(*residual)
                kept, queued = kept + share * of_layer, queued + share * run.queued.total
                turns[block.name] = of_layer, larger(run.backward.total, run.to_inputs.total)
        return cls(kept, queued, turns)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Bytes outside of layers: what a micro-batch keeps, and the most that the loss takes."""

    kept: Array
    loss: Array

    @classmethod
    def of(cls, table: Table, shares: Shares) -> _Ends:
        kept, loss = 0.0, 0.0
        for cost, share in shares:
            if cost.block.name not in table.program.layer_blocks:
                run = Run.of(cost)
                kept = kept + share * run.kept.total * is_forward(cost.block)
                loss = larger(loss, larger(run.forward.total, run.backward.total))
        return cls(kept, loss)


def _memory(of: Held, activations: _Activations, ends: _Ends, turns: _Turns) -> Array:
    """Bytes at the worst moment: of the first rank, in the backward of a layer or when its gradients are summed, and of
    the last rank, in the loss."""
    at = turns.rows
    of_each, of_stage = (activations.kept + of.in_flight)[at], 1 / turns.virtual
    backward, loss = (
        np.max([kept * of_each + queued * activations.queued[at] for kept, queued in moments], axis=0)
        for moments in (turns.backward, turns.loss)
    )
    worst = 0.0
    for name, (kept, most) in activations.turns.items():
        in_turn = larger(most + of.copies[name], of.in_turn[name]) - kept
        worst = larger(worst, in_turn[at])
    at_layer = larger(of.before[at], of.after[at] - of_stage * of_each) + backward + ends.kept[at] + worst
    return larger(at_layer, of.before[at] + loss + ends.loss[at])
