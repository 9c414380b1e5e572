"""The shapes of the experts' two grouped products, with their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from moec.codegen.kernels.fitting import buffer_bytes
from moec.codegen.kernels.kernel_shape import KernelShape, accumulator
from moec.codegen.kernels.shapes import TABLES
from moec.codegen.kernels.tile_rule import aligned
from moec.codegen.kernels.tiles import Kernel, Tile, Ways, num_stages
from moec.passes.ir.activations import ActivationKind, kind_of

MAX_ELEMENTS = 2**31
"""Offsets inside one expert's matrix are 32 bits wide; offsets of experts and rows are 64 bits wide, once per tile."""

GROUP = 8
"""Tiles of rows that pass over all columns together, so that L2 keeps the operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape(KernelShape):
    """The sizes of experts with two products. `gathered`: rows are not in the experts' order.

    With `k` > 0 the input is tokens, and each row is gathered from its token, k per token; with 0 the input is rows.
    With `bias`, each expert adds one number to each output.
    """

    experts: int
    dim: int
    hidden: int
    activation: str
    dtype: str
    gathered: bool
    k: int
    bias: bool
    clamp: float | None = None
    alpha: float | None = None

    @property
    def kind(self) -> ActivationKind:
        """The activation, with its clamp and alpha."""
        return kind_of(self.activation, self.clamp, self.alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape(ExpertsShape):
    """A projection's grouped products.

    The product, its backward and the gradient of its weights have a tile each; None for one that a library computes,
    which is not rendered then. `rows`: of a tile in the table. `bulk`: weights are read by TMA, in a persistent loop
    (sm_90 and later).
    """

    product: ClassVar[Kernel]
    backward_kernel: ClassVar[Kernel]
    weights_kernel: ClassVar[Kernel]
    rows: int
    tile: Tile | None
    backward: Tile | None
    weights: Tile | None
    bulk: bool = False

    @classmethod
    def of(
        cls,
        experts: int,
        dim: int,
        hidden: int,
        activation: str,
        dtype: str,
        gathered: bool,
        k: int,
        bias: bool,
        ways: Ways,
        **options: Any,
    ) -> Self:
        """Makes the shape from positional arguments, with its three tiles of `ways`."""
        return cls(
            experts=experts,
            dim=dim,
            hidden=hidden,
            activation=activation,
            dtype=dtype,
            gathered=gathered,
            k=k,
            bias=bias,
            rows=ways.rows,
            tile=ways.tile(cls.product),
            backward=ways.tile(cls.backward_kernel),
            weights=ways.tile(cls.weights_kernel),
            **options,
        )

    def constants(self) -> dict[str, Any]:
        """Those of the template: `G` parts of an activation and its functions; `wide`, whether offsets need 64 bits."""
        return {
            "G": self.kind.parts,
            "function": self.kind.function,
            "second": self.kind.second,
            "GROUP": GROUP,
            "wide": self.kind.parts * self.hidden * self.dim >= MAX_ELEMENTS,
            "weighs": False,
        }

    @property
    def aligned(self) -> bool:
        """Whether every row of the model's and of the hidden width begins at a multiple of 16 bytes."""
        return aligned(self.dtype, (self.dim, self.hidden))

    def persistent(self, kernel: str) -> bool:
        """Whether a kernel reads weights by TMA in a persistent loop; gradients of weights and biases never do."""
        return self.bulk and kernel in (self.product, self.backward_kernel)

    def resident(self, kernel: str) -> int:
        """The number of programs of a persistent kernel whose buffers fit a multiprocessor of Hopper."""
        tile = self.tile_of(kernel)
        assert tile is not None
        return max(1, min(4, 200 * 1024 // buffer_bytes(tile, self.dtype)))

    def blocks(self, kernel: str) -> dict[str, tuple[int, ...]]:
        """As in `KernelShape`.

        Weights are read in three dimensions, so that a block does not reach into the next expert: of a gated `up`
        [E · 2, F, D], two matrices at once, else [E, rows, columns]. Rows in the experts' order are [R, columns].
        """
        tile = self.tile_of(kernel)
        if tile is None or not self.persistent(kernel):
            return {}
        parts = self.kind.parts
        rows = (tile.rows, tile.depth)
        match kernel:
            case "up":
                return {"up_blocks": (parts, tile.columns // parts, tile.depth)}
            case "down":
                return {"activated_blocks": rows, "down_blocks": (1, tile.columns, tile.depth)}
            case "down_backward":
                return {"down_blocks": (1, tile.depth, tile.columns)}
            case "up_backward":
                return {"grad_hidden_blocks": rows, "up_blocks": (1, tile.depth, tile.columns)}
        return {}

    def tile_of(self, kernel: str) -> Tile | None:
        """The tile of a rendered kernel; None for gradients of biases, which are sums, and for what is not rendered."""
        tiles = {self.product: self.tile, self.backward_kernel: self.backward, self.weights_kernel: self.weights}
        return tiles.get(kernel)  # type: ignore[call-overload, no-any-return]

    def with_tile(self, kernel: Kernel, tile: Tile) -> Self:
        """This shape with another tile for one kernel; the table's rows follow the tile of a product of rows."""
        names = {self.product: "tile", self.backward_kernel: "backward", self.weights_kernel: "weights"}
        rows = self.rows if kernel == self.weights_kernel else tile.rows
        changes: dict[str, Any] = {"rows": rows, names[kernel]: tile}
        return replace(self, **changes)

    def options(self, kernel: str, family: str) -> dict[str, int]:
        """Triton's num_warps and num_stages for a kernel on a family of devices ("hopper", "ampere" or "cdna")."""
        tile = self.tile_of(kernel)
        if tile is None:
            return {"num_warps": 4, "num_stages": 2}
        # Products of rows read a row's index once, before the loop; a gradient of weights reads new ones in each step.
        indirect = kernel == self.weights_kernel and (self.gathered or self.k > 0)
        return {"num_warps": tile.warps, "num_stages": num_stages(tile, family, indirect)}

    def pointers(self) -> dict[str, str]:
        """The table of tiles; weights of choices or rows, and the partial sums of their gradients."""
        return {
            **dict.fromkeys(TABLES, "i32"),
            **dict.fromkeys(("weights_ptr", "parts_ptr"), accumulator(self.dtype)),
        }


class UpShape(ProductShape):
    """The up projection, and its gradients."""

    template: ClassVar[str] = "up"
    product: ClassVar[Kernel] = "up"
    backward_kernel: ClassVar[Kernel] = "up_backward"
    weights_kernel: ClassVar[Kernel] = "up_weights"

    def constants(self) -> dict[str, Any]:
        """The halvings of its tile's epilogue."""
        return {**ProductShape.constants(self), "halvings": self._halvings()}

    def _halvings(self) -> int:
        """The number of times that the epilogue halves its columns before it activates and stores them.

        Found by compiling: 128 sums of a thread fit its registers beside every activation but `gelu`, whose error
        function takes many; rows that are not aligned, each number with its address, always need parts.
        """
        tile = self.tile
        if tile is None or (self.aligned and not (self.kind.word == "gelu" and _has_many_sums(tile))):
            return 0
        return min(2, _most_halvings(tile.columns // self.kind.parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class DownShape(ProductShape):
    """The down projection, and its gradients. `weighted`: there is one weight per row."""

    template: ClassVar[str] = "down"
    product: ClassVar[Kernel] = "down"
    backward_kernel: ClassVar[Kernel] = "down_backward"
    weights_kernel: ClassVar[Kernel] = "down_weights"
    weighted: bool = False

    def constants(self) -> dict[str, Any]:
        """Whether backward multiplies rows by weights, one per row or choice; the halvings of its tile's epilogue."""
        weighs = self.weighted or self.k > 0
        constants = {"weighs": weighs, "halvings": self._halvings(), "bulk_backward": self.persistent("down_backward")}
        return {**ProductShape.constants(self), **constants}

    def persistent(self, kernel: str) -> bool:
        """As in `ProductShape`, but not for a backward that would spill: with biases and weights, or gathered rows."""
        spills = kernel == "down_backward" and (self.gathered or (self.bias and (self.weighted or self.k > 0)))
        return ProductShape.persistent(self, kernel) and not spills

    def _halvings(self) -> int:
        """The number of times that down's backward halves its columns before it reads `hidden`.

        Found by compiling: 1; 2 for a thread with 128 sums, 4 if its loop is persistent, which keeps the next tile's
        addresses; 3 where rows are not aligned, and each number has an address of its own.
        """
        tile = self.backward
        if tile is None or tile.columns < 32:
            return 0
        limit = _most_halvings(tile.columns)
        if not self.aligned:
            return min(3, limit)
        return min((4 if self.persistent("down_backward") else 2) if _has_many_sums(tile) else 1, limit)


def _has_many_sums(tile: Tile) -> bool:
    """Whether a thread has 128 of a tile's sums or more, half of its registers."""
    return tile.rows * tile.columns // (32 * tile.warps) >= 128


def _most_halvings(columns: int) -> int:
    """The most halvings after which parts still have 16 columns."""
    return max(0, (columns // 16).bit_length() - 1)
