"""Values, parameters and settings: the operands and results of ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moec.passes.ir.layout import Layout
from moec.passes.ir.source_line import SourceLine

Dim = int | str
"""A constant, or one of `SYMBOLS`."""

SYMBOLS = frozenset({"batch", "sequence", "rows", "sources", "places", "pieces", "shares"})
"""Sizes unknown when compiling: `rows` of a ragged value, `sources` (ranks that sent rows), `places` of an expert with
a capacity, `pieces` of a sequence (one per rank of tp), `shares` of a batch (one per data-parallel rank)."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}


Role = Literal[
    "tokens",
    "positions",
    "segments",
    "real",
    "past",
    "labels",
    "residual",
    "logits",
    "routes",
    "counts",
    "balance",
    "valid",
    "num_tokens",
    "loss",
]
"""The meaning of a block's input or output. Code finds values by role, never by name."""

ROLES: Mapping[Role, str] = {
    "tokens": "token ids, [batch, sequence]",
    "positions": "the place of each token in its sequence, [batch, sequence]",
    "segments": "which of several packed texts each token belongs to, [batch, sequence]",
    "real": "1 for each token that is no padding, else 0, [batch, sequence]",
    "past": "keys and values of earlier tokens",
    "labels": "the ids that the model is to predict, -100 where none is, [batch, sequence]",
    "residual": "the residual stream, or x and y of a layer by itself, [batch, sequence, dim]",
    "logits": "scores of every id for each token, [batch, sequence, vocab]",
    "routes": "the experts that each token goes to, chosen by somebody else",
    "counts": "rows that a rank's tokens sent to each expert of one layer, [sources, experts]",
    "balance": "the weighted balance terms, a sum over tokens",
    "valid": "the number of labels that are not ignored, on all ranks",
    "num_tokens": "the number of tokens on all ranks, padding left out",
    "loss": "a term of the training loss, alike on every rank",
}


def promoted(dtype: str) -> str:
    """`promote_types(dtype, float32)`: the dtype in which routers, norms and losses compute."""
    return dtype if dtype in ("fp32", "fp64") else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The result of an op or an input of a block.

    A ragged value has shape `[experts, "rows", dim]`, and `ragged` names the value that counts its rows per source
    and expert. In memory it is a matrix of rows, sorted by source, then by expert. Inputs have a `role`.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    layout: Layout | None = None
    ragged: str | None = None
    role: Role | None = None

    @property
    def is_row_counts(self) -> bool:
        """Whether the value counts rows per source and expert, `[sources, experts]`, as `ragged` requires."""
        return self.dtype == "int64" and len(self.shape) == 2 and self.shape[0] == "sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Initial values of a parameter: `ones`, `zeros`, or `normal(std)`."""

    kind: str
    std: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.std!r})" if self.kind == "normal" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Value):
    """A learned tensor of a block, named relative to it (`attention.q.weight`).

    `decays` says whether weight decay applies. `shard` gives the dim that each axis cuts, if the axis has several ranks
    and divides the dim; the `shard` pass turns `shard` into the layout and empties it. `sum_over` are the mesh axes
    over which the gradient is summed (see `gradient_sums`), None until the `communicate` pass.
    """

    init: Init
    decays: bool
    shard: tuple[tuple[str, int], ...] = ()
    sum_over: tuple[str, ...] | None = None
    span: SourceLine | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Value):
    """A whole number that a job may change without compiling again, from `low` to `high`, initially `default`.

    In a graph it is a 0-d int64 tensor on CPU, equal on every rank: an int would need one graph per value.
    """

    default: int
    low: int
    high: int


TRAINING = Setting(name="training", shape=(), dtype="int64", default=1, low=0, high=1)
"""1 in training, 0 in evaluation."""

Attribute = Any
"""The value of an op's attribute: int, float, bool, str or a tuple of them."""
