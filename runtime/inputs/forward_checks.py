"""What the ranks of a forward pass must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moec.passes.ir import Op, Program
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import BalancedAssignment, Capacity, ChooseTokens, SlotRows
from moec.runtime.inputs.beside import Beside
from moec.runtime.ranks.checks import Complaint, MustMatch

TRAINS = "rank {other} trains and rank {one} evaluates: call `train()` or `eval()` on every rank"
COMPUTES = "rank {other} computes gradients and rank {one} does not: use `torch.no_grad` on every rank or on none"
WANTS = "ranks {one} and {other} want gradients of different parameters: call `requires_grad_` on every rank or on none"
LABELS = "rank {other} has labels and rank {one} none: give them on every rank or on none"
GIVEN = {
    "routes": "rank {other} has routes and rank {one} none: give them on every rank or on none",
    "segments": "rank {other} has segments and rank {one} none: give them on every rank; zeros are one text a sequence",
    "padding": "rank {other} has padding and rank {one} none: give it on every rank; zeros where no token is padding",
}
HOOKS = (
    "ranks differ in which parameters have hooks, which make a layer's gradients be summed in every micro-batch: "
    "register them on every rank or on none"
)


class Claims(NamedTuple):
    """What one rank says of a forward pass: its first error, and what must match on all ranks."""

    complaint: Complaint | None
    matching: tuple[MustMatch, ...]


def batch_complaint(words: str) -> Complaint:
    """The error that `Limits.complaint` describes; a way out stands behind a colon."""
    fault, _, help = words.partition(": ")
    return Complaint("MOE0702", fault, help)


def same_mode(training: bool, needed: Sequence[bool]) -> tuple[MustMatch, ...]:
    """What the ranks of a forward pass agree on: whether they train, and gradients, of which parameters.

    Ranks with different frozen parameters would start different sums of gradients, and ranks whose parameters were
    changed between micro-batches would gather weights that others have kept.
    """
    of_modes = ((TRAINS, int(training)), (COMPUTES, int(torch.is_grad_enabled())), (WANTS, hash(tuple(needed))))
    return tuple(MustMatch("MOE0702", words, (number,)) for words, number in of_modes)


def same_inputs(labels: Tensor | None, beside: Beside) -> tuple[MustMatch, ...]:
    """What a batch has on all ranks or on none."""
    given = beside.given()
    found = (MustMatch("MOE0702", words, (int(name in given),)) for name, words in GIVEN.items())
    return MustMatch("MOE0702", LABELS, (int(labels is not None),)), *found


def same_shape(program: Program, what: str = "tokens") -> str:
    """The message where ranks have `what` of different shapes, and this program needs one shape."""
    drawn = ["random numbers"] if program.block(FORWARD).input("sequences") is not None else []
    found = [name for block in program.blocks for op in block.ops if (name := _counts_own_tokens(op))]
    names = " and ".join(dict.fromkeys([*found, *drawn]))
    return f"{what} have shapes from {{least}} to {{most}} on the ranks, and must have one: {names} follow from it"


def counts_own_tokens(program: Program) -> bool:
    """Whether places or a gathered group are computed from one rank's tokens, so that every rank must have as many."""
    return any(_counts_own_tokens(op) for block in program.blocks for op in block.ops)


def _counts_own_tokens(op: Op) -> str:
    """What of the op is computed from the number of a rank's tokens, or nothing."""
    match op:
        case ChooseTokens() | BalancedAssignment():
            return "choices of experts" if op.group == "batch" else ""
        case Capacity():
            return "places of experts"
        case SlotRows():
            return "slots"
        case _:
            return ""
