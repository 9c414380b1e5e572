"""The error of predictions when one mechanism of the cost model is left out, or a constant is fitted to other rows.

Both replace names of the cost model. A replaced name that nothing uses changes no prediction, and that is an error.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from moec.grammar.spec.cluster import LevelRates
from moec.passes.cost import parameter_time, pass_time, rates, step_time
from moec.passes.cost.groups import Group, parts_of_group
from moec.passes.cost.parameter_time import ParameterWork
from moec.passes.cost.pass_time import BlockWork, Work
from moec.passes.cost.pipeline_time import PipelineTime
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.seconds import Seconds, Term
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.work.cost import Product
from planning.rows import Published
from planning.score import AsRun, Run, Scored

Left = Callable[[], AbstractContextManager[Any]]
"""A context in which predictions lack a mechanism."""


def _without(terms: Sequence[Term], *, outside: bool = False) -> Left:
    """Without these terms of passes; `outside`: only of what is outside of layers."""
    original = pass_time.work_of

    def work_of(cost: BlockCost, of_cluster: rates.Rates) -> BlockWork:
        work = original(cost, of_cluster)
        if outside and cost.block.name.startswith("layers"):
            return work
        forward, backward, experts = (
            Work(Seconds({t: s for t, s in part.device.of.items() if t not in terms}), part.host)
            for part in (work.forward, work.backward, work.experts)
        )
        return replace(work, forward=forward, backward=backward, experts=experts)

    return lambda: patch.object(step_time, "work_of", work_of)


def _rate(name: str, seconds: Callable[..., float]) -> Left:
    """With another method of the rates."""
    return lambda: patch.object(AsRun if name in vars(AsRun) else ClusterRates, name, seconds)


def _sent(change: Callable[[bool, float], float], parts: bool = False) -> Left:
    """With other seconds of gathers and sums, by whether every pass has them; `parts`: over the micro-batches."""
    original = parameter_time.parameter_work

    def parameter_work(runs: Any, microbatches: int, *args: Any, **options: Any) -> ParameterWork:
        work, over = original(runs, microbatches, *args, **options), microbatches if parts else 1
        sent = {
            what: {of_all: change(of_all, s) / (over if of_all else 1) for of_all, s in of.items()}
            for what, of in work.sent.items()
        }
        return replace(work, sent=sent)

    return lambda: patch.object(step_time, "parameter_work", parameter_work)


def _links(inside: int) -> Left:
    """With so many ranks of a group in a node, for the links of a ring over nodes."""
    original = ClusterRates.collective

    def collective(self: ClusterRates, collective: str, *args: Any) -> float:
        def parts(group: Group, cluster: Any) -> list[tuple[int, int]]:
            real = parts_of_group(group, cluster)
            return [real[0], *((inside, units) for _, units in real[1:])]

        if collective == "all_to_all":
            return original(self, collective, *args)
        with patch.object(rates, "parts_of_group", parts):
            return original(self, collective, *args)

    return lambda: patch.object(ClusterRates, "collective", collective)


def _constant(module: Any, name: str, value: float) -> Left:
    return lambda: patch.object(module, name, value)


def _no_waits() -> AbstractContextManager[Any]:
    original = step_time.pipeline_time

    def busy(*args: Any) -> PipelineTime:
        time = original(*args)
        return PipelineTime(time.busy, time.busy)

    return patch.object(step_time, "pipeline_time", busy)


def _one_chunk() -> AbstractContextManager[Any]:
    """One stage a rank: rows are compiled again."""
    original = Run.of

    def of(row: Published) -> Run:
        words = r"virtual = \d+; schedule = interleaved(; stages = \[[^]]*\])?"
        return original(replace(row, text=re.sub(words, "schedule = one_f_one_b", row.text)))

    return patch.object(Run, "of", of)


def _ring(share: float) -> Left:
    """With another share of the bandwidth that rings reach."""
    original = ClusterRates.collective

    def collective(self: ClusterRates, collective: str, sent: float, *args: Any) -> float:
        return original(self, collective, sent * (1 if collective == "all_to_all" else RING / share), *args)

    return lambda: patch.object(ClusterRates, "collective", collective)


def _as_plain(self: ClusterRates, product: Product, *, backward: bool) -> float:
    plain = replace(product, kind="plain") if product.kind == "grouped" else product
    return _product(self, plain, backward=backward)


_product, RING = ClusterRates.product, LevelRates().ring
MECHANISMS: Mapping[str, Left] = {
    "ZeRO-3 traffic of every micro-batch": _sent(lambda of_all, s: s, parts=True),
    "ZeRO-1 traffic": _sent(lambda of_all, s: s * of_all),
    "links of a group with a stride: as if all 8 of a node": _links(8),
    "links of a group with a stride: as if one": _links(1),
    "rings with several ranks a node slower": _constant(rates, "SHARED_RING", 1.0),
    "computations that hide gathers: none": _constant(parameter_time, "HIDDEN", 0.0),
    "computations that hide gathers: all": _constant(parameter_time, "HIDDEN", 1.0),
    "interleaved stages": _one_chunk,
    "waits in a pipeline": _no_waits,
    "messages between stages": _rate("message", lambda *_: 0.0),
    "element-wise kernels": _without(["elementwise"]),
    "gathers and sums of etp": _without(["etp"]),
    "exchange of rows": _without(["all_to_all"]),
    "collectives of tp": _without(["tp"]),
    "products of head and loss": _without(["products"], outside=True),
    "bytes of head and loss": _without(["elementwise"], outside=True),
    "casts and sums of gradients": _rate("copied", lambda *_: 0.0),
    "rows per expert": _rate("product", _as_plain),
    "launches of the host": _rate("launched", lambda *_: 0.0),
    "latency of messages": _rate("latency", lambda *_: 0.0),
    "the update": _rate("updated", lambda *_: 0.0),
}


@dataclass(frozen=True, slots=True)
class WithoutOne:
    """Errors without a mechanism: the mean of Folding rows and of newer ones, and the row whose error changes most."""

    name: str
    folding: float
    newer: float
    shows: Scored
    was: float


def leave_one_out(folding: Sequence[Run], newer: Sequence[Run]) -> list[WithoutOne]:
    """All mechanisms, that first which the Folding rows miss most."""
    runs, found = [*folding, *newer], []
    before = [run.scored().error for run in runs]
    for name, left in MECHANISMS.items():
        with left():
            scored = [(Run.of(run.row) if left is _one_chunk else run).scored() for run in runs]
        _require_change(name, (row.error - was for row, was in zip(scored, before, strict=True)))
        shows = max(range(len(runs)), key=lambda at: abs(scored[at].error - before[at]))
        means = (mean_error(rows) for rows in (scored[: len(folding)], scored[len(folding) :]))
        found.append(WithoutOne(name, *means, scored[shows], before[shows]))
    return sorted(found, key=lambda each: -each.folding)


def _require_change(name: str, changes: Iterable[float]) -> None:
    """Raises `LookupError` where no prediction changes."""
    if not any(changes):
        raise LookupError(f"no prediction changes without `{name}`: the cost model does not use the name replaced here")


def mean_error(rows: Sequence[Scored]) -> float:
    return statistics.fmean(abs(row.error) for row in rows)


FITTED: Mapping[str, tuple[float, Sequence[float], Callable[[float], Left]]] = {
    "SHARED_RING": (rates.SHARED_RING, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), lambda x: _constant(rates, "SHARED_RING", x)),
    "HIDDEN": (
        parameter_time.HIDDEN,
        (0.35, 0.45, 0.5, 0.55, 0.6, 0.65, 0.75),
        lambda x: _constant(parameter_time, "HIDDEN", x),
    ),
    "ring": (RING, (0.65, 0.7, 0.75, 0.8, 0.85, 0.9), _ring),
}
"""The constants that are fitted to the Folding rows: what they are, what they might be, and how to try."""


def fitted(runs: Sequence[Run]) -> dict[str, float]:
    """The constants with the least mean error on these rows, one after the other until none improves it."""
    constants, least = {name: now for name, (now, *_) in FITTED.items()}, float("inf")
    while (error := error_with(constants, runs)) < least:
        least = error
        for name, (_, tried, _) in FITTED.items():
            errors = {x: error_with(constants | {name: x}, runs) for x in tried}
            _require_change(name, (error - errors[tried[0]] for error in errors.values()))
            constants[name] = min(tried, key=errors.__getitem__)
    return constants


def error_with(constants: Mapping[str, float], runs: Sequence[Run]) -> float:
    """The mean error with these constants."""
    with ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(FITTED[name][2](value)())
        return mean_error([run.scored() for run in runs])
