"""The seconds of one run of a block, forward and backward, by what takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moec.passes.cost.groups import group_along
from moec.passes.cost.liveness import steps_of
from moec.passes.cost.rates import Rates
from moec.passes.cost.seconds import EXPOSED, Seconds, Term, by_term
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Recompute
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Cost, Direction

SENDS: Mapping[str, Term] = {"ep": "all_to_all", "etp": "etp", "tp": "tp", "cp": "cp"}
"""The terms of collectives of activations, by their axis; over other axes they are `other_sends`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one direction of a block asks of the device, by term, and the seconds of the host to launch it."""

    device: Seconds
    host: float

    def __add__(self, other: Work) -> Work:
        return Work(self.device + other.device, self.host + other.host)

    @property
    def repeated(self) -> Work:
        """This work where it is repeated: its computations are `again`, its collectives what they are."""
        parts = ((term if term in EXPOSED else "again", seconds) for term, seconds in self.device.of.items())
        return Work(by_term(parts), self.host)

    @property
    def seconds(self) -> Seconds:
        """The longer of the device, whose kernels and collectives run one after the other, and the host."""
        return self.device + Seconds({"launches": larger(0.0, self.host - self.device.total)})


class BlockTime(NamedTuple):
    """Seconds of one run of a block, and of the part of backward that a pipeline may compute later."""

    forward: Seconds
    backward: Seconds
    weights: float


@dataclass(frozen=True, slots=True)
class BlockWork:
    """One run of a block for a micro-batch.

    `experts`: the part of forward that `recompute = experts` repeats. `weights`: seconds of the part of backward that a
    pipeline may compute later.
    """

    forward: Work
    backward: Work
    experts: Work
    weights: float

    def passes(self, recompute: Recompute) -> tuple[Seconds, Seconds]:
        """Seconds of forward, and of backward with what `recompute` repeats."""
        again = {"none": None, "experts": self.experts, "layer": self.forward}[recompute]
        back = self.backward if again is None else self.backward + again.repeated
        return self.forward.seconds, back.seconds

    def timed(self, recompute: Recompute) -> BlockTime:
        """The seconds of its passes, with what `recompute` repeats."""
        return BlockTime(*self.passes(recompute), self.weights)


def work_of(cost: BlockCost, rates: Rates) -> BlockWork:
    """The work of a block's ops, and of the sums of gradients of values with several users."""
    costs = [of_op for _, of_op in cost.costs]
    sums = _sums_of_gradients(cost)
    added = Work(Seconds({"elementwise": rates.moved(3 * sum(sums))}), rates.launched(len(sums)))
    return BlockWork(
        forward=_work(costs, cost, rates, is_back=False),
        backward=_work(costs, cost, rates, is_back=True) + added,
        experts=_work([of_op for of_op in costs if of_op.of_experts], cost, rates, is_back=False),
        weights=sum(
            rates.product(p, backward=True) for of_op in costs for p in of_op.work.backward.of_weights.products
        ),
    )


def pass_seconds(cost: BlockCost, rates: Rates) -> tuple[Seconds, Seconds]:
    """The seconds of a block's passes, with what its `recompute` repeats."""
    return work_of(cost, rates).passes(cost.block.recompute)


def _work(costs: list[Cost], cost: BlockCost, rates: Rates, *, is_back: bool) -> Work:
    device = by_term(pair for of_op in costs for pair in _seconds(of_op, cost, rates, is_back))
    launches = sum((of_op.work.backward if is_back else of_op.work.forward).launches for of_op in costs)
    return Work(device, rates.launched(launches))


def _seconds(of_op: Cost, cost: BlockCost, rates: Rates, is_back: bool) -> Iterator[tuple[Term, float]]:
    """The seconds of one direction of an op."""
    direction: Direction = of_op.work.backward if is_back else of_op.work.forward
    for product in direction.products:
        kind: Term = "attention" if product.kind == "attention" else "products"
        yield "experts" if of_op.of_experts else kind, rates.product(product, backward=is_back)
    yield (
        "experts" if of_op.of_experts else "elementwise",
        rates.moved(direction.moved) + rates.moved_again(direction.again),
    )
    for sent in of_op.sent:
        size, group = (sent.backward if is_back else sent.forward), group_along(sent.axis, cost.workload.meshes)
        seconds = rates.collective(sent.collectives[is_back], size, group, sent.choices)
        yield SENDS.get(sent.axis, "other_sends"), seconds


def _sums_of_gradients(cost: BlockCost) -> list[float]:
    """Bytes of the gradients that are added to others: of a value with several users, each but the first."""
    known = {value.name for value in cost.block.output_values()}
    sums = list[float]()
    for step in steps_of(cost):
        for name, size in step.differentiated.items():
            if name in known and not name.startswith("@"):
                sums.append(size)
            known.add(name)
    return sums
