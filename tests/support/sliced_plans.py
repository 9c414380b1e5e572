"""Plans with a second axis of experts: `etp`, which cuts each of them, or copies them, for which there is no word.

Rows go to their experts over `ep`, if it has several ranks; then every rank of an `etp` group gets the rows of all.
Where each rank has a slice of every expert's hidden width, the results are partial sums, which go back to the ranks of
their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from support.plans import moe_plan, moe_spec

import moec
from moec.codegen.emit.functions import EMISSIONS
from moec.codegen.emit.operators import emit_operator
from moec.codegen.plan import Plan, make_plan
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.fuse import Fuse
from moec.passes.ir import Block, Layout, Meshes, Op, Parameter, Placing, Shard, Value
from moec.passes.ir.op import layout_of
from moec.passes.ir.ops import ExpertMlp
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.verifier import check_program
from moec.passes.join_counts import JoinCounts
from moec.passes.partition import Partition
from moec.passes.pipeline import compile_program
from moec.passes.place.communicate import Communicate
from moec.passes.place.schedule import Schedule
from moec.passes.place.shard import ShardLayouts

EP, ETP = 2, 2
MESH = "experts[1..2]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedExpertMlp(ExpertMlp):
    """`expert_mlp` with every expert whole on each rank of `etp`, for the rows of all of them."""

    mnemonic: ClassVar[str] = "copied_expert_mlp"
    resolved: ClassVar[Mapping[str, str]] = {}

    def place(self, operands: list[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        given = self.named(operands)
        assert meshes.experts is not None
        axes = set(meshes.experts.wide_axes()) - {"etp"}
        rows, counts = Layout.of(dict.fromkeys(axes, Shard(0))), Layout.of(dict.fromkeys(axes, Shard(1)))
        wanted = {"rows": rows, "counts": counts, "weights": rows}
        return Placing(tuple(wanted.get(name) or layout_of(value) for name, value in given.items()), (rows,))


EMISSIONS[CopiedExpertMlp] = emit_operator


def sliced_plan(*, copied: bool = False, ep: int = EP, **options: object) -> Plan:
    """A plan of `moe_spec` with a mesh of experts `ep × etp 2`, by default on 4 ranks."""
    given = {"ranks": ep * ETP, "ep": ep, "etp": ETP, **options}
    if not copied:
        return moe_plan(**given)
    spec = moe_spec(**given)
    program = compile_program(spec, stop_after="tensor_parallel").program
    program = replace(program, blocks=tuple(map(_with_copies, program.blocks)))
    for each in (
        ShardLayouts(),
        Communicate(),
        Fuse(),
        JoinCounts(),
        Partition(spec, choose_degrees(spec)),
        Schedule(),
    ):
        program = each.apply(program)
    check_program(program)
    return make_plan(spec, program, moec.__version__)


def _with_copies(block: Block) -> Block:
    parameters = tuple(map(_whole_over_etp, block.parameters))
    return replace(block, parameters=parameters, ops=tuple(map(_copied, block.ops)))


def _whole_over_etp(p: Parameter) -> Parameter:
    return replace(p, shard=tuple((axis, dim) for axis, dim in p.shard if axis != "etp"))


def _copied(op: Op) -> Op:
    if not isinstance(op, ExpertMlp):
        return op
    return CopiedExpertMlp(**{field.name: getattr(op, field.name) for field in fields(op)})
