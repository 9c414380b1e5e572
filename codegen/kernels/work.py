"""What a kernel computes and moves at least: the numbers under a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape
from moec.codegen.kernels.shapes import GatedShape, KernelShape, ProductShape, RouteShape
from moec.passes.ir.activations import ACTIVATIONS

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
INDEX = 8
"""Bytes of a choice or a place."""


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of matrix products, and bytes that memory must give or take, each tensor once."""

    flops: int
    moved: int

    def seconds(self, peak: float | None, bandwidth: float) -> float:
        """The least time on a device of `peak` FLOP/s (None: unknown) and `bandwidth` bytes/s."""
        return max(self.moved / bandwidth, self.flops / peak if peak else 0.0)

    def bound(self, peak: float | None, bandwidth: float) -> str:
        """Which of the two takes longer."""
        return "arithmetic" if peak and self.flops / peak > self.moved / bandwidth else "memory"


def work_of(shape: KernelShape, kernel: str, tokens: int, rows: int) -> Work | None:
    """The work of a shape's kernel for a rank's tokens and its experts' rows; None for tables, which are small."""
    match shape:
        case RouteShape():
            scores, choices = (
                tokens * shape.experts * BYTES[shape.dtype],
                tokens * shape.k * (INDEX + BYTES[shape.dtype]),
            )
            return Work(0, (3 if kernel == "route_backward" else 2) * scores + choices)
        case PlacesShape():
            return _of_places(shape, kernel, tokens)
        case QueuesShape():
            return _of_queues(kernel, rows * INDEX)
        case ProductShape():
            return _of_products(shape, kernel, rows)
        case GatedShape():
            return Work(0, (5 if kernel == "gated_backward" else 3) * tokens * shape.hidden * BYTES[shape.dtype])
    return None


def _of_places(shape: PlacesShape, kernel: str, tokens: int) -> Work:
    """Where as many places as choices are there: capacity 1, nothing dropped."""
    one = tokens * shape.dim * BYTES[shape.dtype]
    places, taken = tokens * shape.k * INDEX, tokens * shape.k
    match kernel:
        case "mark":
            return Work(0, places + taken)
        case "combine_backward":
            return Work(0, one + 2 * shape.k * one + places + taken)
        case "invert" | "add_parts":
            return Work(0, 2 * places)
    return Work(0, one + shape.k * one + places)


def _of_queues(kernel: str, choices: int) -> Work | None:
    """Counts of blocks are small beside the bytes of the choices."""
    match kernel:
        case "count":
            return Work(0, choices)
        case "keep" | "place" | "rank":
            return Work(0, 2 * choices)
    return None


def _of_products(shape: ProductShape, kernel: str, rows: int) -> Work:
    wide = shape.hidden * ACTIVATIONS[shape.activation].parts
    x, activated, hidden = rows * shape.dim, rows * shape.hidden, rows * wide
    given = x // (shape.k or 1)  # rows, or the tokens that they are gathered from
    if kernel.endswith("_bias"):
        return Work(0, (hidden if kernel == "up_bias" else given) * BYTES[shape.dtype])
    width = wide if kernel.startswith("up") else shape.hidden
    matrix = shape.experts * width * shape.dim
    tensors = {
        "up": given + hidden + activated,
        "up_backward": hidden + x,
        "up_weights": hidden + given,
        "down": activated + x,
        "down_backward": given + 2 * hidden + activated,
        "down_weights": given + activated,
    }
    return Work(2 * rows * shape.dim * width, (tensors[kernel] + matrix) * BYTES[shape.dtype])
