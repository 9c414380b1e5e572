"""Ops of images: patches as tokens, the mean of an image's tokens, and the logits of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds, Count
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.limits import MAX_DIM
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks, reduced_layout
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost, Work
from moec.passes.ir.work.formulas import elementwise, projection

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload

Shift = Annotated[int, Bounds(ge=0, lt=MAX_DIM)]
"""Patches by which windows are moved."""


@op("patch_numbers", "images -> numbers", constants={"images"})
class PatchNumbers(Op):
    """The number of each patch: images `[batch, channels, height, width]` → int64 `[batch, sequence]`, 0, 1, … by rows.

    They count patches, and stand for ids where an op needs one number per token. No pixel is read. With `first` the
    token before the patches has number 0.
    """

    size: Count
    first: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        _grid(self, operands[0], self.size)
        return (Type(shape=(operands[0].shape[0], "sequence"), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        images = layout_of(operands[0]).only(Shard(0))
        return Placing((images,), (images,))


@op("patch_embed", "images weight first? -> x", constants={"images"})
class PatchEmbed(Op):
    """Patches of `size` pixels squared, projected: images `[batch, channels, height, width]`, weight `[dim, channels,
    size, size]` → `[batch, sequence, dim]`, by rows of the grid (Dosovitskiy et al. 2020, equation 1: E).

    Pixels are rounded to the weight's dtype. Images get no gradient. `first` `[dim]` is a token before the patches of
    every image (ibid.: x_class).
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        images, weight, *first = operands
        size = weight.shape[-1]
        fits = all(v.shape == weight.shape[:1] and v.dtype == weight.dtype for v in first)
        require(fits, self, "wants a first token as wide as the projected patches")
        require(len(weight.shape) == 4 and weight.shape[2] == size, self, "wants a weight [dim, channels, size, size]")
        assert isinstance(size, int)
        _grid(self, images, size)
        require(weight.shape[1] == images.shape[1], self, "wants as many channels in the weight as in images")
        return (Type(shape=(images.shape[0], "sequence", weight.shape[0]), dtype=weight.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        images = layout_of(operands[0]).only(Shard(0))
        return Placing((images, *(REPLICATED for _ in operands[1:])), (images,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        images, weight = operands[:2]
        patches = workload.inner(results[0], "patches", workload.count(images), weight.dtype)
        wide = Value(name="patches", shape=images.shape, dtype=weight.dtype, layout=images.layout)
        work = projection(wide, weight, weight.dtype, 3, workload)
        if workload.is_frozen(weight):
            return Cost(work=Work(forward=work.forward))
        return Cost(work=work, saved=(patches,))


@op("grid_windows", "v -> windows", constants={"v"})
class GridWindows(Op):
    """The number of each patch's window: v `[batch, sequence, heads, head_dim]` → int64 `[batch, sequence]`, in which
    patches with one number attend to each other (Swin, Liu et al. 2021, section 3.2).

    The grid has `side` patches in a row, a window `size`; windows begin `shift` patches after the grid's first row and
    column. What is left at the edges are smaller windows: Swin rolls the grid, so that they fill whole windows, and
    masks their parts from each other, which is the same. Only the shape of v is read.
    """

    side: Count
    size: Count
    shift: Shift = 0

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (v,) = operands
        require(len(v.shape) == 4 and v.dtype != "int64", self, "wants v [batch, sequence, heads, head_dim]")
        require(self.side % self.size == 0 and self.shift < self.size, self, "wants windows that divide the grid")
        return (Type(shape=v.shape[:2], dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # A place in the grid is counted from the start of the sequence: v has whole sequences of some heads.
        v = reduced_layout(operands[0], meshes)
        for axis, placement in v.placements:
            v = v.replace(axis, Shard(2)) if placement == Shard(1) else v
        return Placing((v,), (v.only(Shard(0)),))


@op("mean_tokens", "x -> mean")
class MeanTokens(Op):
    """The mean over the tokens of each sequence: `[batch, sequence, dim]` → `[batch, dim]`.

    `length` is that of every whole sequence; a rank with a part of the sequence has a term of the mean.
    """

    length: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(len(x.shape) == 3 and x.shape[1] == "sequence", self, "wants x [batch, sequence, dim]")
        return (Type(shape=(x.shape[0], x.shape[2]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        x = reduced_layout(operands[0], meshes)
        if any(placement not in (Shard(0), Shard(1)) for _, placement in x.placements):
            raise LayoutError(f"mean_tokens has no rule for {x}")
        mean = ((axis, Partial() if placement == Shard(1) else placement) for axis, placement in x.placements)
        return Placing((x,), (Layout.of(mean),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=2, backward=2)


@op("first_token", "x -> first")
class FirstToken(Op):
    """The first token of each sequence: `[batch, sequence, dim]` → `[batch, dim]`. Sequences are whole."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(len(x.shape) == 3 and x.shape[1] == "sequence", self, "wants x [batch, sequence, dim]")
        return (Type(shape=(x.shape[0], x.shape[2]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = reduced_layout(operands[0], meshes).only(Shard(0))
        return Placing((layout,), (layout,))


@op("classify", "x weight bias -> logits")
class Classify(Op):
    """Logits of classes: x `[batch, dim]`, weight `[classes, dim]`, bias `[classes]` → `[batch, classes]`.

    Every rank with the images has whole x and all classes: a partial mean is reduced first.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight, bias = operands
        require(len(x.shape) == len(weight.shape) == 2, self, "wants vectors and a matrix")
        fits = weight.shape[1] == x.shape[1] and bias.shape == weight.shape[:1]
        require(fits and x.dtype == weight.dtype == bias.dtype, self, "wants a row and a bias for each class")
        return (Type(shape=(x.shape[0], weight.shape[0]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0]).only(Shard(0))
        return Placing((layout, REPLICATED, REPLICATED), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, weight, _ = operands
        keeps = (weight,) if workload.is_frozen(weight) else (x, weight)
        return Cost(work=projection(x, weight, x.dtype, 1, workload), saved=workload.keep(*keeps))


def _grid(op: Op, images: Value, size: int) -> None:
    """Requires square images `[batch, channels, side, side]` that patches of `size` pixels divide."""
    require(len(images.shape) == 4 and images.dtype != "int64", op, "wants images [batch, channels, height, width]")
    height, width = images.shape[2:]
    require(isinstance(height, int) and height == width and height % size == 0, op, "wants square images of patches")
