"""Lowers attention: projections, norms of queries and keys, positions, and the output projection."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moec.grammar.spec import Attention, Gqa, Mha, Mla, Model
from moec.passes.ir import Init, Matrices
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import PROJECTION, Builder, normal, residual_init
from moec.passes.lower.lower_images import window_numbers
from moec.passes.lower.lower_latent_attention import latent_heads
from moec.passes.lower.rotary import rotation, score_factor


def attend(
    b: Builder, model: Model, attention: Attention, h: str, of_texts: Mapping[str, str], context: int | None
) -> str:
    """Attention over h `[batch, sequence, dim]`; returns the name of what it adds to the residual stream.

    `of_texts` has the layer's `segments` and `positions` where sequences are packed. `context` is the longest sequence,
    None where the file does not say it.
    """
    assert isinstance(attention, Gqa | Mha | Mla)
    make, span = latent_heads if isinstance(attention, Mla) else _heads, attention.span()
    q, k, v = make(b, model, attention, h, of_texts, context)  # type: ignore[arg-type]
    width, heads, value_dim = (b.scope[name].shape[dim] for name, dim in ((q, 3), (q, 2), (v, 3)))
    assert isinstance(width, int)
    assert isinstance(heads, int)
    assert isinstance(value_dim, int)
    how = {"causal": attention.causal, "window": attention.window or 0, "scale": _scale(attention, width)}
    beside = dict(of_texts)
    if attention.grid is not None:
        beside["segments"] = window_numbers(b, model, attention.grid, v)
    if attention.sinks:
        line, zeros = attention.span("sinks"), Init(kind="zeros")
        beside["sinks"] = b.parameter("attention.sinks", (heads,), model.dtype, zeros, line, {"tp": 0})
    a = b.one(o.Attention, q, k, v, beside=beside, to="attended", span=span, **how)
    shape, init = (model.dim, heads, value_dim), residual_init(model.depth)
    out = b.parameter("attention.o.weight", shape, model.dtype, init, span, {"tp": 1}, PROJECTION)
    y = b.one(o.Linear, a, out, to="o", span=span, contract=2)
    return b.biased(y, "attention.o.bias", attention.span("bias")) if attention.bias == "all" else y


def _heads(
    b: Builder, model: Model, attention: Gqa | Mha, h: str, of_texts: Mapping[str, str], context: int | None
) -> tuple[str, str, str]:
    """Names of q, k and v `[batch, sequence, heads, head_dim]` of h `[batch, sequence, dim]`."""
    heads = attention.heads
    kv_heads = attention.kv_heads if isinstance(attention, Gqa) else heads
    width = attention.head_dim or model.dim // heads
    span = attention.span()

    def project(name: str, count: int) -> str:
        shape = (count, width, model.dim)
        heads_are_rows = Matrices(rows=2, hidden=True)
        weight = b.parameter(f"attention.{name}.weight", shape, model.dtype, normal(), span, {"tp": 0}, heads_are_rows)
        projected = b.one(o.Linear, h, weight, to=name, span=span)
        if attention.bias != "none":
            projected = b.biased(projected, f"attention.{name}.bias", attention.span("bias"), shard={"tp": 0})
        if attention.clip is None:
            return projected
        return b.one(o.Clip, projected, to=name, span=attention.span("clip"), limit=attention.clip)

    def normed(name: str, count: int) -> str:
        projected, line = project(name, count), attention.span("qk_norm")
        if attention.qk_norm == "none":
            return projected
        shape = (width,) if attention.qk_norm == "head" else (count, width)
        weight = b.parameter(f"attention.{name}_norm.weight", shape, model.dtype, Init(kind="ones"), line)
        return b.one(o.RmsNorm, projected, weight, to=name, span=line, eps=model.norm.eps)

    q, k, v = normed("q", heads), normed("k", kv_heads), project("v", kv_heads)
    if attention.rope is not None:
        line, turning = attention.rope.span(), rotation(attention.rope, width, context)
        q = b.one(o.Rope, q, beside=of_texts, to="q", span=line, **turning)
        k = b.one(o.Rope, k, beside=of_texts, to="k", span=line, **turning)
    return q, k, v


def _scale(attention: Attention, width: int) -> float:
    """The factor on scores of heads `width` wide; 0 for 1 / sqrt(width), the operator's default."""
    factor = score_factor(attention.rope)
    if attention.multiplier is None and factor == 1:
        return 0.0
    return factor * (attention.multiplier or 1 / math.sqrt(width))
