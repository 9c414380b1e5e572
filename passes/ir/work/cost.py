"""The cost of one op on one rank: arithmetic, memory traffic, saved activations, bytes sent."""

from __future__ import annotations

from dataclasses import dataclass, field

MASTER_BYTES = 4
"""Bytes of an element of a parameter and of its summed gradient: fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product `[m, k] × [k, n]`, or one for each of `groups` experts, with `m` rows in total.

    `largest` is the rows of the busiest group; without it, the mean is used. The gradient of the weights contracts the
    rows and has the same m, n and k. `width` is the bytes of an element; 0 where `Direction.moved` has the bytes.
    """

    name: str
    m: float
    n: float
    k: float
    width: int
    groups: float = 1
    largest: float = 0

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
        return max(self.largest, self.rows_per_group)

    @property
    def moved(self) -> float:
        """Bytes of both operands and the result, each moved once."""
        return self.width * (self.m * self.k + self.groups * self.n * self.k + self.m * self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Forward or backward of an op: matrix products, bytes that other kernels read and write, kernel launches."""

    products: tuple[Product, ...] = ()
    moved: float = 0
    launches: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of the products; other kernels count only as bytes."""
        return sum(product.flops for product in self.products)

    @property
    def of_weights(self) -> Direction:
        """The part of backward that a pipeline may compute later: the products for gradients of weights."""
        products = tuple(product for product in self.products if product.name.endswith("_weights"))
        return Direction(products=products, launches=len(products))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cost of forward and that of backward."""

    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=Direction)

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
class Sent:
    """Bytes that a rank sends over `axis` in forward and in backward; `backward_op` is the collective of backward.

    Where ranks hold the rows of different experts, the bytes are those of the busiest rank: the larger of the bytes
    that it sends and those that it receives.
    """

    axis: str
    purpose: str
    forward: float
    backward: float
    backward_op: str

    @property
    def bytes(self) -> float:
        """Bytes of forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of an op on one rank.

    `used` is the fraction of the op's parameters that one token uses: k / experts in a mixture, else 1. `scratch` are
    the bytes that forward and backward take while they run, beside operands, results, what is saved, and gradients of
    operands and results.
    """

    work: Work = field(default_factory=Work)
    saved: tuple[Saved, ...] = ()
    sent: tuple[Sent, ...] = ()
    used: float = 1.0
    scratch: tuple[float, float] = (0.0, 0.0)
