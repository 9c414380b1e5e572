"""All ranks of a plan in one process by torch's `LocalTensorMode`, an independent check of the virtual cluster.

A `LocalTensor` is every rank's tensor at once; torch's collectives on it move rows between the ranks. It is private to
torch (2.10 and later), so tests may import this module, where there is one, and nothing else may.

What is moec's own here is what runs on a cluster: the collectives' kernels with their checks, the backward rules of
autograd, and the gradient sums. Kernels of ragged rows cannot: `all_to_all_single` takes splits that differ between
ranks only as torch's functional collective, which stands in for it (`STAND_INS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from moec.codegen.emit import emit_graph, info_of
from moec.codegen.plan import Plan
from moec.passes.ir import Output, Setting, State, local_slices
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Call
from moec.runtime.host.reference import reference
from moec.runtime.inputs.settings import setting_values
from moec.runtime.model.step_counts import sequence_numbers
from moec.runtime.ranks import groups
from moec.runtime.verify.cluster.lockstep import VERIFY_SETTINGS
from moec.runtime.verify.cluster.shuffles import NODES
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.inputs import GlobalBatch, global_batch
from moec.runtime.verify.unsharded import training_loss
from moec.runtime.weights.gradients import Bucket, SummedGradient

ALONE = {f"moec.{name}.default" for name in ("embed_part", "label_logit", "slice")}
"""The operators that depend on a rank's place in a group and do not communicate."""

COLLECTIVES = NODES.keys() - ALONE


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
    """Runs moec's operators for the ranks of `plan`: collectives for all ranks together, others rank by rank."""

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
        if str(func) == "moec.reduce_scatter_rows.default":
            return self._summed_and_cut(*args)
        # The mode is off while it dispatches.
        with AllRanks(self._plan):
            stand_in = STAND_INS.get(str(func))
            return stand_in(*args) if stand_in else func._op_dk(DispatchKey.CPU, *args)

    def _summed_and_cut(self, rows: Tensor, splits: Tensor, group: str, *_: object) -> Any:
        with AllRanks(self._plan):
            whole = rows.clone()
            dist.all_reduce(whole, group=groups.resolve(group))
        return self._one_by_one(_own_rows, (whole, splits, group))

    def _one_by_one(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        results = {}
        for rank in range(self._plan.world_size):
            own = tree_map(partial(_of_rank, rank=rank), args)
            with groups.use(self._seats(rank)):
                results[rank] = func(*own)
        if isinstance(results[0], Tensor):
            return LocalTensor(results)
        return tuple(LocalTensor({r: result[i] for r, result in results.items()}) for i in range(len(results[0])))

    def _seats(self, rank: int) -> dict[str, Any]:
        cliques = ((name, ranks) for name, every in self._plan.groups.items() for ranks in every)
        return {name: Seat(tuple(ranks), list(ranks).index(rank)) for name, ranks in cliques if rank in ranks}


def _of_rank(argument: Any, rank: int) -> Any:
    """A rank's tensor, or its size where ranks have different ones."""
    if isinstance(argument, LocalTensor):
        return argument._local_tensors[rank]
    if isinstance(argument, torch.SymInt) and isinstance(argument.node, LocalIntNode):
        return argument.node._local_ints[rank]
    return argument


def _all_to_all(rows: Tensor, splits: Tensor, reverse: bool, group: str, *_: object) -> Tensor:
    send, receive = splits.tolist()
    if reverse:
        send, receive = receive, send
    moved: Tensor = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, groups.resolve(group).group_name)
    return moved


def _all_gather_rows(rows: Tensor, splits: Tensor, group: str, *_: object) -> Tensor:
    return _all_to_all(torch.cat([rows] * groups.resolve(group).size()), splits, False, group)


def _own_rows(rows: Tensor, splits: Tensor, group: str) -> Tensor:
    return torch.split(rows, splits[1].tolist())[groups.resolve(group).rank()]


STAND_INS = {
    "moec.all_to_all.default": _all_to_all,
    "moec.all_gather_rows.default": _all_gather_rows,
}


@contextmanager
def all_ranks(plan: Plan) -> Iterator[None]:
    """`AllRanks`, with the process groups of rank 0, from which torch derives the other ranks' groups."""
    dist.init_process_group("fake", rank=0, world_size=plan.world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        own = {
            name: dist.new_group(next(list(ranks) for ranks in every if 0 in ranks))
            for name, every in plan.groups.items()
        }
        with groups.use(own), AllRanks(plan):
            yield
    finally:
        dist.destroy_process_group()


def run_all_ranks(
    plan: Plan,
    parts: dict[str, list[Tensor]],
    batch: GlobalBatch,
    *,
    training: bool,
    whole_states: Mapping[str, Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Logits, loss and summed gradients of every rank, from each rank's weights (`VirtualWeights.leaves`)."""
    size = len(batch.rank_inputs[0])
    # Made before the mode starts: inside it every new tensor becomes a LocalTensor.
    sequences = [sequence_numbers(plan.data_rank(rank), size, size) for rank in range(plan.world_size)]
    states = {
        name: LocalTensor(dict.fromkeys(range(plan.world_size), state)) for name, state in (whole_states or {}).items()
    }
    with all_ranks(plan):
        parameters = {
            name: nn.Parameter(LocalTensor({r: p.detach().clone() for r, p in enumerate(of_ranks)}))
            for name, of_ranks in parts.items()
        }
        run = _Blocks(plan, parameters, states, training)
        tokens, labels = (LocalTensor(dict(enumerate(ids))) for ids in (batch.rank_inputs, batch.rank_targets))
        given = [tokens]
        if plan.program.block(FORWARD).input("sequences") is not None:
            given.append(LocalTensor(dict(enumerate(sequences))))
        results = {output.key: value for output, value in run(FORWARD, "", given).items()}
        logits = results["logits", None, None]
        (valid,) = run("valid_labels", "", [labels]).values()
        (loss,) = run("loss", "", [logits, labels, valid]).values()
        if ("balance", None, None) in results:
            (num_tokens,) = run("num_tokens", "", [tokens]).values()
            (aux_loss,) = run("aux_loss", "", [results["balance", None, None], num_tokens]).values()
            loss = loss + aux_loss
        loss.backward()
        summed = {name: _listed(_summed(p, plan.parameters[name].sum_over)) for name, p in parameters.items()}
    gradients = {name: _parts_of_masters(plan, name, of_ranks) for name, of_ranks in summed.items()}
    return _listed(logits.detach()), _listed(loss.detach()), gradients


class _Blocks:
    """Runs a plan's blocks in float64, node by node of the graphs that are emitted from them."""

    def __init__(
        self, plan: Plan, parameters: Mapping[str, Tensor], states: Mapping[str, Tensor], training: bool
    ) -> None:
        self._program, self._parameters, self._states, self._training = plan.program, parameters, states, training

    def __call__(self, block: str, path: str, given: Sequence[Tensor], number: int = -1) -> dict[Output, Tensor]:
        """A block's results; its parameters are those whose names begin with `path`."""
        found = self._program.block(block)
        graph = emit_graph(self._program, found, float64=True)
        inputs, values = dict(zip((v.name for v in found.inputs), given, strict=True)), dict[fx.Node, Any]()

        def valued(argument: Any) -> Any:
            return fx.map_arg(argument, lambda used: values[used])

        for node in graph.nodes:
            info = info_of(node)
            if node.op == "placeholder" and info.parameter:
                values[node] = self._parameters[path + info.parameter]
            elif isinstance(info.value, Setting):
                (values[node],) = setting_values((info.value.name,), VERIFY_SETTINGS, training=self._training)
            elif isinstance(info.value, State):
                values[node] = self._states[path + info.value.name]
            elif node.op == "placeholder":  # the only other input is the layer's number
                values[node] = inputs[info.key] if info.value is not None else torch.tensor(number)
            elif node.op == "call_module":
                assert isinstance(info.op, Call)
                called = self(info.op.block, f"layers.{info.op.layer}.", valued(node.args), info.op.layer)
                values[node] = next(iter(called.values())) if len(called) == 1 else tuple(called.values())
            elif node.op == "call_function":
                values[node] = node.target(*valued(node.args), **valued(node.kwargs))
            else:
                (gives,) = valued(node.args)
                return dict(zip(found.outputs, gives if isinstance(gives, tuple | list) else (gives,), strict=True))
        raise AssertionError("a graph without an output")


def _summed(parameter: nn.Parameter, over: tuple[str, ...]) -> LocalTensor:
    """A parameter's gradient after its sums, as a job does them."""
    gradient = parameter.grad
    assert gradient is not None
    if not over:
        return gradient
    shape = tuple(gradient.shape)
    bucket = Bucket([SummedGradient(0, shape, over)], "", gradient.dtype, gradient.device)
    bucket.begin([gradient])
    return bucket.finish()[0]


def _parts_of_masters(plan: Plan, name: str, gradients: Sequence[Tensor]) -> list[Tensor]:
    """What each rank's optimizer takes of a gradient: the part that its master is of its weight."""
    data = plan.parameters[name]
    mesh, parts = plan.meshes[data.mesh], []
    for rank, gradient in enumerate(gradients):
        masters, weights = (local_slices(data.shape, layout, mesh, rank) for layout in (data.master, data.layout))
        cuts = zip(masters, weights, strict=True)
        parts.append(gradient[tuple(slice(own.start - held.start, own.stop - held.start) for own, held in cuts)])
    return parts


def _listed(tensor: LocalTensor) -> list[Tensor]:
    return [tensor._local_tensors[rank] for rank in sorted(tensor._local_tensors)]


# ---- three answers, and how far they are apart --------------------------------------------------------


def run_both(plan: Plan, *, training: bool = True) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Every rank's logits, loss and gradients in float64: by torch's mode, and on the virtual cluster."""
    model = reference(plan.spec, seed=0, dtype=torch.float64)
    states = dict(model.named_buffers())
    cluster = VirtualCluster(plan, dict(model.named_parameters()), states, training=training)
    batch = global_batch(plan, 0)
    weights = {name: cluster.weights.leaves(name) for name in plan.parameters}
    logits, loss, gradients = run_all_ranks(plan, weights, batch, training=training, whole_states=states)
    step = cluster.step(batch.rank_inputs, batch.rank_targets)
    step.run()
    virtual = {"logits": step.stage_values.result, "loss": step.losses[0], **step.gradients}
    return {"logits": logits, "loss": loss, **gradients}, virtual


def unsharded(plan: Plan, *, training: bool = True) -> dict[str, list[Tensor]]:
    """The expected value of each rank."""
    model = reference(plan.spec, seed=0, dtype=torch.float64).train(training)
    model.set(**VERIFY_SETTINGS)
    batch = global_batch(plan, 0)
    out = model(batch.inputs, batch.targets)
    loss = training_loss(model, out)
    loss.backward()
    dense, ranks = plan.meshes["dense"], range(plan.world_size)
    logits = [out.logits[local_slices(out.logits.shape, plan.result_layout, dense, rank)] for rank in ranks]
    found = {"logits": logits, "loss": [loss for _ in ranks]}
    for name, parameter in model.named_parameters():
        data = plan.parameters[name]
        mesh = plan.meshes[data.mesh]
        assert parameter.grad is not None
        found[name] = [parameter.grad[local_slices(data.shape, data.master, mesh, rank)] for rank in ranks]
    return found


def distance(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> float:
    """The largest difference on any rank."""
    assert one.keys() == other.keys()
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
