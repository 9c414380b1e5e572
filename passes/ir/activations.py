"""The activations of feed-forwards, one row each.

A new activation is a row here and a class in `grammar/spec/experts.py`; a new function is also a row of `FUNCTIONS` in
`runtime/backends/torch/torch_activations.py`. `tests/unit/runtime/test_activations.py` compares the three.

Backward saves the pre-activation `[…, parts, hidden]` and computes the activation again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of one number, computed in at least float32. It keeps NaN.

    `aten` is the function as torch operators of one tensor, the inner operator first. `triton` and `derivative` are
    bodies of Triton functions of `x`, a tile in the accumulator's dtype.
    """

    name: str
    aten: tuple[str, ...]
    triton: str
    derivative: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationKind:
    """Of one part, `function(part)`; of two parts, `function(first) · second`, which is called gated.

    `word` is the feed-forward's word in the language. `parameters` are the fields of its class that change the
    function; no kernel takes one yet, and lowering asserts that they are None. `smooth` is given where the gradient
    jumps: the word of a similar activation, with which `moec verify` measures rounding. Rounding alone moves numbers
    across the jump.
    """

    word: str
    parts: int
    function: Function
    parameters: tuple[str, ...] = ()
    smooth: str = ""

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
    derivative="return tl.where(x > 0.0, 1.0, 0.0)",
)
RELU2 = Function(
    name="relu2",
    aten=("relu", "square"),
    triton="x = tl.where(x < 0.0, 0.0, x)  # NaN stays\nreturn x * x",
    derivative="return 2.0 * tl.where(x < 0.0, 0.0, x)",
)

_KINDS = (
    ActivationKind(word="swiglu", parts=2, function=SILU, parameters=("clamp", "alpha")),
    ActivationKind(word="geglu", parts=2, function=GELU),
    ActivationKind(word="gelu", parts=1, function=GELU),
    ActivationKind(word="relu", parts=1, function=RELU, smooth="gelu"),
    ActivationKind(word="relu2", parts=1, function=RELU2),
    ActivationKind(word="silu", parts=1, function=SILU),
)

ACTIVATIONS: Mapping[str, ActivationKind] = {kind.word: kind for kind in _KINDS}
"""The rows by their words."""
