"""The seconds of one run of a block, forward and backward, by what takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moec.passes.cost.groups import group_along
from moec.passes.cost.liveness import steps_of
from moec.passes.cost.rates import Rates
from moec.passes.cost.seconds import Seconds, Term, by_term
from moec.passes.cost.totals import BlockCost
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Cost, Direction

SENDS: Mapping[str, Term] = {"ep": "all_to_all", "etp": "etp", "tp": "tp", "cp": "cp"}
"""The terms of collectives of activations, by their axis; over other axes they are `other_sends`."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a block for a micro-batch. `weights`: the part of `backward` that a pipeline may compute later."""

    forward: Seconds
    backward: Seconds
    weights: float

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return self.forward.total + self.backward.total


def pass_seconds(cost: BlockCost, rates: Rates) -> PassSeconds:
    """The seconds of a block. A direction takes the longer of the device, whose kernels and collectives run one after
    the other, and the host, which launches them."""
    ahead, back = list[tuple[Term, float]](), list[tuple[Term, float]]()
    launches, again, weights = Counter[str](), 0.0, 0.0
    word = cost.block.recompute
    for _, of_op in cost.costs:
        forward, backward = (list(_seconds(of_op, cost, rates, is_back)) for is_back in (False, True))
        ahead += forward
        back += backward
        launches["ahead"] += of_op.work.forward.launches
        launches["back"] += of_op.work.backward.launches
        if word == "layer" or (word == "experts" and of_op.of_experts):
            again += sum(seconds for _, seconds in forward)
            launches["back"] += of_op.work.forward.launches
        weights += sum(rates.product(p, backward=True) for p in of_op.work.backward.of_weights.products)
    sums = _sums_of_gradients(cost)
    back += [("elementwise", rates.moved(3 * sum(sums))), ("again", again)]
    launches["back"] += len(sums)
    return PassSeconds(_with_host(ahead, launches["ahead"], rates), _with_host(back, launches["back"], rates), weights)


def _with_host(of_device: list[tuple[Term, float]], launches: int, rates: Rates) -> Seconds:
    device = by_term(of_device)
    return device + Seconds({"launches": larger(0.0, rates.launched(launches) - device.total)})


def _seconds(of_op: Cost, cost: BlockCost, rates: Rates, is_back: bool) -> Iterator[tuple[Term, float]]:
    """The seconds of one direction of an op."""
    direction: Direction = of_op.work.backward if is_back else of_op.work.forward
    for product in direction.products:
        kind: Term = "attention" if product.kind == "attention" else "products"
        yield "experts" if of_op.of_experts else kind, rates.product(product, backward=is_back)
    yield "experts" if of_op.of_experts else "elementwise", rates.moved(direction.moved)
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
