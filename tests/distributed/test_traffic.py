"""The bytes that a rank sends in a step: counted where gloo is given them, and stated by `tally`."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from support.plans import moe_plan
from support.ranks import contract
from support.ranks.gloo_pool import GlooPool
from torch import Tensor

import moec
from moec.passes.cost.totals import tally
from moec.runtime.ops import dense_collectives, ragged_collectives
from moec.runtime.weights import gathering, gradients

EQUAL = "capacity = factor(1.0)"
"""Padded exchanges: the rows that ranks send do not depend on what gates choose."""


MODULES = {gathering: " of weights", gradients: " of gradients", dense_collectives: "", ragged_collectives: ""}
"""The modules that call collectives in a step, with what they send beside activations."""


def purpose(operation: str, of: str) -> str:
    return f"{operation}{of}" if of else "activations"


def all_reduce(x: Tensor, group: dist.ProcessGroup, **_: Any) -> float:
    return 2 * x.nbytes * (1 - 1 / group.size())


def all_gather(into: Tensor, source: Tensor, **_: Any) -> float:
    return into.nbytes - source.nbytes


def reduce_scatter(into: Tensor, source: Tensor, **_: Any) -> float:
    return source.nbytes - into.nbytes


def all_to_all(
    into: Tensor, source: Tensor, receive: object = None, send: list[int] | None = None, *, group: dist.ProcessGroup
) -> float:
    kept = 1 / group.size() if send is None else send[group.rank()] / max(sum(send), 1)
    return source.nbytes * (1 - kept)


SENT = {
    "all_reduce": all_reduce,
    "all_gather_single": all_gather,
    "reduce_scatter_single": reduce_scatter,
    "_reduce_scatter_single": reduce_scatter,
    "all_to_all_single": all_to_all,
}
"""The bytes that leave a rank, by a ring's algorithm, given the arguments of a collective."""


class Counted(ModuleType):
    """`torch.distributed` for one module, which counts the bytes of its collectives, but for those of row counts."""

    def __init__(self, module: ModuleType, sent: Counter[str]) -> None:
        super().__init__("counted")
        self._module, self._sent = module, sent

    def __getattr__(self, name: str) -> Any:
        return self.counting(name, getattr(dist, name))

    def counting(self, name: str, collective: Any) -> Any:
        if name not in SENT:
            return collective

        def count(*arguments: Any, async_op: bool = False, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
            if self._module is not ragged_collectives or arguments[0].is_floating_point():
                self._sent[purpose(SENT[name].__name__, MODULES[self._module])] += SENT[name](*arguments, **more)
            return collective(*arguments, **more, **({"op": op} if name == "all_reduce" else {}), async_op=async_op)

        return count


def bytes_sent(options: dict[str, Any]) -> Counter[str]:
    """The bytes that leave this rank in one step, by purpose."""
    sent = Counter[str]()
    with moec.launch(moe_plan(**WIDE, **options), device="cpu") as job, pytest.MonkeyPatch.context() as patched:
        model = job.build(seed=1)
        own = contract.mine(job, *contract.batch())
        for module in MODULES:
            counted = Counted(module, sent)
            for name in SENT.keys() & vars(module).keys():
                patched.setattr(module, name, counted.counting(name, vars(module)[name]))
            patched.setattr(module, "dist", counted)
        job.step(model, *own)
    return sent


def bytes_stated(options: dict[str, Any]) -> Counter[str]:
    plan, stated = moe_plan(**WIDE, **options), Counter[str]()
    for flow in tally(plan.program, plan.spec).traffic:
        stated[flow.purpose if flow.purpose.endswith((" of weights", " of gradients")) else "activations"] += flow.bytes
    return stated


WIDE = {"dim": 32}
"""At this width the job's own numbers, one for each parameter, are less than 1 % of the bytes."""

PLANS: dict[str, dict[str, Any]] = {
    "zero 1": {"ranks": 2, "ep": None, "mixtures": ((8, 2), (8, 1)), "beside": EQUAL, "zero": 1},
    "zero 3, recomputed": {"ranks": 2, "ep": 2, "beside": EQUAL, "zero": 3, "recompute": "layer"},
    "etp 2, cp 2": {"ranks": 2, "ep": 1, "etp": 2, "cp": 2, "recompute": "layer"},
    "ep 2, etp 2, tp 2": {"ranks": 4, "ep": 2, "etp": 2, "tp": 2, "beside": EQUAL},
    "etp 2, cp 2, zero 2": {"ranks": 4, "ep": 1, "etp": 2, "cp": 2, "zero": 2, "microbatches": 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_the_stated_traffic_is_what_ranks_send(gloo: GlooPool, name: str) -> None:
    options = PLANS[name]
    stated = bytes_stated(options)
    for sent in gloo.run(options["ranks"], bytes_sent, options, initialize=False):
        assert sent == pytest.approx(stated, rel=0.01)
