"""Rules inside of one mixture of attention heads: its gate, and what balances it."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.checking.mixture_rules import balanced, choice, unlearned
from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, labels_at
from moec.grammar.spec import DeviceLoss, Moa
from moec.grammar.spec.gates import HEAD_GATES


def head_mixture(moa: Moa) -> Iterator[Diagnostic]:
    """The gate against the groups of heads, and its balance terms against the gate."""
    gate = moa.gate
    if not gate.for_heads:
        yield diagnose(
            "MOE0333",
            gate.span(),
            f"`{gate.word}` does not give each token k groups of heads",
            labels=labels_at((moa.span("experts"), "each token attends with the heads of k of these groups")),
            help=f"use one of {', '.join(sorted(kind.word for kind in HEAD_GATES))}",
        )
        return
    yield from choice(gate, moa.experts, moa.span("experts"))
    yield from unlearned(gate, moa.experts)
    yield from balanced(moa)
    for term in moa.balance:
        if isinstance(term, DeviceLoss):
            message = "`device_loss` balances ranks, and every rank has all groups of heads"
            yield diagnose("MOE0334", term.span(), message, help="use `switch_loss`")
