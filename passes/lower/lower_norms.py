"""Lowers norms, and the norms and residual sums around a layer's sublayers (attention, feed-forward)."""

from __future__ import annotations

from moec.grammar.spec import Model, RmsNorm
from moec.passes.ir import Init
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder


def norm(b: Builder, model: Model, x: str, name: str, to: str = "h") -> str:
    """The model's norm of x `[batch, sequence, dim]`, with parameters under `name`; returns the result's name."""
    norm, span = model.norm, model.norm.span()
    weight = b.parameter(f"{name}.weight", (model.dim,), model.dtype, Init(kind="ones"), span)
    if isinstance(norm, RmsNorm):
        return b.one(o.RmsNorm, x, weight, to=to, span=span, eps=norm.eps)
    zeros = Init(kind="zeros")
    bias = {"bias": b.parameter(f"{name}.bias", (model.dim,), model.dtype, zeros, span)} if norm.bias else {}
    return b.one(o.LayerNorm, x, weight, optional=bias, to=to, span=span, eps=norm.eps)


def before(b: Builder, model: Model, x: str, sublayer: str) -> str:
    """The input of a sublayer: x, normed in the forms `pre` and `sandwich`."""
    return norm(b, model, x, f"{sublayer}_norm") if model.norm_place in ("pre", "sandwich") else x


def added(b: Builder, model: Model, x: str, y: str, sublayer: str) -> str:
    """The residual stream x after a sublayer with the result y, where r is `residual_multiplier`:

    - `pre`: `x + r · y` (Radford et al. 2019; Xiong et al. 2020, arXiv 2002.04745);
    - `post`: `norm(x + r · y)` (Vaswani et al. 2017, arXiv 1706.03762, section 3.1);
    - `res_post`: `x + r · norm(y)` (Swin V2, Liu et al. 2021, arXiv 2111.09883, section 3.2; OLMo 2, arXiv
      2501.00656, section 3.1);
    - `sandwich`: the same, with a norm before the sublayer too (CogView, Ding et al. 2021, arXiv 2105.13290, section
      2.4; Gemma 2, arXiv 2408.00118, section 2).
    """
    place, name = model.norm_place, f"{sublayer}_post_norm"
    if place in ("res_post", "sandwich"):
        y = norm(b, model, y, name)
    y = b.scaled(y, model.residual_multiplier, model.span("residual_multiplier"))
    total = b.one(o.Add, x, y, to="x")
    return norm(b, model, total, name, to="x") if place == "post" else total
