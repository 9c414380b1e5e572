"""The cost of one op on one rank: arithmetic, memory traffic, saved activations, bytes sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moec.passes.ir.value import DTYPE_BYTES
from moec.passes.ir.work.arrays import larger

MASTER_BYTES = 4
"""Bytes of an element of a parameter and of its summed gradient: fp32."""


ProductKind = Literal["plain", "grouped", "attention"]
"""One matrix for all rows, one for each group of rows, and the products of attention, in one kernel with softmax."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "none"]
"""How ranks of a group exchange bytes in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product `[m, k] × [k, n]`, or one for each of `groups` experts, with `m` rows in total, in `dtype`.

    The gradient of the input contracts `n`, that of the weights the rows `m`; all three have the same m, n and k.
    `largest` is the rows of the busiest group; without it, the mean is used. `is_repeated`: backward computes forward's
    product again, which counts among the FLOPs that are executed but not among the model's.
    """

    name: str
    m: float
    n: float
    k: float
    dtype: str
    kind: ProductKind = "plain"
    contracts: Literal["k", "n", "m"] = "k"
    groups: float = 1
    largest: float = 0
    is_repeated: bool = False

    @property
    def flops(self) -> float:
        """Multiply-adds times two."""
        return 2 * self.m * self.n * self.k

    @property
    def rows_per_group(self) -> float:
        """Mean rows per group. The efficiency of a grouped product depends on it."""
        return self.m / self.groups

    @property
    def most_rows(self) -> float:
        """Rows of the busiest group."""
        return larger(self.largest, self.rows_per_group)

    @property
    def moved(self) -> float:
        """Bytes of both operands and the result, each moved once; 0 in attention, whose `Direction.moved` has them."""
        if self.kind == "attention":
            return 0.0
        return DTYPE_BYTES[self.dtype] * (self.m * self.k + self.groups * self.n * self.k + self.m * self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Forward or backward of an op: matrix products, bytes that other kernels read and write, kernel launches.

    `moved`: each tensor once. `again`: what several kernels of torch in the place of one read and write more than that.
    """

    products: tuple[Product, ...] = ()
    moved: float = 0
    again: float = 0
    launches: int = 0

    @property
    def flops(self) -> float:
        """The model's floating-point operations: without repeated products; other kernels count only as bytes."""
        return sum(product.flops for product in self.products if not product.is_repeated)

    def times(self, number: int) -> Direction:
        """So many times the bytes and launches of a direction without products."""
        return replace(self, moved=number * self.moved, again=number * self.again, launches=number * self.launches)

    @property
    def of_weights(self) -> Direction:
        """The part of backward that a pipeline may compute later: the products for gradients of weights."""
        products = tuple(product for product in self.products if product.contracts == "m")
        return Direction(products=products, launches=len(products))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cost of forward and that of backward."""

    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=Direction)

    def times(self, number: int) -> Work:
        """So many times this work."""
        return Work(forward=self.forward.times(number), backward=self.backward.times(number))

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward together."""
        return self.forward.flops + self.backward.flops


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved activation: a tensor kept for backward. Two ops that save one tensor use the same name.

    `name` is that of a value (`h.2`) or a parameter (`@norm.weight`). A tensor inside an op is named after a result of
    the op (`y:hidden`).
    """

    name: str
    bytes: float

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a parameter, which takes no further memory."""
        return self.name.startswith("@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Where the rows of one token go: to `number` of `experts`, of the best `kept` among `groups` groups of them."""

    number: float
    experts: float
    groups: float = 1
    kept: float = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a rank sends over `axis` in forward and in backward, and the collective of each direction.

    `backward_op` is the conversion of the gradient. Where ranks hold the rows of different experts, the bytes are those
    of the busiest rank: the larger of the bytes that it sends and those that it receives. Of rows of tokens `choices`
    says how often one token is among them, from which follows how often it crosses a network once only.
    """

    axis: str
    purpose: str
    forward: float
    backward: float
    collectives: tuple[Collective, Collective]
    backward_op: str
    choices: Choices | None = None

    @property
    def bytes(self) -> float:
        """Bytes of forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of an op on one rank.

    `used` is the fraction of the op's parameters that one token uses: k / experts in a mixture, else 1. `scratch` are
    the bytes that forward and backward take while they run, beside operands, results, what is saved, and gradients of
    operands and results. `of_experts`: `recompute = experts` runs the op again. `passes_gradient`: the gradient of an
    operand is the result's gradient itself, without a copy. `is_view`: the result is the operand's tensor.
    """

    work: Work = field(default_factory=Work)
    saved: tuple[Saved, ...] = ()
    sent: tuple[Sent, ...] = ()
    used: float = 1.0
    scratch: tuple[float, float] = (0.0, 0.0)
    of_experts: bool = False
    passes_gradient: bool = False
    is_view: bool = False
