"""Sums the costs of ops: per block, and per rank and training step of a placed Program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec, Update
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.weight_traffic import sendings
from moec.passes.ir import DTYPE_BYTES, Block, Op, Parameter, Program
from moec.passes.ir.interface import FORWARD, layer_calls, require_one_stage
from moec.passes.ir.mesh import EXPERT_AXES, group_name
from moec.passes.ir.op import layout_of
from moec.passes.ir.work.cost import MASTER_BYTES, Cost
from moec.passes.ir.work.workload import Workload

# ---- a block -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of one run of a block on one rank, op by op."""

    block: Block
    workload: Workload
    costs: tuple[tuple[Op, Cost], ...]

    @classmethod
    def of(cls, program: Program, block: Block, workload: Workload) -> BlockCost:
        """The cost of every op of `block`. Binds `workload` to the block first."""
        bound = workload.bound_to(program, block)
        costs = tuple((op, op.cost(block.operands(op), op.results, bound)) for op in block.ops)
        return cls(block, bound, costs)

    def saved(self) -> dict[str, float]:
        """Bytes of the saved activations by name; an activation that two ops save counts once."""
        return {name: size for _, names in self.newly_saved() for name, size in names.items()}

    def newly_saved(self) -> Iterator[tuple[Op, dict[str, float]]]:
        """Each op with the activations that it saves and no earlier op saves."""
        known: set[str] = set()
        for op, cost in self.costs:
            new = {s.name: s.bytes for s in cost.saved if s.name not in known and not s.is_parameter}
            known.update(new)
            yield op, new

    def saved_parameters(self) -> set[str]:
        """The parameters (`@name`) that ops save for backward."""
        return {s.name for _, cost in self.costs for s in cost.saved if s.is_parameter}

    def model_flops(self) -> float:
        """FLOPs of forward and backward over all ranks; replicated computation counts once."""
        return sum(flops for _, flops in self.flops_of_ops())

    def flops_of_ops(self) -> Iterator[tuple[Op, float]]:
        """Each op that has FLOPs, with those of `model_flops`."""
        each = ((op, cost.work.forward.flops + cost.work.backward.flops) for op, cost in self.costs)
        return ((op, flops * self._num_parts(op)) for op, flops in each if flops)

    def _num_parts(self, op: Op) -> int:
        """Number of ranks that divide the op's computation: on the dense or the expert mesh, whichever is more."""
        values = (*self.block.operands(op), *op.results)
        axes = {axis for value in values for axis in layout_of(value).axes}
        meshes = self.workload.meshes
        of_experts = axes.intersection(EXPERT_AXES)
        return max(math.prod(map(meshes.size, of_experts)), math.prod(map(meshes.size, axes - of_experts)))

    def elements(self) -> Iterator[tuple[Parameter, int, int, int]]:
        """Each parameter with the number of its elements: all, those that a token uses, those that a rank holds."""
        used = {name: cost.used for op, cost in reversed(self.costs) for name in op.operands}
        for p in self.block.parameters:
            whole, stored = self.workload.whole(p), replace(p, layout=p.weight)
            yield p, whole, int(whole * used.get(f"@{p.name}", 1.0)), math.prod(self.workload.shape(stored))

    def skew(self) -> float:
        """Rows of the busiest rank over the mean. 1 where rows stay on their rank, or are padded to equal places."""
        return max(map(self.workload.skew, self.block.scope.values()), default=1.0)


def costs_of(program: Program, workload: Workload) -> dict[str, BlockCost]:
    """The cost of one run of each block, by the block's name. Raises `DiagnosticError` for a pipeline."""
    require_one_stage(program)
    return {block.name: BlockCost.of(program, block, workload) for block in program.blocks}


# ---- a rank and a step -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends over one group in a training step, for one purpose."""

    group: str
    ranks: int
    purpose: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts are exact; traffic is that of an even load, and `imbalance` says how uneven `train.routing` is.

    `flops_per_token` is forward plus backward (twice forward where all parameters train), with the causal half of
    attention and no recomputation.
    `imbalance` is the rows of the busiest rank over the mean, experts placed in order: the largest over all layers.
    `state_bytes` are fp32 masters, gradients, optimizer states, and narrow copies of parameters narrower than fp32;
    of frozen parameters their weights.
    `activation_bytes` are the saved activations of a whole batch under an even load; `most_activation_bytes` are those
    of the busiest rank.
    """

    parameters: int
    active_parameters: int
    local_parameters: int
    state_bytes: int
    activation_bytes: float
    most_activation_bytes: float
    sequences: int
    tokens: int
    flops_per_token: float
    traffic: tuple[Traffic, ...]
    imbalance: float


def tally(program: Program, spec: Spec) -> Tally:
    """Totals of a Program after all passes, for the workload of its file."""
    workload = Workload.of(spec, program)
    costs = costs_of(program, workload.even)
    most = costs_of(program, workload) if workload.exponent else costs
    runs = [(costs[name], count) for name, count in runs_of(program).items() if count]
    counts = (_parameters(run, spec.update) for run in runs)
    total, active, local, state = (sum(column) for column in zip(*counts, strict=True))
    flops = sum(count * cost.model_flops() for cost, count in runs)
    return Tally(
        parameters=total,
        active_parameters=active,
        local_parameters=local,
        state_bytes=state,
        activation_bytes=activation_bytes(program, costs),
        most_activation_bytes=activation_bytes(program, most),
        sequences=workload.batch,
        tokens=workload.tokens,
        flops_per_token=flops / workload.tokens,
        traffic=(*_collective_traffic(runs), *_parameter_traffic(runs, program.microbatches)),
        imbalance=max((cost.skew() for cost in most.values()), default=1.0),
    )


def activation_bytes(program: Program, costs: Mapping[str, BlockCost]) -> float:
    """Bytes of saved activations of a training step on one rank; `costs` are by the names of blocks.

    A layer's inputs and results are values of `forward`, and the inputs of the loss are outputs of `forward`: an
    activation that both blocks save counts once.
    """
    kept = dict(costs[FORWARD].saved())
    inside = 0.0
    for call in layer_calls(program):
        callee = costs[call.block]
        outer = dict(zip((o.name for o in callee.block.outputs), (v.name for v in call.results), strict=True))
        outer |= dict(zip((v.name for v in callee.block.inputs), call.operands, strict=True))
        inside += _split(callee.saved(), outer, kept)
    given = {output.role: output.name for output in costs[FORWARD].block.outputs}
    for name in costs.keys() - program.layer_blocks - {FORWARD}:
        taken = {v.name: given[v.role] for v in costs[name].block.inputs if v.role in given}
        inside += _split(costs[name].saved(), taken, kept)
    return inside + sum(kept.values())


def _split(saved: Mapping[str, float], outer: Mapping[str, str], kept: dict[str, float]) -> float:
    """Adds activations with an `outer` name to `kept` under that name; returns the bytes of all others."""
    kept.update({outer[name]: size for name, size in saved.items() if name in outer})
    return sum(size for name, size in saved.items() if name not in outer)


def runs_of(program: Program) -> dict[str, int]:
    """How often each block runs in a forward pass."""
    calls = Counter(layer.body for layer in program.layers)
    for block in program.blocks:
        if block.update is not None:
            calls[block.update] += calls[block.name]
    return {block.name: calls.get(block.name, 1) for block in program.blocks}


def _parameters(run: tuple[BlockCost, int], update: Update) -> tuple[int, int, int, int]:
    """Elements of a block's parameters: all, those that a token uses, those of a rank; and the rank's state bytes."""
    cost, count = run
    totals = [0, 0, 0, 0]
    for p, *elements in cost.elements():
        for i, number in enumerate((*elements, _state_bytes(p, cost.workload, update))):
            totals[i] += count * number
    whole, active, local, state = totals
    return whole, active, local, state


def _state_bytes(p: Parameter, workload: Workload, update: Update) -> int:
    """Bytes of a rank's part: fp32 master and gradient, optimizer states, plus a narrow copy below fp32; of a frozen
    parameter its weight."""
    shapes = (workload.shape(replace(p, layout=layout)) for layout in (p.weight, p.gradient, p.optimizer_state))
    weight, gradient, master = shapes
    narrow = DTYPE_BYTES[p.dtype]
    if p.frozen:
        return math.prod(weight) * narrow
    states = state_bytes(master, update, p.matrices)
    copy = math.prod(weight) * narrow if narrow < MASTER_BYTES else 0
    return (math.prod(master) + math.prod(gradient)) * MASTER_BYTES + states + copy


def _collective_traffic(runs: Sequence[tuple[BlockCost, int]]) -> list[Traffic]:
    """Traffic of the graphs' collectives, forward and backward, but for counts and what is too small to matter."""
    bytes_of: dict[tuple[str, int, str], float] = {}
    for block_cost, count in runs:
        meshes, experts = block_cost.workload.meshes, block_cost.block.experts
        for sent in (sent for _, cost in block_cost.costs for sent in cost.sent):
            if sent.purpose == "counts":
                continue
            key = (group_name(sent.axis, experts), meshes.size(sent.axis), sent.purpose)
            again = sent.forward if block_cost.block.recompute == "layer" else 0.0
            bytes_of[key] = bytes_of.get(key, 0.0) + count * (sent.bytes + again)
    most = max(bytes_of.values(), default=0.0)
    flows = [Traffic(group=g, ranks=n, purpose=what, bytes=b) for (g, n, what), b in bytes_of.items()]
    return [flow for flow in flows if flow.bytes > most / 1000]


def _parameter_traffic(runs: Sequence[tuple[BlockCost, int]], microbatches: int) -> list[Traffic]:
    """Traffic of weights and gradients (`sendings`)."""
    bytes_of: dict[tuple[str, int, str], float] = {}
    for cost, count in runs:
        for sent in sendings(cost.block, cost.workload, microbatches, cost.saved_parameters()):
            ranks = cost.workload.meshes.size(sent.axis)
            key = (group_name(sent.axis, cost.block.experts), ranks, sent.purpose)
            bytes_of[key] = bytes_of.get(key, 0.0) + count * (sent.forward + sent.backward)
    return [Traffic(group=g, ranks=n, purpose=what, bytes=b) for (g, n, what), b in bytes_of.items()]
