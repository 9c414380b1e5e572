"""The values that must match on the ranks of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moec.passes.ir import Op, Program
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import BalancedAssignment, Capacity, ChooseTokens, SlotRows
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.ranks.checks import Complaint, MustMatch

TRAINS = "rank {other} trains and rank {one} evaluates: call `train()` or `eval()` on every rank"
COMPUTES = "rank {other} computes gradients and rank {one} does not: use `torch.no_grad` on every rank or on none"
WANTS = "ranks {one} and {other} want gradients of different parameters: call `requires_grad_` on every rank or on none"
GATHERS = "ranks {one} and {other} changed, parametrized or hooked different parameters: do it on every rank or on none"
LABELS = "rank {other} has labels and rank {one} none: give them on every rank or on none"
GIVEN = {
    "routes": "rank {other} has routes and rank {one} none: give them on every rank or on none",
    "segments": "rank {other} has segments and rank {one} none: give them on every rank; zeros are one text a sequence",
    "padding": "rank {other} has padding and rank {one} none: give it on every rank; zeros where no token is padding",
}
HOOKS = (
    "ranks differ in which parameters have hooks or are parametrized: a layer's gradients are then summed in every "
    "micro-batch; register them on every rank or on none"
)


class Claims(NamedTuple):
    """One rank's part in the agreement on a forward pass: its first error, and values that must match on all ranks."""

    complaint: Complaint | None
    matching: tuple[MustMatch, ...]


def batch_complaint(words: str) -> Complaint:
    """The error that `Limits.complaint` describes; its help follows a colon."""
    fault, _, help = words.partition(": ")
    return Complaint("MOE0702", fault, help)


def same_mode(training: bool, needed: Sequence[bool], gathered: Sequence[bool] = ()) -> tuple[MustMatch, ...]:
    """Modes that must match: whether ranks train, whether they compute gradients, and of which parameters.

    Ranks with different frozen parameters would start different sums of gradients. `gathered`: for each layer, whether
    the step has its weights already, and whether each pass sums its gradients in a step that collects others.
    """
    modes = {
        TRAINS: int(training),
        COMPUTES: int(torch.is_grad_enabled()),
        WANTS: hash(tuple(needed)),
        GATHERS: hash(tuple(gathered)),
    }
    return tuple(
        MustMatch("MOE0702", words, (number,), in_stage=words in (WANTS, GATHERS)) for words, number in modes.items()
    )


def same_inputs(labels: Tensor | None, extra: ExtraInputs) -> tuple[MustMatch, ...]:
    """Which of labels and extra inputs are given, which must match."""
    names = extra.by_name()
    matches = (MustMatch("MOE0702", words, (int(name in names),)) for name, words in GIVEN.items())
    return MustMatch("MOE0702", LABELS, (int(labels is not None),)), *matches


def same_shape(program: Program, inputs: str = "tokens") -> str:
    """The message for `inputs` of different shapes on the ranks, where this program needs one shape."""
    drawing = ["random numbers"] if program.block(FORWARD).input("sequences") is not None else []
    counting = [name for block in program.blocks for op in block.ops if (name := _token_dependent_part(op))]
    names = " and ".join(dict.fromkeys([*counting, *drawing]))
    return f"{inputs} have shapes from {{least}} to {{most}} on the ranks, and must have one: {names} follow from it"


def counts_own_tokens(program: Program) -> bool:
    """Whether an op depends on the number of one rank's tokens, so that every rank must have as many."""
    return any(_token_dependent_part(op) for block in program.blocks for op in block.ops)


def _token_dependent_part(op: Op) -> str:
    """Names the op's result that depends on the number of a rank's tokens; empty if there is none."""
    match op:
        case ChooseTokens() | BalancedAssignment():
            return "choices of experts" if op.group == "batch" else ""
        case Capacity():
            return "places of experts"
        case SlotRows():
            return "slots"
        case _:
            return ""
