"""The least FLOPs and bytes of a kernel, for a roofline.

`Op.cost` gives them for ops with one kernel. For ops with several kernels this file divides them among these, and adds
the tensors that a product's kernel reads besides those of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape
from moec.codegen.kernels.shapes import GatedShape, RouteShape
from moec.codegen.kernels.tiles import GATHERING_KERNELS
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.value import DTYPE_BYTES
from moec.passes.ir.work.cost import Direction, Work

INDEX = DTYPE_BYTES["int64"]
"""Bytes of a choice or a place."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Floating-point operations of matrix products, and bytes read from or written to memory, each tensor once."""

    flops: float
    moved: float

    def seconds(self, peak: float | None, bandwidth: float) -> float:
        """The least time on a device of `peak` FLOP/s (None: unknown) and `bandwidth` bytes/s."""
        return max(self.moved / bandwidth, self.flops / peak if peak else 0.0)

    def bound(self, peak: float | None, bandwidth: float) -> str:
        """The slower of the two: "arithmetic" or "memory"."""
        return "arithmetic" if peak and self.flops / peak > self.moved / bandwidth else "memory"


def work_of(shape: KernelShape, kernel: str, work: Work, tokens: int, rows: int) -> KernelWork | None:
    """The work of a kernel on a rank's `tokens` and `rows`, in an op with this `work` in all; None if it is small."""
    match shape:
        case GatedShape():
            return KernelWork(0, _direction(work, kernel).moved)
        case ProductShape():
            return _product_work(shape, kernel, work)
    return work_of_rows(shape, kernel, tokens, rows)


def work_of_rows(shape: KernelShape, kernel: str, tokens: int, rows: int) -> KernelWork | None:
    """The work of a kernel that chooses experts, counts choices or moves rows; None if it is small."""
    match shape:
        case RouteShape():
            return _route_work(shape, kernel, tokens)
        case PlacesShape():
            return _places_work(shape, kernel, tokens)
        case QueuesShape():
            return _queues_work(kernel, rows * INDEX)
    return None


def _route_work(shape: RouteShape, kernel: str, tokens: int) -> KernelWork:
    """Forward reads logits and writes probabilities and choices; backward reads one gradient more than it writes."""
    width = DTYPE_BYTES[shape.dtype]
    logits, weights, choices = tokens * shape.experts * width, tokens * shape.k * width, tokens * shape.k * INDEX
    if kernel.endswith("_backward"):
        return KernelWork(0, 3 * logits + 2 * weights + choices)
    return KernelWork(0, 2 * logits + weights + choices)


def _direction(work: Work, kernel: str) -> Direction:
    return work.backward if kernel.endswith("_backward") else work.forward


def _places_work(shape: PlacesShape, kernel: str, tokens: int) -> KernelWork:
    """Assumes as many places as choices: capacity factor 1, nothing dropped."""
    token_bytes = tokens * shape.dim * DTYPE_BYTES[shape.dtype]
    places, taken_flags = tokens * shape.k * INDEX, tokens * shape.k
    match kernel:
        case "mark":
            return KernelWork(0, places + taken_flags)
        case "combine_backward":
            return KernelWork(0, token_bytes + 2 * shape.k * token_bytes + places + taken_flags)
        case "invert" | "add_parts":
            return KernelWork(0, 2 * places)
    return KernelWork(0, token_bytes + shape.k * token_bytes + places)


def _queues_work(kernel: str, choices: int) -> KernelWork | None:
    """Counts only the choices' bytes; the counts of blocks are small."""
    match kernel:
        case "count":
            return KernelWork(0, choices)
        case "keep" | "place" | "rank":
            return KernelWork(0, 2 * choices)
    return None


def _product_work(shape: ProductShape, kernel: str, work: Work) -> KernelWork:
    """The work of one of the op's products, and of the other tensors that its kernel reads and writes.

    With `k` > 0 rows are never copied: the kernels read the tokens, 1/k of the rows' bytes.
    """
    products = {product.name: product for product in (*work.forward.products, *work.backward.products)}
    rows, width = products["up"].m, DTYPE_BYTES[shape.dtype]
    inputs = rows * shape.dim / (shape.k or 1)
    hidden = rows * shape.hidden * ACTIVATIONS[shape.activation].parts
    if kernel.endswith("_bias"):
        return KernelWork(0, (hidden if kernel == "up_bias" else inputs) * width)
    extra_numbers = {"up": rows * shape.hidden, "down_backward": 2 * hidden}.get(kernel, 0)
    if kernel in GATHERING_KERNELS:
        extra_numbers -= rows * shape.dim - inputs
    return KernelWork(products[kernel].flops, products[kernel].moved + extra_numbers * width)
