"""What a placed Program amounts to per rank and step: parameters, their memory, arithmetic, bytes on the wire."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from moec.grammar.spec import Spec, Zipf
from moec.passes.ir import DTYPE_BYTES, Block, Mesh, Parameter, Program, local_shape
from moec.passes.ir.mesh import group_name
from moec.passes.ir.op import layout_of, size_of
from moec.passes.ir.ops import (
    AllToAll,
    AllToAllPadded,
    Call,
    Collective,
    ExchangeCounts,
    KeepChoices,
    Permute,
    PermuteDynamic,
    PermutePadded,
    Route,
)

NOMINAL_SEQUENCE = 1024
"""Tokens of a sequence where a `layer` file says nothing: its own model decides."""


def sequence_of(spec: Spec) -> int:
    """Tokens of a sequence, to count costs with."""
    return spec.sequence or NOMINAL_SEQUENCE


MASTER_BYTES = 4
"""Parameters are fp32, and so are the sums of their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends over one group in a training step, and what for."""

    group: str
    ranks: int
    purpose: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts are exact; traffic is that of an even load, and `imbalance` says how uneven `train.routing` is.

    `flops_per_token` is forward and backward (twice forward), the causal half of attention, without recomputation.
    `imbalance` is the rows of the busiest rank over the mean, experts placed in order, the worst over layers.
    `state_bytes` are fp32 masters, their gradients and AdamW's two moments, and narrow copies where layers compute so.
    """

    parameters: int
    active_parameters: int
    local_parameters: int
    state_bytes: int
    tokens: int
    flops_per_token: float
    traffic: tuple[Traffic, ...]
    imbalance: float


def tally(program: Program, spec: Spec) -> Tally:
    """Adds up a Program that went through every pass, over `train.batch` sequences (1 per rank if unstated).

    A `layer` file without `train` counts `NOMINAL_SEQUENCE` tokens to a sequence.
    """
    ranks = program.mesh("dense").ranks
    sequence = sequence_of(spec)
    batch = spec.train.batch if spec.train else ranks
    runs = [(block, count) for block, count in _runs(program).items() if count]
    total = active = local = state = 0
    flops = 0
    for name, count in runs:
        block = program.block(name)
        sizes = _sizes(program, block, batch, sequence)
        for p in block.parameters:
            elements = size_of(p.shape, {})
            held = _local_elements(program, block, p)
            total += count * elements
            active += count * int(elements * _used_share(block, p))
            local += count * held
            state += count * held * _state_bytes(p)
        flops += count * sum(op.flops(block.operands(op), sizes) for op in block.ops)
    tokens = batch * sequence
    return Tally(
        parameters=total,
        active_parameters=active,
        local_parameters=local,
        state_bytes=state,
        tokens=tokens,
        flops_per_token=3 * flops / tokens,
        traffic=(
            *_collective_traffic(program, dict(runs), batch, sequence),
            *_gradient_traffic(program, dict(runs)),
        ),
        imbalance=max((_imbalance(program, program.block(name), spec) for name, _ in runs), default=1.0),
    )


def _imbalance(program: Program, block: Block, spec: Spec) -> float:
    """Busiest rank over mean for the loads that `train.routing` says to plan for (uniform where it says nothing)."""
    experts = next((op.num_experts for op in block.ops if isinstance(op, Permute)), None)
    if experts is None:
        return 1.0  # rows stay on their rank, or every expert has as many places
    routing = spec.train.routing if spec.train else None
    exponent = routing.s if isinstance(routing, Zipf) else 0.0
    loads = [float(rank) ** -exponent for rank in range(1, experts + 1)]
    held = experts // _mesh_of(program, block, "ep").size("ep")
    busiest: float = max(sum(loads[first : first + held]) for first in range(0, experts, held))
    mean: float = sum(loads) * held / experts
    return busiest / mean


def _runs(program: Program) -> dict[str, int]:
    """How often each block runs in a forward pass."""
    calls = Counter(op.block for op in program.block("forward").ops if isinstance(op, Call))
    return {block.name: calls.get(block.name, 1) for block in program.blocks}


def _sizes(program: Program, block: Block, batch: int, sequence: int) -> dict[str, int]:
    """What symbols in shapes stand for, over all ranks; rows and places of experts that are all equally busy."""
    k = next((op.k for op in block.ops if isinstance(op, Route)), 1)
    dense = program.meshes_of(block).dense
    rows = batch * sequence * k
    sizes = {"batch": batch, "sequence": sequence, "rows": rows}
    sizes |= {"pieces": dense.size("tp"), "shares": dense.size("dp")}
    for op in block.ops:
        match op:
            case PermutePadded():
                groups, capacity, tokens = _capacity(op, op.num_experts, dense, batch, sequence, k)
                sizes["places"] = dense.ranks * groups * min(capacity, tokens)
            case PermuteDynamic():
                sizes["places"] = -(-rows // op.num_experts)
            case KeepChoices():
                experts = block.operands(op)[1].shape[3]
                assert isinstance(experts, int)
                groups, capacity, _ = _capacity(op, experts, dense, batch, sequence, k)
                sizes["rows"] = min(
                    rows, experts * capacity * groups * (dense.size("dp") if op.group != "batch" else 1)
                )
    return sizes


def _capacity(
    op: PermutePadded | KeepChoices, experts: int, dense: Mesh, batch: int, sequence: int, k: int
) -> tuple[int, int, int]:
    """In training: a rank's routing groups, an expert's capacity in one, and the rank's tokens of one."""
    dp, tp = dense.size("dp"), dense.size("tp")
    groups = max(1, batch // dp) if op.group == "sequence" else 1
    tokens = batch * sequence // (dp * tp * groups)
    whole = tokens * tp * (dp if op.group == "batch" else 1)
    return groups, max(op.least, -(-op.parts * k * whole // (op.whole * experts))), tokens


def _mesh_of(program: Program, block: Block, axis: str) -> Mesh:
    meshes = program.meshes_of(block)
    if meshes.experts is not None and meshes.experts.size(axis) > 1:
        return meshes.experts
    return meshes.dense


def _local_elements(program: Program, block: Block, p: Parameter) -> int:
    return size_of(local_shape(p.shape, layout_of(p), program.meshes_of(block)), {})


def _used_share(block: Block, p: Parameter) -> float:
    """Which part of a parameter one token meets: k of the experts, and everything else."""
    if not p.name.startswith("moe.experts."):
        return 1.0
    k = next(op.k for op in block.ops if isinstance(op, Route))
    experts = p.shape[0]
    assert isinstance(experts, int)
    return k / experts


def _state_bytes(p: Parameter) -> int:
    """A master, its gradient and AdamW's two moments, all fp32, and the narrow copy that a step computes with."""
    narrow = DTYPE_BYTES[p.dtype]
    return 4 * MASTER_BYTES + (narrow if narrow < MASTER_BYTES else 0)


def sent_bytes(program: Program, block: Block, op: Collective, batch: int, sequence: int) -> tuple[float, float]:
    """Bytes that one rank sends in one run of a collective, forward and backward, with every expert equally loaded.

    `batch` counts the sequences of all ranks.
    """
    moved = block.operands(op)[0]
    meshes = program.meshes_of(block)
    ranks = meshes.size(op.axis)
    sizes = _sizes(program, block, batch, sequence)
    assert moved.layout is not None
    if moved.ragged:
        # Rows are counted over all experts and all ranks, and every rank has as many.
        volume = size_of(moved.shape[1:], sizes) / meshes.dense.ranks
    elif moved.is_row_counts:
        volume = size_of(moved.shape, {"sources": 1})
    else:
        others = (axis for axis in moved.layout.sharded_axes() if axis != op.axis or isinstance(op, AllToAllPadded))
        volume = size_of(moved.shape, sizes) / math.prod(meshes.size(axis) for axis in others)
    part = volume * DTYPE_BYTES[moved.dtype] * (ranks - 1) / ranks
    forward, backward = op.sends
    return forward * part, 0 if moved.dtype == "int64" else backward * part


def _collective_traffic(program: Program, runs: Mapping[str, int], batch: int, sequence: int) -> list[Traffic]:
    """What the graphs move, forward and backward; what is a thousandth of the most (counts, scalars) is left out."""
    sent: dict[tuple[str, int, str], float] = {}
    for name, count in runs.items():
        block = program.block(name)
        for op in block.ops:
            if isinstance(op, Collective):
                ranks = program.meshes_of(block).size(op.axis)
                key = (group_name(op.axis, block.experts), ranks, _purpose(op))
                sent[key] = sent.get(key, 0.0) + count * sum(sent_bytes(program, block, op, batch, sequence))
    most = max(sent.values(), default=0.0)
    flows = [Traffic(group=g, ranks=n, purpose=what, bytes=b) for (g, n, what), b in sent.items()]
    return [flow for flow in flows if flow.bytes > most / 1000]


def _purpose(op: Collective) -> str:
    """What a collective is listed under: the weights of rows under the rows that they travel with."""
    if isinstance(op, AllToAll):
        return "all_to_all of rows"
    return "counts" if isinstance(op, ExchangeCounts) else "activations"


def _gradient_traffic(program: Program, runs: Mapping[str, int]) -> list[Traffic]:
    """A ring all-reduce sends 2(n−1)/n of what it sums."""
    sent: dict[tuple[str, int], float] = {}
    for name, count in runs.items():
        block = program.block(name)
        for p in block.parameters:
            held = _local_elements(program, block, p) * MASTER_BYTES
            for axis in p.sum_over or ():
                ranks = _mesh_of(program, block, axis).size(axis)
                group = (group_name(axis, block.experts), ranks)
                sent[group] = sent.get(group, 0.0) + count * held * 2 * (ranks - 1) / ranks
    return [Traffic(group=g, ranks=n, purpose="all_reduce of gradients", bytes=b) for (g, n), b in sent.items()]
