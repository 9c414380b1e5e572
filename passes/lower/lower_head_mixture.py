"""Lowers `moa`: each token chooses groups of query heads, and all groups share keys and values.

A token has `heads · k` query heads whatever it chooses, so attention itself is grouped-query attention.
"""

from __future__ import annotations

from collections.abc import Mapping

from moec.grammar.spec import Moa, Model, Subject
from moec.passes.ir import Init, Matrices, Output, Role
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder, normal, residual_init
from moec.passes.lower.gates import lower_gate
from moec.passes.lower.lower_attention import attended, clipped, placed, project
from moec.passes.lower.lower_balance import Routed, balance_terms

QUERIES, OUTPUTS = Matrices(1, 2, hidden=True), Matrices(1, 1, hidden=True)
"""Every group is a matrix of its own."""


def attend_by_groups(
    b: Builder,
    model: Model,
    moa: Moa,
    h: str,
    by_role: Mapping[Role, str],
    marks: Mapping[str, str],
    context: int | None,
) -> tuple[str, list[Output]]:
    """Attention over h `[batch, sequence, dim]`: the name of its result, the outputs with the counts of choices of each
    group, and the balance term of its gate if it has one.

    `by_role` names the layer's inputs beside the residual stream. `marks` and `context` are as in `attend`.
    """
    routed = _routed(b, model.subject, moa, h, by_role)
    width, span, e, w = moa.head_dim or model.dim // moa.heads, moa.span(), routed.e, routed.gated.w
    if moa.normalize:
        w = b.one(o.DetachedShares, w, to="shares", span=moa.span("normalize"))
    shape = (moa.experts, moa.heads, width, model.dim)
    weight = b.parameter("attention.q.weight", shape, model.dtype, normal(), span, {"tp": 1}, QUERIES)
    bias = {}
    if moa.bias != "none":
        line, zeros = moa.span("bias"), Init(kind="zeros")
        bias["bias"] = b.parameter("attention.q.bias", shape[:3], model.dtype, zeros, line, {"tp": 1}, Matrices(1))
    some_are_none = routed.some_are_none
    q = b.one(o.ChosenHeads, h, e, weight, optional=bias, to="q", span=span, some_are_none=some_are_none)
    kv_heads = moa.kv_heads or moa.heads
    k = project(b, model, moa, h, "k", kv_heads)
    v = clipped(b, moa, "v", project(b, model, moa, h, "v", kv_heads))
    q, k = (placed(b, model, moa, name, x, marks, context) for name, x in (("q", q), ("k", k)))
    a = attended(b, model, moa, q, k, v, marks)
    shape, init = (moa.experts, model.dim, moa.heads, width), residual_init(model.depth)
    out = b.parameter("attention.o.weight", shape, model.dtype, init, span, {"tp": 2}, OUTPUTS)
    y = b.one(o.MixHeads, a, e, w, out, to="o", span=span, some_are_none=some_are_none)
    y = b.biased(y, "attention.o.bias", moa.span("bias")) if moa.bias == "all" else y
    counts = b.one(o.CountGroups, e, to="head_counts", span=moa.gate.span(), groups=moa.experts)
    balance = (Output(name, "balance") for name in balance_terms(b, moa, routed))
    return y, [Output(counts, "head_counts"), *balance]


def _routed(b: Builder, subject: Subject, moa: Moa, h: str, by_role: Mapping[Role, str]) -> Routed:
    """The groups of each token, −1 for padding tokens."""
    gated = lower_gate(b, subject, moa.gate, moa.experts, h, by_role, moa.group, for_heads=True).rounded(
        b, subject, moa.gate.span()
    )
    e, real = gated.e, (by_role["real"],) if "real" in by_role else ()
    if real:
        e = b.one(o.MaskChoices, e, *real, to="e", span=moa.gate.span())
    segments = by_role.get("segments") if moa.group == "sequence" else None
    return Routed(gated=gated, e=e, kept=e, experts=moa.experts, real=real, segments=segments)
