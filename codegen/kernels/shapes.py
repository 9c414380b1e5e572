"""Layer shapes → Triton source: one template per family of kernels, every number of the layer a constant in it.

Pure text: nothing here imports torch or triton. A shape's text is a function of the shape alone, and only text that
this moec rendered is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Self

from moec.codegen.kernels.fitting import buffer_bytes
from moec.codegen.kernels.tiles import Kernel, Tile, Ways, num_stages
from moec.passes.ir.activations import ACTIVATIONS, kind_of

DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Triton's names of the dtypes that kernels compute in."""

SCORES = ("softmax", "sigmoid")

MOST_EXPERTS = 2048
"""One program loads a whole row of logits, or of a histogram."""

MOST_ELEMENTS = 2**31
"""Offsets inside one expert's matrix are 32 bits wide; offsets of experts and rows are 64 bits wide, once per tile."""


GROUP = 8
"""Tiles of rows that go over all columns together, so that L2 keeps what they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """The numbers that a family of kernels is rendered for."""

    template: ClassVar[str]

    @property
    def name(self) -> str:
        """An identifier that contains every field of the shape that is not None: `route_experts8_k2_scoresoftmax_…`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        said = (f"{name}{_short(value)}" for name, value in given.items() if value is not None)
        return "_".join((self.template, *said))

    def constants(self) -> dict[str, Any]:
        """The template's constants that are not fields."""
        return {}

    def pointers(self) -> dict[str, str]:
        """The dtypes of tensors that differ from the shape's dtype, by argument name."""
        return {}

    def blocks(self, kernel: str) -> dict[str, tuple[int, ...]]:
        """The blocks that a kernel reads by TMA descriptors, by argument name; empty if it reads by pointers only."""
        return {}

    def options(self, kernel: str, family: str) -> dict[str, int]:
        """Triton's num_warps and num_stages for a kernel on a family of devices; empty for Triton's own."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape(KernelShape):
    """`route` and its backward: logits [T, E] of fp32 or fp64."""

    template: ClassVar[str] = "route"
    experts: int
    k: int
    score: str
    after: bool
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_score: str = "top2_sum"
    biased: bool = False
    dtype: str

    @property
    def of_backward(self) -> RouteShape:
        """The shape with the kernel `route_backward`, which is given choices: it needs no groups and biases."""
        return replace(self, groups=1, keep_groups=1, group_score="top2_sum", biased=False)

    def constants(self) -> dict[str, Any]:
        """Blocks of about 2,048 scores: with twice as many, backward spills from 64 experts on (sm_90)."""
        groups, size = power_of_two(self.groups), power_of_two(self.experts // self.groups)
        width = groups * size
        lowest = "-1.7976931348623157e308" if self.dtype == "fp64" else "-3.4028234663852886e38"
        block = max(1, min(64, 2048 // width))
        return {"EP": width, "GP": groups, "SP": size, "KP": power_of_two(self.k), "BLOCK": block, "lowest": lowest}

    def pointers(self) -> dict[str, str]:
        """Choices are 64 bits wide."""
        return {"experts_ptr": "i64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedShape(KernelShape):
    """The gated activation of a dense feed-forward, and its gradient."""

    template: ClassVar[str] = "gated"
    hidden: int
    activation: str
    dtype: str
    clamp: float | None = None
    alpha: float | None = None

    def constants(self) -> dict[str, Any]:
        """At most 1,024 columns per program."""
        kind = kind_of(self.activation, self.clamp, self.alpha)
        return {"BLOCK": min(1024, power_of_two(self.hidden)), "function": kind.function, "second": kind.second}


TABLES = ("offsets_ptr", "total_ptr", "experts_ptr", "starts_ptr", "order_ptr")
"""Arguments with the tables of each expert's rows and tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesShape(KernelShape):
    """The table of each tile's expert, for grouped products."""

    template: ClassVar[str] = "tiles"
    experts: int
    rows: int

    def constants(self) -> dict[str, Any]:
        """Blocks of about 8,192 comparisons."""
        width = power_of_two(self.experts)
        return {"EP": width, "BLOCK": max(1, min(128, 8192 // width))}

    def pointers(self) -> dict[str, str]:
        """The operators' counts; the table itself is 32 bits wide."""
        return {"counts_ptr": "i64", **dict.fromkeys(TABLES, "i32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape(KernelShape):
    """A projection's grouped products. `gathered`: rows are not in the experts' order.

    With `k` > 0 the input is tokens, and each row is gathered from its token, k per token; with 0 the input is rows.
    With `bias`, each expert adds one number to each output. The product, its backward and the gradient of its weights
    have a tile each; None for one that a library computes, which is not rendered then. `rows`: of a tile in the table.
    `bulk`: weights are read by TMA, in a persistent loop (sm_90 and later).
    """

    product: ClassVar[Kernel]
    of_backward: ClassVar[Kernel]
    of_weights: ClassVar[Kernel]
    experts: int
    dim: int
    hidden: int
    activation: str
    dtype: str
    gathered: bool
    k: int
    bias: bool
    rows: int
    tile: Tile | None
    backward: Tile | None
    weights: Tile | None
    bulk: bool = False
    clamp: float | None = None
    alpha: float | None = None

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
        **more: Any,
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
            backward=ways.tile(cls.of_backward),
            weights=ways.tile(cls.of_weights),
            **more,
        )

    def constants(self) -> dict[str, Any]:
        """Whether an offset inside one expert's matrices needs 64 bits."""
        activation = kind_of(self.activation, self.clamp, self.alpha)
        return {
            "G": activation.parts,
            "function": activation.function,
            "second": activation.second,
            "GROUP": GROUP,
            "wide": activation.parts * self.hidden * self.dim >= MOST_ELEMENTS,
            "weighs": False,
        }

    def persistent(self, kernel: str) -> bool:
        """Whether a kernel reads weights by TMA in a persistent loop; gradients of weights and biases never do."""
        return self.bulk and kernel in (self.product, self.of_backward)

    def resident(self, kernel: str) -> int:
        """How many programs of a persistent kernel a multiprocessor of Hopper can hold, by their buffers."""
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
        parts = kind_of(self.activation, self.clamp, self.alpha).parts
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
        tiles = {self.product: self.tile, self.of_backward: self.backward, self.of_weights: self.weights}
        return tiles.get(kernel)  # type: ignore[call-overload, no-any-return]

    def with_tile(self, kernel: Kernel, tile: Tile) -> Self:
        """This shape with another tile for one kernel; the table's rows follow the tile of a product of rows."""
        names = {self.product: "tile", self.of_backward: "backward", self.of_weights: "weights"}
        rows = self.rows if kernel == self.of_weights else tile.rows
        changes: dict[str, Any] = {"rows": rows, names[kernel]: tile}
        return replace(self, **changes)

    def options(self, kernel: str, family: str) -> dict[str, int]:
        """Triton's num_warps and num_stages for a kernel on a family of devices ("hopper", "ampere" or "cdna")."""
        tile = self.tile_of(kernel)
        if tile is None:
            return {"num_warps": 4, "num_stages": 2}
        # Products of rows read a row's index once, before the loop; a gradient of weights reads new ones in each step.
        indirect = kernel == self.of_weights and (self.gathered or self.k > 0)
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
    of_backward: ClassVar[Kernel] = "up_backward"
    of_weights: ClassVar[Kernel] = "up_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownShape(ProductShape):
    """The down projection, and its gradients. `weighted`: there is one weight per row."""

    template: ClassVar[str] = "down"
    product: ClassVar[Kernel] = "down"
    of_backward: ClassVar[Kernel] = "down_backward"
    of_weights: ClassVar[Kernel] = "down_weights"
    weighted: bool = False

    def constants(self) -> dict[str, Any]:
        """Whether backward multiplies rows by weights, one per row or choice; the halvings of its tile's epilogue."""
        weighs = self.weighted or self.k > 0
        more = {"weighs": weighs, "halvings": self._halvings(), "bulk_backward": self.persistent("down_backward")}
        return {**ProductShape.constants(self), **more}

    def persistent(self, kernel: str) -> bool:
        """Down's backward is not where it would spill: with weights beside biases or beside an order of rows."""
        spills = kernel == "down_backward" and (self.gathered or (self.bias and (self.weighted or self.k > 0)))
        return ProductShape.persistent(self, kernel) and not spills

    def _halvings(self) -> int:
        """How often down's backward halves its columns before it reads `hidden` beside the sums.

        Found by compiling for sm_90: a thread with 128 sums spills with fewer, and two more in a persistent loop, which
        keeps the next tile's addresses.
        """
        tile = self.backward
        if tile is None or tile.columns < 32:
            return 0
        many = tile.rows * tile.columns // (32 * tile.warps) >= 128
        return min((4 if self.persistent("down_backward") else 2) if many else 1, (tile.columns // 16).bit_length() - 1)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def accumulator(dtype: str) -> str:
    """The dtype of sums: float64 for float64, else float32."""
    return "fp64" if dtype == "fp64" else "fp32"


@cache
def render(shape: KernelShape) -> str:
    """The source of a shape's kernels: a Python module that imports triton and defines jitted functions.

    Raises `ValueError` for a shape that kernels do not support.
    """
    unfit = complaint(shape)
    if unfit is not None:
        raise ValueError(unfit)
    own = {field.name: getattr(shape, field.name) for field in fields(shape)}
    dtype = getattr(shape, "dtype", "fp32")
    own |= {"acc": DTYPES[accumulator(dtype)], "type": DTYPES[dtype]}
    text = _environment().get_template(f"{shape.template}.py.j2").render(**own, **shape.constants())
    return re.sub(r"\n+(@triton\.jit.*)\n", r"\n\n\n\1\n", text).strip() + "\n"


def complaint(shape: KernelShape) -> str | None:
    """Why no kernels are rendered for a shape; None if they are. Without kernels plain torch computes, or refuses."""
    experts, score = getattr(shape, "experts", 1), getattr(shape, "score", SCORES[0])
    activation = getattr(shape, "activation", None)
    if experts > MOST_EXPERTS:
        return f"kernels are for at most {MOST_EXPERTS} experts, not {experts}"
    if score not in SCORES or activation not in (None, *ACTIVATIONS):
        return f"there are no kernels for {score} scores and {activation}"
    if any(isinstance(size, int) and size < 0 for size in astuple(shape)):
        return "there are no kernels for a negative size"
    return None


def _short(value: object) -> str:
    return re.sub(r"[^a-z0-9_]", lambda found: {".": "p", "-": "m"}.get(found[0], ""), str(value).lower())


@lru_cache(maxsize=1)
def _environment() -> Any:
    # Imported here: a plan is read by commands that print no kernel.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("moec.codegen.kernels", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        line_statement_prefix=None,
        autoescape=False,
    )
