"""What the ranks of a forward pass must agree on."""

from __future__ import annotations

from typing import NamedTuple

from moec.passes.ir import Op, Program
from moec.passes.ir.ops import BalancedAssignment, Capacity, ChooseTokens, SlotRows
from moec.runtime.job.checks import Complaint, MustMatch

SHAPES = "tokens have shapes from {least} to {most} on the ranks; capacities and jitter need one shape on all ranks"
KINDS = (
    "ranks differ in whether they train, have labels, routes, segments or padding, want gradients, and for which "
    "parameters: "
    "call `train()`, `no_grad` and `requires_grad_` on every rank or on none"
)

HOOKS = (
    "ranks differ in which parameters have hooks, which make a layer's gradients be summed in every micro-batch: "
    "register them on every rank or on none"
)


class Claims(NamedTuple):
    """What one rank says of a forward pass: its first error, and what must match on all ranks."""

    complaint: Complaint | None
    matching: tuple[MustMatch, ...]


def counts_own_tokens(program: Program) -> bool:
    """Whether places or a gathered group are computed from one rank's tokens, so that every rank must have as many."""
    return any(_counts_own_tokens(op) for block in program.blocks for op in block.ops)


def _counts_own_tokens(op: Op) -> bool:
    if isinstance(op, ChooseTokens | BalancedAssignment):
        return op.group == "batch"
    return isinstance(op, Capacity | SlotRows)
