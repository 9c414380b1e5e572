"""All ranks of a plan in one process by torch's own means: `LocalTensorMode`, a second opinion on the virtual cluster.

A `LocalTensor` is every rank's tensor at once; torch's collectives on it move rows between the ranks. It is private to
torch (2.10 and later), so tests may import this module, where there is one, and nothing else may.

What is moec's own here is what runs on a cluster: the collectives' kernels with their checks, the backward rules of
autograd, and the gradient sums. One kernel cannot: `all_to_all_single` takes splits that differ between ranks only as
torch's functional collective, which stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moec.codegen.checks import scalar_graphs
from moec.codegen.fx import build_module
from moec.codegen.operators import CONVERSIONS
from moec.codegen.plan import Plan
from moec.passes.ir import Layout
from moec.runtime import groups
from moec.runtime.gradients import Bucket, Summed
from moec.runtime.inputs import Inputs, global_batch
from moec.runtime.reference import reference
from moec.runtime.shards import local_slices
from moec.runtime.unsharded import training_loss
from moec.runtime.virtual import VirtualCluster

COLLECTIVES = CONVERSIONS.keys() - {"moec.slice.default"}


@dataclass(frozen=True, slots=True)
class Seat:
    """What an operator that communicates nothing asks of its group: its size, and the place of a rank in it."""

    ranks: tuple[int, ...]
    place: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.place


class AllRanks(LocalTensorMode):
    """Runs moec's operators for the ranks of `plan`: collectives for all of them together, others one by one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.world_size)
        self._plan = plan

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "moec":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) not in COLLECTIVES:
            return self._one_by_one(func, args)
        # The mode is off while it dispatches.
        with AllRanks(self._plan):
            return _all_to_all(*args) if str(func) == "moec.all_to_all.default" else func._op_dk(DispatchKey.CPU, *args)

    def _one_by_one(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        results = {}
        for rank in range(self._plan.world_size):
            own = [arg._local_tensors[rank] if isinstance(arg, LocalTensor) else arg for arg in args]
            with groups.use(self._seats(rank)):
                results[rank] = func(*own)
        if isinstance(results[0], Tensor):
            return LocalTensor(results)
        return tuple(LocalTensor({r: result[i] for r, result in results.items()}) for i in range(len(results[0])))

    def _seats(self, rank: int) -> dict[str, Any]:
        cliques = ((name, ranks) for name, every in self._plan.manifest.groups.items() for ranks in every)
        return {name: Seat(tuple(ranks), list(ranks).index(rank)) for name, ranks in cliques if rank in ranks}


def _all_to_all(rows: Tensor, splits: Tensor, group: str, reverse: bool, site: str = "") -> Tensor:
    send, receive = splits.tolist()
    if reverse:
        send, receive = receive, send
    moved: Tensor = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, groups.resolve(group).group_name)
    return moved


@contextmanager
def all_ranks(plan: Plan) -> Iterator[None]:
    """`AllRanks`, with the process groups of rank 0, from which torch concludes those of the others."""
    dist.init_process_group("fake", rank=0, world_size=plan.world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        own = {
            name: dist.new_group(next(list(ranks) for ranks in every if 0 in ranks))
            for name, every in plan.manifest.groups.items()
        }
        with groups.use(own), AllRanks(plan):
            yield
    finally:
        dist.destroy_process_group()


def run_all_ranks(
    plan: Plan, parts: dict[str, list[Tensor]], inputs: Inputs
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Logits, loss and summed gradients of every rank, of what parameters each holds (`VirtualCluster.parameters`)."""
    found: dict[str, nn.Parameter] = {}
    with all_ranks(plan):

        def make(name: str) -> nn.Parameter:
            found[name] = nn.Parameter(LocalTensor({r: p.detach().clone() for r, p in enumerate(parts[name])}))
            return found[name]

        stage = plan.stages[0]
        forward = build_module(stage, "forward", make, float64=True)
        score = {graph: build_module(stage, graph, make, float64=True) for graph in scalar_graphs(stage)}
        tokens, labels = (LocalTensor(dict(enumerate(ids))) for ids in (inputs.rank_given, inputs.rank_targets))
        out = forward(tokens)
        names = [arg.node for arg in stage.graph("forward").nodes[-1].args]
        results = dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True))
        loss = score["loss"](results["logits"], labels, score["valid_labels"](labels))
        if "balance" in results:
            loss = loss + score["aux_loss"](results["balance"], score["num_tokens"](tokens))
        loss.backward()
        gradients = {name: _listed(_summed(p, plan.parameters[name].sum_over)) for name, p in found.items()}
    return _listed(results["logits"].detach()), _listed(loss.detach()), gradients


def _summed(parameter: nn.Parameter, over: tuple[str, ...]) -> LocalTensor:
    """A parameter's gradient after its sums, as a job does them."""
    gradient = parameter.grad
    assert gradient is not None
    if not over:
        return gradient
    shape = tuple(gradient.shape)
    bucket = Bucket([Summed(0, shape, over)], "", gradient.dtype, gradient.device)
    bucket.begin([gradient])
    return bucket.finish()[0]


def _listed(tensor: LocalTensor) -> list[Tensor]:
    return [tensor._local_tensors[rank] for rank in sorted(tensor._local_tensors)]


# ---- three answers, and how far they are apart --------------------------------------------------------


def run_both(plan: Plan) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Every rank's logits, loss and gradients in float64: by torch's mode, and on the virtual cluster."""
    model = reference(plan.spec, seed=0, dtype=torch.float64)
    cluster = VirtualCluster(plan, dict(model.named_parameters()))
    inputs = global_batch(plan, 0)
    logits, loss, gradients = run_all_ranks(plan, cluster.parameters, inputs)
    virtual_logits, virtual_loss = cluster.lockstep.run(inputs.rank_given, inputs.rank_targets)
    virtual = {"logits": virtual_logits, "loss": virtual_loss, **cluster.backward(virtual_loss)}
    return {"logits": logits, "loss": loss, **gradients}, virtual


def unsharded(plan: Plan, *, training: bool = True) -> dict[str, list[Tensor]]:
    """What each rank should have."""
    model = reference(plan.spec, seed=0, dtype=torch.float64).train(training)
    inputs = global_batch(plan, 0)
    out = model(inputs.given, inputs.targets)
    loss = training_loss(model, out)
    loss.backward()
    dense, ranks = plan.meshes["dense"], range(plan.world_size)
    logits = [out.logits[local_slices(out.logits.shape, plan.result_layout, dense, rank)] for rank in ranks]
    found = {"logits": logits, "loss": [loss for _ in ranks]}
    for name, parameter in model.named_parameters():
        data = plan.parameters[name]
        layout, mesh = Layout.parse(data.layout), plan.meshes[data.mesh]
        assert parameter.grad is not None
        found[name] = [parameter.grad[local_slices(data.shape, layout, mesh, rank)] for rank in ranks]
    return found


def distance(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> float:
    """The largest difference on any rank."""
    assert one.keys() == other.keys()
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
