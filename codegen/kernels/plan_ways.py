"""How each product of a plan's experts is computed on one device: what a job's module is emitted with."""

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

FAMILIES: Mapping[str, str] = {"hip": "cdna", "a100": "ampere"}
"""The family of a device, by its kind or name, for the choice of tiles; any other device is "hopper"."""

KNOWN = ("a100", "h100", "h200", "b200", "gb200", "gb300", "mi300x")
"""Devices of moec's library that kernels run on."""

Experts = o.ExpertMlp | o.ExpertMlpPadded | o.MixtureMlp


@dataclass(frozen=True, slots=True)
class Target:
    """A device that kernels run on: its name, and its family ("hopper" and later, "ampere" or "cdna").

    `runnable` makes of chosen ways, of a dtype, rows, experts, widths and gatedness, those that run there; None for a
    device that is not here, where a library is taken to run if its kind of device can.
    """

    name: str
    family: str
    runnable: Callable[[Ways, str, int, int, tuple[int, int], bool], Ways] | None = field(default=None, compare=False)


def target_of(plan: Plan) -> Target:
    """The device that the plan was compiled for."""
    device = plan.spec.cluster.device
    return Target(device.name, FAMILIES.get(device.kind) or FAMILIES.get(device.name) or "hopper")


def ways_of(plan: Plan, block: Block, op: Experts, on: Target | None = None) -> Choice:
    """The ways of an op of experts over its even share of a micro-batch, on the plan's device or on another one.

    Tiles that were not tuned there are not taken, nor a library that no such device runs.
    """
    takes = takes_tuned(plan, on)
    on = on or target_of(plan)
    up = op.named(op.operands)["up"]
    experts, _, hidden, dim = shape_on_rank(plan.program, block, up)
    rows = rows_per_rank(plan, choices_per_token(block))
    tuned = plan.tiles.by_key() if plan.tiles is not None and takes else {}
    how = (block.scope[up].dtype, rows, experts, (dim, hidden), ACTIVATIONS[op.activation].gated)
    choice = choose(*how, device=on.name, family=on.family, tuned=tuned)
    if on.runnable is not None:
        return replace(choice, ways=on.runnable(choice.ways, *how))
    return replace(choice, ways=without_unfit_libraries(choice.ways, *how, on.family))


def takes_tuned(plan: Plan, on: Target | None = None) -> bool:
    """Whether the plan's own tiles are those of the device: its own one, or another one.

    A file may give its device any name; then the plan's tiles are taken to be for it, unless they name a known device.
    """
    if plan.tiles is None:
        return False
    name = (on or target_of(plan)).name
    unknown = on is None and name not in KNOWN and plan.tiles.device not in KNOWN
    return unknown or plan.tiles.device == name


def ways_text(plan: Plan, block: Block, op: Op, on: Target) -> str:
    """The last argument of the operator of an op of experts: `str` of its `Ways`."""
    assert isinstance(op, Experts)
    return str(ways_of(plan, block, op, on).ways)


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
