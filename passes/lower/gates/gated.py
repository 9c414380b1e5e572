"""The inputs of a gate, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moec.grammar.spec import DType, Subject
from moec.passes.ir import Init, Role
from moec.passes.ir.attribute_types import RoutingGroup
from moec.passes.ir.ops import RoundWeights, Route, Router
from moec.passes.lower.block_builder import TABLE, Builder, Located, normal

BIAS = "moe.gate.bias"
"""A bias per expert of a mixture: a parameter if it is learned, a state if it is moved online. No gate has both."""

STREAMS = 16
"""Streams of random numbers that a gate may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """The names of a gate's results.

    `w`, `e`: weights and expert ids of each token's choices, `[batch, sequence, k]`. `logits` and `p` (probabilities),
    `[batch, sequence, experts]`, are for balance terms; a gate may have neither (`gives` in the schema).
    `by_scores`: whether `e` are the experts of each token's k largest logits; not where biases or groups choose too.
    `some_are_none`: whether a choice may be −1, which gets no row. `extras`: further values that balance terms need.
    `terms`: the gate's own terms of the loss, scalars that are sums over tokens, with their weights.
    """

    w: str
    e: str
    logits: str | None = None
    p: str | None = None
    by_scores: bool = False
    some_are_none: bool = False
    extras: Mapping[str, str] = field(default_factory=dict)
    terms: tuple[tuple[str, float], ...] = ()

    def rounded(self, b: Builder, subject: Subject, span: Located) -> Gated:
        """Rounds the weights to the model's dtype, where routers have it; their tensor stays fp32."""
        if not subject.rounds_logits or subject.dtype == DType.FP32:
            return self
        return replace(self, w=b.one(RoundWeights, self.w, to="w", span=span, dtype=subject.dtype.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInputs:
    """The inputs of a gate: the tokens' vectors `h`, the number of experts, and `by_role` the layer's further inputs.

    `group` is the mixture's routing group. `ordered`: whether the order of a token's choices matters, to a capacity or
    to a balance term over first choices. `for_heads`: the gate belongs to a mixture of attention heads. Its layer may
    have a second gate, with other parameters and random numbers.
    """

    subject: Subject
    experts: int
    h: str
    by_role: Mapping[Role, str]
    group: RoutingGroup = "sequence"
    ordered: bool = True
    for_heads: bool = False

    @property
    def dtype(self) -> DType:
        """The dtype in which the gate's parameters compute."""
        return self.subject.dtype_of("routers")

    @property
    def prefix(self) -> str:
        """The first part of the names of the gate's parameters."""
        return "attention.gate" if self.for_heads else "moe.gate"

    @property
    def real(self) -> dict[str, str]:
        """The optional operand `real` of an op: the marks of real tokens in a model with padding."""
        return {"real": self.by_role["real"]} if "real" in self.by_role else {}

    def stream(self, number: int) -> int:
        """The stream of the gate's random numbers `number`; no other gate of the layer draws from it."""
        return number + (STREAMS if self.for_heads else 0)

    def router(
        self,
        b: Builder,
        span: Located,
        h: str | None = None,
        *,
        name: str = "",
        to: str = "logits",
        biased: bool = False,
        outputs: int | None = None,
    ) -> str:
        """Logits `[batch, sequence, experts]` of fp32 from h (default: the tokens' vectors).

        `name` (`noise.`) tells apart the weights of a gate that has several; `outputs` replaces the number of experts.
        `biased` adds a learned bias per expert, initially zeros.
        """
        dtype, shape = self.dtype, (outputs or self.experts, self.subject.dim)
        weight = b.parameter(f"{self.prefix}.{name}weight", shape, dtype, normal(), span, matrices=TABLE)
        zeros, bias_name = Init(kind="zeros"), f"{self.prefix}.bias"
        bias = {"bias": b.parameter(bias_name, shape[:1], dtype, zeros, span)} if biased else {}
        rounds = self.subject.rounds_logits
        return b.one(Router, h or self.h, weight, to=to, span=span, optional=bias, rounds=rounds)


def probabilities(b: Builder, logits: str, span: Located) -> str:
    """The softmax of logits, by `route`, which reports tokens without scores; its choice of one expert is unused."""
    rule: dict[str, Any] = {"k": 1, "score": "softmax", "order": "before", "normalize": False}
    return b.add(Route, logits, to="p best best_expert", span=span, **rule)[0]
