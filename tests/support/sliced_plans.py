"""A plan that no word of the language asks for yet: experts over `ep`, each cut or copied over a second axis, `etp`.

Rows go to their experts over `ep`, if it has several ranks; then every rank of an `etp` group gets the rows of all.
Where each rank has a slice of every expert's hidden width, the results are partial sums, which go back to the ranks of
their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from support.plans import moe_spec

import moec
from moec.codegen.emit.functions import EMISSIONS
from moec.codegen.emit.operators import emit_operator
from moec.codegen.plan import Plan, make_plan
from moec.passes.fuse import Fuse
from moec.passes.ir import Layout, Mesh, Meshes, Op, Parameter, Partial, Placing, Program, Shard, Value
from moec.passes.ir.op import layout_of
from moec.passes.ir.ops import ExpertMlp
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.verifier import check_program
from moec.passes.join_counts import JoinCounts
from moec.passes.pipeline import compile_program
from moec.passes.place.communicate import Communicate
from moec.passes.place.partition import Partition
from moec.passes.place.schedule import Schedule
from moec.passes.place.shard import ShardLayouts

EP, ETP = 2, 2
MESH = "experts[1..2]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedExpertMlp(ExpertMlp):
    """`expert_mlp` with every expert cut over `etp` along its hidden width; `copied`: whole on every rank of `etp`."""

    mnemonic: ClassVar[str] = "sliced_expert_mlp"
    resolved: ClassVar[Mapping[str, str]] = {"copied": ""}
    copied: bool

    def place(self, operands: list[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        given = self.named(operands)
        assert meshes.experts is not None
        axes = set(meshes.experts.wide_axes()) - {"etp"}
        rows, counts = Layout.of(dict.fromkeys(axes, Shard(0))), Layout.of(dict.fromkeys(axes, Shard(1)))
        wanted = {"rows": rows, "counts": counts, "weights": rows}
        sums = rows if self.copied else rows.replace("etp", Partial())
        return Placing(tuple(wanted.get(name) or layout_of(value) for name, value in given.items()), (sums,))


EMISSIONS[SlicedExpertMlp] = emit_operator


def sliced_plan(*, copied: bool = False, ep: int = EP, **options: object) -> Plan:
    """A model of `moe_spec` with a mesh of experts `ep × etp 2`, by default on 4 ranks."""
    spec = moe_spec(ranks=ep * ETP, ep=ep, **options)
    program = _sliced(compile_program(spec, stop_after="tensor_parallel").program, copied, ep)
    for each in (ShardLayouts(), Communicate(), Fuse(), JoinCounts(), Partition(), Schedule()):
        program = each.apply(program)
    check_program(program)
    return make_plan(spec, program, moec.__version__)


def _sliced(program: Program, copied: bool, ep: int) -> Program:
    meshes = tuple(m if m.name == "dense" else Mesh(m.name, (("ep", ep), ("etp", ETP))) for m in program.meshes)
    blocks = []
    for block in program.blocks:
        parameters = tuple(_whole_over_etp(p) if copied else p for p in block.parameters)
        ops = tuple(_with_slices(op, copied) for op in block.ops)
        blocks.append(replace(block, parameters=parameters, ops=ops))
    return replace(program, meshes=meshes, blocks=tuple(blocks))


def _whole_over_etp(p: Parameter) -> Parameter:
    return replace(p, shard=tuple((axis, dim) for axis, dim in p.shard if axis != "etp"))


def _with_slices(op: Op, copied: bool) -> Op:
    if not isinstance(op, ExpertMlp):
        return op
    given: dict[str, Any] = {field.name: getattr(op, field.name) for field in fields(op)}
    return SlicedExpertMlp(**given, copied=copied)
