"""Lowers attention: projections, norms of queries and keys, positions, and the output projection."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moec.grammar.spec import Attention, Gqa, Mha, Mla, Moa, Model
from moec.passes.ir import Init, Matrices
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import PROJECTION, Builder, normal, residual_init
from moec.passes.lower.lower_images import window_numbers
from moec.passes.lower.lower_latent_attention import latent_heads
from moec.passes.lower.rotary import rotation, score_factor


def attend(
    b: Builder, model: Model, attention: Attention, h: str, marks: Mapping[str, str], context: int | None
) -> str:
    """Attention over h `[batch, sequence, dim]`; returns the name of its result, which the residual stream adds.

    `marks` has the layer's `segments` and `positions` where sequences are packed. `context` is the longest sequence,
    None where the file does not say it.
    """
    assert isinstance(attention, Gqa | Mha | Mla)
    make, span = latent_heads if isinstance(attention, Mla) else _heads, attention.span()
    q, k, v = make(b, model, attention, h, marks, context)  # type: ignore[arg-type]
    a = gated(b, model, attention, h, attended(b, model, attention, q, k, v, marks))
    heads, value_dim = b.scope[a].shape[2:]
    assert isinstance(heads, int)
    assert isinstance(value_dim, int)
    shape, init = (model.dim, heads, value_dim), residual_init(model.depth)
    out = b.parameter("attention.o.weight", shape, model.dtype, init, span, {"tp": 1}, PROJECTION)
    y = b.one(o.Linear, a, out, to="o", span=span, contract=2)
    return b.biased(y, "attention.o.bias", attention.span("bias")) if attention.bias == "all" else y


def attended(b: Builder, model: Model, attention: Attention, q: str, k: str, v: str, marks: Mapping[str, str]) -> str:
    """The values that queries attend to, `[batch, sequence, heads, width of v]`, from q, k and v as `attention` says.

    `marks` as in `attend`.
    """
    width, heads = (b.scope[q].shape[dim] for dim in (3, 2))
    assert isinstance(width, int)
    assert isinstance(heads, int)
    attributes = {"causal": attention.causal, "window": attention.window or 0, "scale": _scale(attention, width)}
    optional = dict(marks)
    if attention.grid is not None:
        optional["segments"] = window_numbers(b, model, attention.grid, v)
    if attention.sinks:
        line, zeros = attention.span("sinks"), Init(kind="zeros")
        optional["sinks"] = b.parameter(
            "attention.sinks", (heads,), model.subject.dtype_of("sinks"), zeros, line, {"tp": 0}
        )
    return b.one(o.Attention, q, k, v, optional=optional, to="attended", span=attention.span(), **attributes)


def gated(b: Builder, model: Model, attention: Attention, h: str, a: str) -> str:
    """Heads a, times the sigmoid of a projection of h where `output_gate` asks for it."""
    if attention.output_gate == "none":
        return a
    sizes = b.scope[a].shape[2:] if attention.output_gate == "element" else b.scope[a].shape[2:3]
    shape, line = [size for size in sizes if isinstance(size, int)], attention.span("output_gate")
    rows = Matrices(rows=len(shape), hidden=True)
    weight = b.parameter(
        "attention.output_gate.weight", (*shape, model.dim), model.dtype, normal(), line, {"tp": 0}, rows
    )  # fmt: skip
    logits = b.one(o.Linear, h, weight, to="gate", span=line)
    return b.one(o.GateHeads, a, logits, to="gated", span=line)


def _heads(
    b: Builder, model: Model, attention: Gqa | Mha, h: str, marks: Mapping[str, str], context: int | None
) -> tuple[str, str, str]:
    """Names of q, k and v `[batch, sequence, heads, head_dim]` of h `[batch, sequence, dim]`."""
    heads = attention.heads
    kv_heads = attention.kv_heads if isinstance(attention, Gqa) else heads
    q = project(b, model, attention, h, "q", heads)
    k = project(b, model, attention, h, "k", kv_heads)
    v = clipped(b, attention, "v", project(b, model, attention, h, "v", kv_heads))
    q, k = (placed(b, model, attention, name, x, marks, context) for name, x in (("q", q), ("k", k)))
    return q, k, v


def placed(
    b: Builder, model: Model, attention: Attention, name: str, x: str, marks: Mapping[str, str], context: int | None
) -> str:
    """Heads x of queries or keys after their norm, `clip` and rotary positions, in the order that the file says."""
    if attention.qk_norm_place == "after_rope":
        x = turned(b, attention, name, clipped(b, attention, name, x), marks, context)
        return normed(b, model, attention, name, x)
    x = clipped(b, attention, name, normed(b, model, attention, name, x))
    return turned(b, attention, name, x, marks, context)


def project(b: Builder, model: Model, attention: Gqa | Mha | Moa, h: str, name: str, heads: int) -> str:
    """A projection of h to so many heads, `[batch, sequence, heads, head_dim]`; with bias."""
    width, span = attention.head_dim or model.dim // attention.heads, attention.span()
    shape, heads_are_rows = (heads, width, model.dim), Matrices(rows=2, hidden=True)
    weight = b.parameter(f"attention.{name}.weight", shape, model.dtype, normal(), span, {"tp": 0}, heads_are_rows)
    projected = b.one(o.Linear, h, weight, to=name, span=span)
    if attention.bias != "none":
        projected = b.biased(projected, f"attention.{name}.bias", attention.span("bias"), shard={"tp": 0})
    return projected


def clipped(b: Builder, attention: Attention, name: str, x: str) -> str:
    """Heads x with every element within ± `clip`."""
    if attention.clip is None:
        return x
    return b.one(o.Clip, x, to=name, span=attention.span("clip"), limit=attention.clip)


def normed(b: Builder, model: Model, attention: Attention, name: str, x: str) -> str:
    """Heads x after the norm that `qk_norm` asks for."""
    line, shape = attention.span("qk_norm"), b.scope[x].shape[2:]
    if attention.qk_norm == "none":
        return x
    sizes = [size for size in (shape[1:] if attention.qk_norm == "head" else shape) if isinstance(size, int)]
    weight = b.parameter(f"attention.{name}_norm.weight", sizes, model.dtype, Init(kind="ones"), line)
    return b.one(o.RmsNorm, x, weight, to=name, span=line, eps=model.norm.eps)


def turned(b: Builder, attention: Attention, name: str, x: str, marks: Mapping[str, str], context: int | None) -> str:
    """Heads x with rotary positions, where there are any."""
    if attention.rope is None:
        return x
    width = b.scope[x].shape[3]
    assert isinstance(width, int)
    turning = rotation(attention.rope, width, context)
    return b.one(o.Rope, x, optional=marks, to=name, span=attention.rope.span(), **turning)


def _scale(attention: Attention, width: int) -> float:
    """The factor on scores of heads `width` wide; 0 for 1 / sqrt(width), the operator's default."""
    factor = score_factor(attention.rope)
    if attention.multiplier is None and factor == 1:
        return 0.0
    return factor * (attention.multiplier or 1 / math.sqrt(width))
