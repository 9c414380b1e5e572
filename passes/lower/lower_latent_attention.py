"""Lowers multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) to queries, keys and values.

Latent vectors are normed as in DeepSeek-V2's and V3's code. Heads are made from whole latent vectors: `tp` cuts the
projections that make them, and every rank has those to latent vectors.
"""

from __future__ import annotations

from collections.abc import Mapping

from moec.grammar.spec import Mla, Model
from moec.passes.ir import Init, Matrices
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import PROJECTION, Builder, normal
from moec.passes.lower.rotary import rotation

HEADS_ARE_ROWS = Matrices(rows=2, hidden=True)


def latent_heads(
    b: Builder, model: Model, attention: Mla, h: str, marks: Mapping[str, str], context: int | None
) -> tuple[str, str, str]:
    """Names of q, k `[batch, sequence, heads, nope_dim + rope_dim]` and v `[…, value_dim]` of h `[…, dim]`.

    A head's query and key have `nope_dim` dims without positions, then `rope_dim` with them; the latter part of a key
    is one vector for all heads (equations 14 to 17).
    """
    span, heads, nope_dim, rope_dim = attention.span(), attention.heads, attention.nope_dim, attention.rope_dim

    def latent(name: str, rank: int) -> str:
        """The normed latent vector (equations 9 and 12)."""
        shape = (rank, model.dim)
        weight = b.parameter(f"attention.{name}.weight", shape, model.dtype, normal(), span, matrices=PROJECTION)
        down = biased(b.one(o.Linear, h, weight, to=name, span=span), name)
        scale = b.parameter(f"attention.{name}_norm.weight", (rank,), model.dtype, Init(kind="ones"), span)
        return b.one(o.RmsNorm, down, scale, to=name, span=span, eps=attention.latent_eps or model.norm.eps)

    def biased(x: str, name: str) -> str:
        if attention.bias == "none":
            return x
        return b.biased(x, f"attention.{name}.bias", attention.span("bias"))

    def projected(name: str, x: str, rank: int, width: int) -> str:
        shape = (heads, width, rank)
        weight = b.parameter(
            f"attention.{name}.weight", shape, model.dtype, normal(), span, {"tp": 0}, HEADS_ARE_ROWS
        )  # fmt: skip
        return b.one(o.Linear, x, weight, to=name, span=span)

    if attention.q_rank is None:
        q = projected("q", h, model.dim, nope_dim + rope_dim)
    else:
        q = projected("q", latent("q_down", attention.q_rank), attention.q_rank, nope_dim + rope_dim)
    kv = latent("kv_down", attention.kv_rank)
    k, v = projected("k", kv, attention.kv_rank, nope_dim), projected("v", kv, attention.kv_rank, attention.value_dim)
    shape = (1, rope_dim, model.dim)
    weight = b.parameter("attention.k_rope.weight", shape, model.dtype, normal(), span, matrices=HEADS_ARE_ROWS)
    shared = biased(b.one(o.Linear, h, weight, to="k_rope", span=span), "k_rope")
    if attention.rope is not None:
        line, rotary = attention.rope.span(), rotation(attention.rope, rope_dim, context)
        q = b.one(o.Rope, q, optional=marks, to="q", span=line, **{**rotary, "start": nope_dim, "width": rope_dim})
        shared = b.one(o.Rope, shared, optional=marks, to="k_rope", span=line, **rotary)
    return q, b.one(o.JoinShared, k, shared, to="k", span=span), v
