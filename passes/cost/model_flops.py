"""FLOPs of a model for batches of any lengths: attention's products grow with the square of a text's length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moec.grammar.spec import Spec
from moec.passes.cost.totals import costs_of, runs_of
from moec.passes.ir import Program
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Attention
from moec.passes.ir.ops.attention_ops import Reach
from moec.passes.ir.work.workload import Workload


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward over all ranks, without recomputation and with the causal half of attention.

    `per_token`: of all but attention's products with keys; `per_key`: of these, for each key that a token attends to,
    by how far the layer reaches. A model of images, whose sequences have one length, has all in `per_token`.
    """

    per_token: float
    per_key: Mapping[Reach, float]

    @classmethod
    def of_program(cls, program: Program, spec: Spec) -> ModelFlops:
        """The FLOPs of a placed Program, for the workload of its file."""
        workload = Workload.of(spec, program).even
        costs, total, attended = costs_of(program, workload), 0.0, defaultdict[Reach, float](float)
        reaches = reaches_of(program)
        for name, count in runs_of(program).items():
            for op, flops in costs[name].flops_of_ops():
                total += count * flops
                if isinstance(op, Attention) and op.reach in reaches:
                    attended[op.reach] += count * flops
        rest = total - sum(attended.values())
        per_key = {reach: flops / (workload.batch * reach.keys(workload.sequence)) for reach, flops in attended.items()}
        return cls(rest / workload.tokens, dict(sorted(per_key.items())))

    def of(self, tokens: float, counts: Sequence[float]) -> float:
        """FLOPs of a batch, from what `AttendedKeys` counted of it; of `tokens` where it counted none."""
        real, *keys = counts
        attended = sum(flops * n for flops, n in zip(self.per_key.values(), keys, strict=True))
        return self.per_token * (real or tokens) + attended


def reaches_of(program: Program) -> tuple[Reach, ...]:
    """How far the attention of its layers reaches, each once; none of a model of images."""
    if program.block(FORWARD).input("tokens") is None:
        return ()
    reaches = {op.reach for block in program.blocks for op in block.ops if isinstance(op, Attention)}
    return tuple(sorted(reaches))
