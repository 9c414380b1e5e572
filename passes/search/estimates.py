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
from moec.passes.cost.memory import DEVICE_BYTES
from moec.passes.cost.rates import Rates
from moec.passes.cost.totals import runs_of
from moec.passes.ir import Recompute
from moec.passes.ir.interface import is_forward
from moec.passes.ir.work.arrays import larger
from moec.passes.search.blocks import BlockRun, runs_in
from moec.passes.search.held import Held, cuts_of, held
from moec.passes.search.space import ZERO_STAGES, Pipelined, Sizes
from moec.passes.search.tables import Table
from moec.passes.search.turns import QUEUES, Turns

Array = Any


@dataclass(frozen=True, slots=True)
class Estimates:
    """Candidates of a table with one ZeRO stage and recomputation: `rows` of the table, each with a schedule, one of
    `schedules`, by its number in `taken`.

    `least`: seconds if only as many layers as have to recompute so much.
    """

    table: Table
    zero: int
    recompute: Recompute
    rows: Array
    schedules: Sequence[Pipelined]
    taken: Array
    seconds: Array
    memory: Array
    least: Array


def estimates(table: Table, rates: Rates) -> Iterator[Estimates]:
    """The estimates of a table's plans, with every option that is open."""
    space, turns = table.space, Turns.of(table.space, table.sizes)
    splits, stages = any(each.schedule in QUEUES for each in turns.schedules), space.values("zero", ZERO_STAGES, 0)
    runs = {b.name: runs_in(table, b.name, space.recomputed, rates, splits=splits) for b, _ in table.shares}
    cuts = cuts_of(table, runs)
    message = _message(table, rates, runs[table.program.layers[0].body].residual)
    device = DEVICE_BYTES.get(space.spec.cluster.device.kind, 0.0)
    by_recompute = dict[Recompute, tuple[Array, Array, _Activations]]()
    for word in space.recomputed:
        one = {name: of.of.get(word) or of.of["none"] for name, of in runs.items()}
        passes = _passes(table, one)
        busy, seconds = _pipeline(space.spec, turns, table.sizes, passes, message)
        computed = passes.computing * _spread(busy, turns.rows, len(table.rows))
        by_recompute[word] = seconds, computed, _Activations.of(table, one)
    for stage in stages:
        of = held(table, cuts, stage, rates)
        new = np.flatnonzero(of.has_cuts[turns.rows] | (stage == stages[0]))  # else it is the plan of another stage
        rows, taken = turns.rows[new], turns.taken[new]
        seconds, memory = list[Array](), list[Array]()
        for pass_seconds, computed, activations in by_recompute.values():
            after: Array = of.work.seconds(computed, table.sizes.microbatches).total
            seconds.append((pass_seconds + after[turns.rows])[new])
            memory.append(device + _memory(of, activations, turns)[new])
        least = _least(table, turns, new, seconds, memory)
        for word, *found in zip(by_recompute, seconds, memory, least, strict=True) if len(new) else ():
            yield Estimates(table, stage, word, rows, turns.schedules, taken, *found)


def _least(table: Table, turns: Turns, new: Array, seconds: Sequence[Array], memory: Sequence[Array]) -> list[Array]:
    """Seconds with each word of `recompute` in as few layers as fit, and in the others with one that computes less."""
    capacity, found = table.spec.cluster.device.memory, list(seconds)
    of_rank = np.ceil(table.spec.subject.depth / table.sizes.pp[turns.rows[new]])
    for more in range(len(seconds)):
        for less in range(more):
            of_layer = np.maximum(memory[less] - memory[more], 1.0) / of_rank
            share = np.ceil((memory[less] - capacity) / of_layer) / of_rank * turns.mean_over_first[turns.taken[new]]
            mixed = seconds[less] + share * (seconds[more] - seconds[less])
            can_mix = (memory[less] > capacity) & (memory[more] <= capacity)
            found[more] = np.where(can_mix, np.minimum(found[more], mixed), found[more])
    return found


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


def _passes(table: Table, runs: Mapping[str, BlockRun]) -> _Passes:
    body = head = sent = 0.0
    for name, count in runs_of(table.program).items():
        seconds, sent = count * runs[name].seconds, sent + count * runs[name].sent
        is_layer = name in table.program.layer_blocks
        body, head = (body + seconds, head) if is_layer else (body, head + seconds)
    return _Passes(body, head, 1 - sent / (body + head))


def _pipeline(spec: Spec, turns: Turns, sizes: Sizes, passes: _Passes, message: Array) -> tuple[Array, Array]:
    """Seconds in which the slowest rank computes in a step, and of all passes with the bubble.

    With more micro-batches than ranks, each takes the slowest rank's seconds, or those of its way through all stages
    over the number in flight, whichever is longer. With fewer, they follow each other one stage apart.
    """
    at, depth = turns.rows, spec.subject.depth
    pp, parts, head = sizes.pp[at], sizes.microbatches[at], passes.head[at]
    virtual = turns.virtual[turns.taken]
    layer, stages = passes.body[at] / depth, pp * virtual
    total, way = depth * layer + head, 2 * (stages - 1) * message[at]
    slowest = _slowest(stages, virtual, depth, layer, head)
    each = np.maximum(slowest, (total + way) / under_way(pp, virtual, parts))
    in_rounds = parts * each + turns.bubble[turns.taken] * np.maximum(total - each, 0)
    one_by_one = total + (parts - 1) * slowest / virtual
    return parts * slowest, np.where(parts > pp, in_rounds, one_by_one) + way


def _slowest(stages: Array, virtual: Array, depth: int, layer: Array, head: Array) -> Array:
    """Seconds of the slowest rank with a micro-batch: of the best number of layers of the last stage, which also has
    the head. Of the numbers that leave the other stages equally long, it is the smallest."""
    found = depth * layer + head
    for number in np.unique(stages[stages > 1]).tolist():
        at = np.flatnonzero(stages == number)
        few, many = (-(-layers // (number - 1)) for layers in (depth - -(-depth // 2), depth))
        found[at] = np.inf
        for longest in range(few, many + 1):
            of_last = max(0, depth - longest * (number - 1))
            rest, turns = layer[at] * longest, virtual[at]
            slow = np.maximum(turns * rest, (turns - 1) * rest + of_last * layer[at] + head[at])
            found[at] = np.minimum(found[at], slow)
    return found


def under_way(pp: Array, virtual: Array, parts: Array) -> Array:
    """The micro-batches in flight at once, over all stages of the first rank."""
    return np.minimum(parts, np.where(virtual > 1, pp + (pp - 1) / virtual, pp))


def _message(table: Table, rates: Rates, size: Array) -> Array:
    """Seconds of a message from stage to stage, on average."""
    cluster, pp, seconds = table.spec.cluster, table.sizes.pp, np.zeros(len(table.rows))
    for number in np.unique(pp[pp > 1]):
        ranks = cluster.ranks // int(number)
        stages = [range(stage * ranks, (stage + 1) * ranks) for stage in range(int(number))]
        for crossed in (outermost_between(*pair, cluster) for pair in itertools.pairwise(stages)):
            seconds = seconds + (pp == number) * rates.message(size, crossed) / (number - 1)
    return seconds


# ---- memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes on the rank with most layers: `kept` by a micro-batch in all of its layers, `queued` by one whose products
    of weights wait, of one layer those kept and at its worst moment (`turns`); outside of layers, those that a
    micro-batch keeps (`ends`), and the most that the loss takes."""

    kept: Array
    queued: Array
    turns: Mapping[str, tuple[Array, Array]]
    ends: Array
    loss: Array

    @classmethod
    def of(cls, table: Table, runs: Mapping[str, BlockRun]) -> _Activations:
        kept = queued = ends = loss = 0.0
        turns = dict[str, tuple[Array, Array]]()
        for block, share in table.shares:
            run = runs[block.name]
            if block.name in table.program.layer_blocks:
                kept, queued = kept + share * run.kept, queued + share * run.queued
                turns[block.name] = run.kept, run.worst
            else:
                ends, loss = ends + share * run.kept * is_forward(block), larger(loss, run.worst)
        return cls(kept, queued, turns, ends, loss)


def _memory(of: Held, activations: _Activations, turns: Turns) -> Array:
    """Bytes at the worst moment: of the first rank, in the backward of a layer or when its gradients are summed, and of
    the last rank, in the loss."""
    at = turns.rows
    of_each, queued = (activations.kept + of.in_flight)[at], activations.queued[at]
    backward, loss = (_most(moments, turns.taken, of_each, queued) for moments in (turns.backward, turns.loss))
    worst = 0.0
    for name, (kept, most) in activations.turns.items():
        in_turn = larger(most + of.copies[name], of.in_turn[name]) - kept
        worst = larger(worst, in_turn[at])
    at_layer = (
        larger(of.before[at], of.after[at] - of_each / turns.virtual[turns.taken])
        + backward
        + activations.ends[at]
        + worst
    )
    return larger(at_layer, of.before[at] + loss + activations.loss[at])


def _most(moments: Array, of: Array, kept: Array, queued: Array) -> Array:
    """The most bytes at any of the `moments` (`Turns`)."""
    most: Array = 0.0
    for number in range(moments.shape[1]):
        of_moment = moments[of, number]
        most = larger(most, of_moment[:, 0] * kept + of_moment[:, 1] * queued)
    return most
