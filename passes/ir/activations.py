"""The activations of feed-forwards, one row each.

A new activation is a row here and a class in the union `FeedForward` of `grammar/spec/experts.py`; a new function is
also a row of `FUNCTIONS` in `runtime/backends/torch/torch_activations.py` and in `runtime/ops/compositions.py`.
`tests/unit/runtime/test_activations.py` compares them. docs/extending.md lists the tests that need a row for it.

Experts save the pre-activation `[…, parts, hidden]`, and backward recomputes the activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of one number, computed in at least float32. NaN stays NaN.

    `aten` lists the function's torch operators, the inner one first. `triton` and `derivative` are bodies of Triton
    functions of `x`, a tile in the accumulator's dtype. `keeps` says which tensor the torch operators save for
    backward: the operand, the result, or a tensor between them (`relu` saves its result, `square` its operand).
    """

    name: str
    aten: tuple[str, ...]
    triton: str
    derivative: str
    keeps: Literal["operand", "result", "inner"] = "operand"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationKind:
    """One part: `function(part)`. Two parts: `function(first) · second`, which is called gated.

    `word` is the feed-forward's word in the language. `parameters` are the fields of its class that change the
    function, and attributes of ops: all of `PARAMETERS`, or none. `second`, if set, is the function of the second part.
    `smooth` is set where the gradient jumps: it is the word of a similar, smooth activation. `moec verify` measures
    rounding with it, because rounding alone moves numbers across the jump.
    """

    word: str
    parts: int
    function: Function
    parameters: tuple[str, ...] = ()
    smooth: str = ""
    second: Function | None = None

    @property
    def gated(self) -> bool:
        """Whether the second part multiplies the activated first part."""
        return self.parts == 2


SILU = Function(
    name="silu",
    aten=("silu",),
    triton="return x * tl.sigmoid(x)",
    derivative="s = tl.sigmoid(x)\nreturn s * (1.0 + x * (1.0 - s))",
)
# The exact GELU, by the error function.
GELU = Function(
    name="gelu",
    aten=("gelu",),
    triton="return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))",
    derivative=("return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327"),
)
RELU = Function(
    name="relu",
    aten=("relu",),
    triton="return tl.where(x < 0.0, 0.0, x)  # NaN stays",
    derivative="return tl.where(x <= 0.0, 0.0, 1.0)  # 1 at NaN, as in torch",
    keeps="result",
)
RELU2 = Function(
    name="relu2",
    aten=("relu", "square"),
    triton="x = tl.where(x < 0.0, 0.0, x)  # NaN stays\nreturn x * x",
    derivative="return 2.0 * tl.where(x < 0.0, 0.0, x)",
    keeps="inner",
)

# LoRA experts are two products without an activation between them. The language has no word for this activation.
IDENTITY = Function(
    name="identity", aten=("clone",), triton="return x", derivative="return tl.full(x.shape, 1.0, x.dtype)"
)

_KINDS = (
    ActivationKind(word="swiglu", parts=2, function=SILU, parameters=("clamp", "alpha")),
    ActivationKind(word="geglu", parts=2, function=GELU),
    ActivationKind(word="gelu", parts=1, function=GELU),
    ActivationKind(word="relu", parts=1, function=RELU, smooth="gelu"),
    ActivationKind(word="relu2", parts=1, function=RELU2),
    ActivationKind(word="silu", parts=1, function=SILU),
    ActivationKind(word="identity", parts=1, function=IDENTITY),
)

ACTIVATIONS: Mapping[str, ActivationKind] = {kind.word: kind for kind in _KINDS}
"""The activations by word."""

PARAMETERS = ("clamp", "alpha")
"""The numbers that change an activation, in the order in which operators take them; None is the plain activation."""


def kind_of(word: str, clamp: float | None = None, alpha: float | None = None) -> ActivationKind:
    """The activation `word` with its parameters.

    `swiglu` with `clamp` c: the gate is at most c, up lies within ± c. With `alpha` a: `g · sigmoid(a · g) · (up + 1)`
    in the place of `silu(g) · up` (gpt-oss: OpenAI 2025, arXiv 2508.10925, section 2.2, c = 7 and a = 1.702).
    """
    kind = ACTIVATIONS[word]
    if clamp is None and alpha is None:
        return kind
    assert kind.parameters == PARAMETERS, word
    return replace(kind, function=_bounded_gate(clamp, alpha), second=_bounded_up(clamp, alpha))


def _bounded_gate(clamp: float | None, alpha: float | None) -> Function:
    scaled = "x" if alpha is None else f"{alpha!r} * x"
    limit = "" if clamp is None else f"limit = tl.full(x.shape, {clamp!r}, x.dtype)\n"
    clamped = "" if clamp is None else "beyond = x > limit\nx = tl.where(beyond, limit, x)\n"
    slope = f"s * (1.0 + {scaled} * (1.0 - s))"
    return Function(
        name="silu",
        aten=(),
        triton=f"{limit}{clamped}return x * tl.sigmoid({scaled})",
        derivative=f"{limit}{clamped}s = tl.sigmoid({scaled})\n"
        + (f"return {slope}" if clamp is None else f"return tl.where(beyond, 0.0, {slope})"),
    )


def _bounded_up(clamp: float | None, alpha: float | None) -> Function:
    plus_one = "" if alpha is None else " + 1.0"
    if clamp is None:
        return Function(name="add", aten=(), triton=f"return x{plus_one}", derivative="return x * 0.0 + 1.0")
    limit = f"limit = tl.full(x.shape, {clamp!r}, x.dtype)\n"
    return Function(
        name="clamp",
        aten=(),
        triton=f"{limit}return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x)){plus_one}",
        derivative=f"{limit}return tl.where((x > limit) | (x < -limit), 0.0, 1.0)",
    )
