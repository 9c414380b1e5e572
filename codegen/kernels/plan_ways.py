"""The way in which each product of a plan's experts is computed on one device, as emitted in a job's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from moec.codegen.kernels.library_rule import without_unfit_libraries
from moec.codegen.kernels.stored_tiles import Choice, choose
from moec.codegen.kernels.tiles import Ways
from moec.codegen.plan import Plan
from moec.passes.ir import Block, Op, Program, local_shape
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.mixture_values import choices_per_token
from moec.passes.ir.work.workload import Workload

FAMILIES: Mapping[str, str] = {"hip": "cdna", "a100": "ampere", "rtx_4090": "ampere"}
"""The family of a device, by its kind or name, for the choice of tiles; any other device is "hopper"."""

KNOWN = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x")
"""Devices of moec's library that kernels run on."""

Experts = o.ExpertMlp | o.ExpertMlpPadded | o.MixtureMlp


@dataclass(frozen=True, slots=True)
class Target:
    """A device that kernels run on: its name, and its family ("hopper" and later, "ampere" or "cdna").

    `runnable` replaces the chosen ways, for a dtype, rows, experts, widths and gatedness, by ways that run there; None
    for a device that is not here, where a library counts as runnable if its kind of device can run it.
    """

    name: str
    family: str
    runnable: Callable[[Ways, str, int, int, tuple[int, int], bool], Ways] | None = field(default=None, compare=False)


def target_of(plan: Plan) -> Target:
    """The device that the plan was compiled for."""
    device = plan.spec.cluster.device
    return Target(device.name, FAMILIES.get(device.kind) or FAMILIES.get(device.name) or "hopper")


def ways_of(plan: Plan, block: Block, op: Experts, target: Target | None = None) -> Choice:
    """The ways of an op of experts over its even share of a micro-batch, on the plan's device or on another one.

    Excludes tiles that were tuned for another device, and a library that no such device runs.
    """
    may_use_tuned = takes_tuned(plan, target)
    target = target or target_of(plan)
    up = op.named(op.operands)["up"]
    experts, _, hidden, dim = shape_on_rank(plan.program, block, up)
    rows = rows_per_rank(plan, choices_per_token(block))
    tuned = plan.tiles.by_key() if plan.tiles is not None and may_use_tuned else {}
    product = (block.scope[up].dtype, rows, experts, (dim, hidden), ACTIVATIONS[op.activation].gated)
    choice = choose(*product, device=target.name, family=target.family, tuned=tuned)
    if target.runnable is not None:
        return replace(choice, ways=target.runnable(choice.ways, *product))
    return replace(choice, ways=without_unfit_libraries(choice.ways, *product, target.family))


def takes_tuned(plan: Plan, target: Target | None = None) -> bool:
    """Whether the plan's tiles were tuned on the device that it was compiled for, or on `target`.

    A file may give its device any name; then the plan's tiles count as tuned on it, unless they name a known device.
    """
    if plan.tiles is None:
        return False
    name = (target or target_of(plan)).name
    unknown = target is None and name not in KNOWN and plan.tiles.device not in KNOWN
    return unknown or plan.tiles.device == name


def ways_text(plan: Plan, block: Block, op: Op, target: Target) -> str:
    """The last argument of the operator of an op of experts: `str` of its `Ways`."""
    assert isinstance(op, Experts)
    return str(ways_of(plan, block, op, target).ways)


def tokens_per_rank(plan: Plan) -> int:
    """Tokens of a micro-batch (without `train`, of a sequence per data-parallel rank), over the ranks; at least 1."""
    return max(1, Workload.of_microbatch(plan.spec, plan.program).tokens // plan.world_size)


def rows_per_rank(plan: Plan, k: int) -> int:
    """Rows that one rank's experts receive if all experts are equally loaded."""
    return tokens_per_rank(plan) * k


def shape_on_rank(program: Program, block: Block, operand: str) -> tuple[int, ...]:
    """The shape of one rank's part of an operand, without dims that only a run knows."""
    value = block.scope[operand]
    assert value.layout is not None
    shape = local_shape(value.shape, value.layout, program.meshes_of(block))
    return tuple(dim for dim in shape if isinstance(dim, int))
