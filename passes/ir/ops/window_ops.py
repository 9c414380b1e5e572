"""Ops of convolutional feed-forwards: the window of vectors around each token, and maps at positions of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds, Count, WindowFunction
from moec.passes.ir.layout import Shard
from moec.passes.ir.limits import MAX_DIM
from moec.passes.ir.op import Meshes, Op, Placing, Type, op, require
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks, follow_tokens
from moec.passes.ir.value import Dim, Value
from moec.passes.ir.work.cost import Cost, Direction, Product, Saved, Work
from moec.passes.ir.work.formulas import elementwise, linear_backward

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("windows", "x segments? real? -> window")
class Windows(Op):
    """Each token's window: x `[batch, sequence, dim]` → `[batch, sequence, (before + 1 + after) · dim]`.

    A window has the vectors of `before` earlier tokens, of the token and of `after` later ones, in order; zeros outside
    of the sequence, for tokens of other `segments`, and for padding tokens (`real` is 0).
    """

    before: Annotated[int, Bounds(ge=0, le=MAX_DIM)]
    after: Annotated[int, Bounds(ge=0, le=MAX_DIM)]

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "`conv`, which sees neighbours in the sequence"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, *optional = operands
        batch, sequence, dim = x.shape
        assert isinstance(dim, int)
        for numbers in optional:
            require_real(self, x, [numbers])
        return (Type(shape=(batch, sequence, (self.before + 1 + self.after) * dim), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # A window reaches over the cuts of a sequence.
        layout = meshes.own_tokens.only(Shard(0))
        return Placing((layout,) * len(operands), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=2, backward=2)


@op("window_linear", "x weight bias? -> y")
class WindowLinear(Op):
    """One map at `positions` of each window: x `[…, (positions + kernel − 1) · in]` → `[…, positions · out]`.

    weight `[out, kernel, in]`, bias `[out]`; then the function `then` of each number.
    """

    positions: Count
    then: WindowFunction = "none"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        x, weight = by_name["x"], by_name["weight"]
        require_window(self, x, weight.shape, self.positions)
        biases = [by_name["bias"]] if "bias" in by_name else []
        require(all(bias.shape == weight.shape[:1] for bias in biases), self, "wants a bias for each output")
        require(all(v.dtype == x.dtype for v in (weight, *biases)), self, "wants one dtype")
        out = weight.shape[0]
        assert isinstance(out, int)
        return (Type(shape=(*x.shape[:-1], self.positions * out), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], meshes, len(operands) - 1)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        weight = operands[1]
        out, kernel, width = workload.shape(weight)
        count = workload.count(results[0]) / out
        return Cost(
            work=window_work(count, out, kernel * width, weight.dtype),
            saved=window_saved(operands[0], results[0], count, kernel * width, self.positions, self.then, workload),
        )


def require_window(op: Op, x: Value, weight: Sequence[Dim], positions: int) -> None:
    """Requires windows of x that fit `positions` positions of a map of shape `[out, kernel, in]`."""
    _, kernel, width = weight
    assert isinstance(kernel, int)
    assert isinstance(width, int)
    require(x.shape[-1] == (positions + kernel - 1) * width, op, f"{x.shape} does not fit {positions} of {weight}")


def window_work(count: float, out: int, width: int, dtype: str) -> Work:
    """The product of a map at `count` positions, with `width` numbers each."""
    product = Product(name="linear", m=count, n=out, k=width, dtype=dtype)
    backward = Direction(products=linear_backward(product), launches=4)
    return Work(forward=Direction(products=(product,), launches=3), backward=backward)


def window_saved(
    x: Value, y: Value, count: float, width: int, positions: int, function: str, workload: Workload
) -> tuple[Saved, ...]:
    """What backward keeps: the copied windows where they overlap, else x, and the numbers before the function."""
    windows = workload.keep(x) if positions == 1 else (workload.inner(y, "windows", count * width, x.dtype),)
    return windows if function == "none" else (*windows, workload.inner(y, "before", workload.count(y), y.dtype))
