"""Sums the costs of ops: per block, and per rank and training step of a placed Program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec, Update
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.weight_traffic import sendings
from moec.passes.ir import DTYPE_BYTES, Block, Op, Parameter, Program
from moec.passes.ir.interface import HANDED_ON, forwards, is_forward, layer_calls, scalar_blocks
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


def costs_of(
    program: Program, workload: Workload, known: Mapping[str, BlockCost] | None = None
) -> dict[str, BlockCost]:
    """The cost of one run of each block, by the block's name. `known`: those of a Program on the same meshes for the
    same workload, to be taken where blocks have the same ops."""
    of_ops = {id(cost.block.ops): cost for cost in (known or {}).values()}
    return {
        block.name: replace(of_ops[id(block.ops)], block=block)
        if id(block.ops) in of_ops
        else BlockCost.of(program, block, workload)
        for block in program.blocks
    }


def largest_load(program: Program, workload: Workload) -> float:
    """Rows of the busiest rank over the mean, in the most uneven layer."""
    bound = ((block, workload.bound_to(program, block)) for block in program.blocks)
    return max((of.skew(v) for block, of in bound for v in block.scope.values() if v.ragged is not None), default=1.0)


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
    most = costs if workload.is_even else costs_of(program, workload.planned_for("kept"))
    ranks = program.stages_by_rank
    total, active, _, _ = _parameters(runs_on(program, costs), spec.update)
    runs_of_ranks = {stages: runs_on(program, costs, stages) for stages in ranks}
    counts = [_parameters(runs, spec.update) for runs in runs_of_ranks.values()]
    traffic = [
        (
            *_collective_traffic(runs),
            *_parameter_traffic(runs, program.microbatches),
            *_stage_traffic(program, costs, stages),
        )
        for stages, runs in runs_of_ranks.items()
    ]
    return Tally(
        parameters=total,
        active_parameters=active,
        local_parameters=max(local for _, _, local, _ in counts),
        state_bytes=max(state for *_, state in counts),
        activation_bytes=max(activation_bytes(program, costs, stages) for stages in ranks),
        most_activation_bytes=max(activation_bytes(program, most, stages) for stages in ranks),
        sequences=workload.batch,
        tokens=workload.tokens,
        flops_per_token=model_flops(program, costs) / workload.tokens,
        traffic=max(traffic, key=lambda flows: sum(flow.bytes for flow in flows)),
        imbalance=largest_load(program, workload),
    )


def model_flops(program: Program, costs: Mapping[str, BlockCost]) -> float:
    """FLOPs of forward and backward over all ranks; `costs` are by the names of blocks, of an even load."""
    return sum(count * costs[name].model_flops() for name, count in runs_of(program).items())


def runs_on(
    program: Program, costs: Mapping[str, BlockCost], stages: Collection[int] | None = None
) -> list[tuple[BlockCost, int]]:
    """The blocks that a forward pass runs, each parameter in one of them, and how often (`runs_of`)."""
    runs = runs_of(program, stages)
    return [*zip(each_parameter_once(costs[name] for name in runs), runs.values(), strict=True)]


def each_parameter_once(costs: Iterable[BlockCost]) -> Iterator[BlockCost]:
    """The costs of blocks, without the parameters that an earlier one has too: of a tied embedding, which the first
    and the last stage use."""
    known: set[str] = set()
    for cost in costs:
        if is_forward(cost.block):
            new = tuple(p for p in cost.block.parameters if p.name not in known)
            known.update(p.name for p in new)
            if len(new) < len(cost.block.parameters):
                cost = replace(cost, block=replace(cost.block, parameters=new))
        yield cost


def activation_bytes(program: Program, costs: Mapping[str, BlockCost], stages: Sequence[int] | None = None) -> float:
    """Bytes of saved activations of a training step on one rank of `stages`, by default of all; `costs` are by the
    names of blocks.

    A layer's inputs and results are values of `forward`, and the inputs of the loss are outputs of `forward`: an
    activation that both blocks save counts once.
    """
    numbers = range(len(forwards(program))) if stages is None else stages
    return sum(_activation_bytes(program, costs, stage) for stage in numbers)


def _activation_bytes(program: Program, costs: Mapping[str, BlockCost], stage: int) -> float:
    blocks = forwards(program)
    forward = costs[blocks[stage].name]
    kept, inside = dict(forward.saved()), 0.0
    for call in layer_calls(program, [stage]):
        callee = costs[call.block]
        outer = dict(zip((o.name for o in callee.block.outputs), (v.name for v in call.results), strict=True))
        outer |= dict(zip((v.name for v in callee.block.inputs), call.operands, strict=True))
        inside += _split(callee.saved(), outer, kept)
    given = {output.role: output.name for output in forward.block.outputs}
    others = costs.keys() - program.layer_blocks - {block.name for block in blocks}
    for name in others if stage == len(blocks) - 1 else ():
        taken = {v.name: given[v.role] for v in costs[name].block.inputs if v.role in given}
        inside += _split(costs[name].saved(), taken, kept)
    return inside + sum(kept.values())


def _split(saved: Mapping[str, float], outer: Mapping[str, str], kept: dict[str, float]) -> float:
    """Adds activations with an `outer` name to `kept` under that name; returns the bytes of all others."""
    kept.update({outer[name]: size for name, size in saved.items() if name in outer})
    return sum(size for name, size in saved.items() if name not in outer)


def runs_of(program: Program, stages: Collection[int] | None = None) -> dict[str, int]:
    """The blocks that run in a forward pass and how often: of the whole model, or on the ranks of some `stages`."""
    blocks, calls = forwards(program), Counter(call.block for call in layer_calls(program, stages))
    for block in program.blocks:
        if block.update is not None:
            calls[block.update] += calls[block.name]
    calls.update(block.name for stage, block in enumerate(blocks) if stages is None or stage in stages)
    if stages is None or len(blocks) - 1 in stages:
        calls.update(scalar_blocks(program))
    return {block.name: calls[block.name] for block in program.blocks if calls[block.name]}


def _parameters(runs: Sequence[tuple[BlockCost, int]], update: Update) -> tuple[int, int, int, int]:
    """Elements of the parameters: all, those that a token uses, those of a rank; and the rank's state bytes."""
    totals = [0, 0, 0, 0]
    for cost, count in runs:
        for p, *elements in cost.elements():
            for i, number in enumerate((*elements, parameter_state_bytes(p, cost.workload, update))):
                totals[i] += count * number
    whole, active, local, state = totals
    return whole, active, local, state


def parameter_state_bytes(p: Parameter, workload: Workload, update: Update) -> int:
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


def message_bytes(cost: BlockCost) -> float:
    """Bytes of what a stage, whose `forward` has this cost, hands on to the next one."""
    values = (cost.block.output(role) for role in HANDED_ON)
    return cost.workload.bytes(*(value for value in values if value is not None))


def _stage_traffic(program: Program, costs: Mapping[str, BlockCost], stages: Sequence[int]) -> list[Traffic]:
    """Traffic with the ranks of other stages: outputs to the next stage, gradients of inputs to the one before, and the
    gradients of parameters that other stages use too."""
    blocks, ranks = forwards(program), program.stages_by_rank
    # Between a stage of these ranks and one of others, values go out or gradients go back.
    cuts = [stage for stage in range(len(blocks) - 1) if (stage in stages) != (stage + 1 in stages)]
    sent = sum(message_bytes(costs[blocks[stage].name]) for stage in cuts)
    flows = [Traffic(group="pp", ranks=len(ranks), purpose="send of tokens between stages", bytes=sent)] if sent else []
    tied, most = 0.0, 1
    for cost in each_parameter_once(costs[blocks[stage].name] for stage in stages):
        for p in cost.block.parameters:
            users = sum(any(p.name in {q.name for q in blocks[s].parameters} for s in rank) for rank in ranks)
            if users > 1 and not p.frozen:
                elements = math.prod(cost.workload.shape(replace(p, layout=p.optimizer_state)))
                tied, most = tied + 2 * elements * MASTER_BYTES * (users - 1) / users, max(most, users)
    if tied:
        flows.append(Traffic(group="pp", ranks=most, purpose="all_reduce of gradients", bytes=tied))
    return flows
