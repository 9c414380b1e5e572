"""Ops of balance terms over the loads of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.op import Meshes, Op, Placing, Type, register, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChoices(Op):
    """The first choice of each token: experts `[batch, sequence, k]` → `[batch, sequence, 1]`.

    Counted, these are the c_e of Lepikhin et al. 2020 (arXiv 2006.16668, section 2.2 and algorithm 1): a count over all
    tokens, not over all k choices.
    """

    mnemonic: ClassVar[str] = "first_choices"
    takes: ClassVar[str] = "experts"
    gives: ClassVar[str] = "first"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants experts of each token")
        return (Type(shape=(*experts.shape[:-1], 1), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)
