"""Lowers the feed-forwards of experts over the rows of a mixture, one function for each kind of expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moec.grammar.spec import Activated, Conv, Experts, LinearMap, Lora, Subject
from moec.grammar.spec.base import Node
from moec.passes.ir import Init, Matrices
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.ops.mixture_ops import HIDDEN
from moec.passes.lower.block_builder import Builder, normal, residual_init
from moec.passes.lower.lower_feed_forward import parameters_of

UP, DOWN, EXPERTS = Matrices(2, 1, hidden=True), Matrices(1, 1, hidden=True), Matrices(1)
"""The experts' weights and biases: every expert is a matrix of its own, and so is each half of a gated `up`."""

SHARD = {"ep": 0}
SLICED = {"ep": 0, "etp": HIDDEN}
"""The cuts of weights with a hidden width: over `ep` by experts, over `etp` by that width (expert slicing, Rajbhandari
et al. 2022, "DeepSpeed-MoE", section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The rows of experts `[experts, rows, dim]`, their `counts` if they are ragged, and a prefix for parameters.

    `all_places`: whether padded rows are computed in empty places too, where no row changes rank. `sliced`: whether
    `etp` cuts weights with a hidden width.
    """

    subject: Subject
    experts: Experts
    rows: str
    counts: str | None
    prefix: str
    all_places: bool = False
    sliced: bool = True

    @property
    def counted(self) -> Mapping[str, str]:
        """The counts of ragged rows, by the name of the operand."""
        return {} if self.counts is None else {"counts": self.counts}


def apply_experts(b: Builder, sent: Sent) -> str:
    """The name of the experts' results, of the type of the rows."""
    body = sent.experts.body
    return _LOWERED[Activated if isinstance(body, Activated) else type(body)](b, sent)


def activated_weights(
    b: Builder, sent: Sent, shard: Mapping[str, int]
) -> tuple[tuple[str, str], dict[str, str], dict[str, Any]]:
    """The names of up and down weights and of their biases (if any), and the activation as attributes of an op.

    `shard` maps the axes that cut the weights to dims: `SLICED`, or {} where every rank has all experts.
    """
    body, count, span = sent.experts.body, sent.experts.count, sent.experts.span()
    assert isinstance(body, Activated)
    dim, dtype = sent.subject.dim, sent.subject.dtype
    up_shape = (count, ACTIVATIONS[body.word].parts, body.hidden, dim)
    up = b.parameter(f"{sent.prefix}.up.weight", up_shape, dtype, normal(), span, shard, UP)
    down_shape, init = (count, dim, body.hidden), residual_init(sent.subject.depth)
    down = b.parameter(f"{sent.prefix}.down.weight", down_shape, dtype, init, span, shard, DOWN)
    biases = {}
    if body.bias:
        zeros, at = Init(kind="zeros"), body.span("bias")
        by_expert = {axis: d for axis, d in shard.items() if d == 0}
        biases = {
            "up_bias": b.parameter(f"{sent.prefix}.up.bias", up_shape[:-1], dtype, zeros, at, shard, EXPERTS),
            "down_bias": b.parameter(f"{sent.prefix}.down.bias", down_shape[:-1], dtype, zeros, at, by_expert, EXPERTS),
        }
    return (up, down), biases, {"activation": body.word, **parameters_of(body)}


def _activated(b: Builder, sent: Sent) -> str:
    (up, down), biases, attributes = activated_weights(b, sent, SLICED if sent.sliced else SHARD)
    span = sent.experts.span()
    if sent.counts is not None:
        return b.one(o.ExpertMlp, sent.rows, sent.counts, up, down, optional=biases, to="y", span=span, **attributes)
    attributes["all_places"] = sent.all_places
    return b.one(o.ExpertMlpPadded, sent.rows, up, down, optional=biases, to="y", span=span, **attributes)


def _linear(b: Builder, sent: Sent) -> str:
    body, count, span = sent.experts.body, sent.experts.count, sent.experts.span()
    assert isinstance(body, LinearMap)
    dim, dtype = sent.subject.dim, sent.subject.dtype
    init = residual_init(sent.subject.depth)
    weight = b.parameter(f"{sent.prefix}.weight", (count, dim, dim), dtype, init, span, SHARD, DOWN)
    bias = {}
    if body.bias:
        zeros = Init(kind="zeros")
        bias["bias"] = b.parameter(f"{sent.prefix}.bias", (count, dim), dtype, zeros, body.span("bias"), SHARD, EXPERTS)
    return b.one(o.ExpertLinear, sent.rows, weight, optional={**bias, **sent.counted}, to="y", span=span)


def _lora(b: Builder, sent: Sent) -> str:
    """`up(down(x))`, without `alpha / rank` (`scale_of`): two products with the identity between."""
    body, count, span = sent.experts.body, sent.experts.count, sent.experts.span()
    assert isinstance(body, Lora)
    dim, dtype, zeros = sent.subject.dim, sent.subject.dtype, Init(kind="zeros")
    down = b.parameter(f"{sent.prefix}.down.weight", (count, 1, body.rank, dim), dtype, normal(), span, SHARD, UP)
    up_shape = (count, dim, body.rank)
    up = b.parameter(f"{sent.prefix}.up.weight", up_shape, dtype, zeros, span, SHARD, DOWN, decays=True)
    op, rows = (o.ExpertMlpPadded, (sent.rows,)) if sent.counts is None else (o.ExpertMlp, (sent.rows, sent.counts))
    return b.one(op, *rows, down, up, to="y", span=span, activation="identity")


def _conv(b: Builder, sent: Sent) -> str:
    """Two convolutions over the window that a row is, the second at one position, with a GELU between."""
    body, count, span = sent.experts.body, sent.experts.count, sent.experts.span()
    assert isinstance(body, Conv)
    dim, dtype, zeros = sent.subject.dim, sent.subject.dtype, Init(kind="zeros")
    shapes = {"up": (count, body.hidden, body.kernel, dim), "down": (count, dim, body.kernel, body.hidden)}
    inits = {"up": normal(), "down": residual_init(sent.subject.depth)}
    y = sent.rows
    for part, positions, function in (("up", body.kernel, "gelu"), ("down", 1, "none")):
        shape = shapes[part]
        weight = b.parameter(f"{sent.prefix}.{part}.weight", shape, dtype, inits[part], span, SHARD, DOWN)
        bias = {}
        if body.bias:
            name, at = f"{sent.prefix}.{part}.bias", body.span("bias")
            bias["bias"] = b.parameter(name, shape[:2], dtype, zeros, at, SHARD, EXPERTS)
        operands = {**bias, **sent.counted}
        y = b.one(o.ExpertLinear, y, weight, optional=operands, to="y", span=span, positions=positions, then=function)
    return y


_LOWERED: Mapping[type[Node], Callable[[Builder, Sent], str]] = {
    Activated: _activated,
    Conv: _conv,
    LinearMap: _linear,
    Lora: _lora,
}
