"""Cost formulas that several ops use: element-wise ops, projections, attention, experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moec.passes.ir.row_table import table_length
from moec.passes.ir.value import Parameter
from moec.passes.ir.work.arrays import rounded
from moec.passes.ir.work.cost import Cost, Direction, Product, Saved, Work

if TYPE_CHECKING:
    from moec.passes.ir.op import Op
    from moec.passes.ir.value import Value
    from moec.passes.ir.work.workload import Workload

INT32 = 4
"""Bytes of one number of a table of rows."""


def elementwise(
    op: Op,
    operands: Sequence[Value],
    results: Sequence[Value],
    workload: Workload,
    *,
    keeps: Sequence[Saved] = (),
    forward: int = 1,
    backward: int = 1,
    scratch: tuple[float, float] = (0.0, 0.0),
) -> Cost:
    """No matrix product: each tensor is read or written once. `forward` and `backward` are kernel launches.

    Backward reads `keeps` and the gradients of results, and writes the gradients of operands. An op without a
    differentiable operand or result has no backward. `scratch` is that of `Cost`.
    """
    outputs = _differentiable(results)
    trained = {name: value for name, value in op.named(operands).items() if not workload.is_frozen(value)}
    gradients = _differentiable([value for name, value in trained.items() if name not in op.constants])
    forward_pass = Direction(moved=workload.bytes(*operands, *results), launches=forward)
    if not outputs or not gradients:
        return Cost(work=Work(forward=forward_pass), scratch=(scratch[0], 0.0))
    saved_bytes = sum(saved.bytes for saved in keeps)
    backward_pass = Direction(moved=workload.bytes(*outputs, *gradients) + saved_bytes, launches=backward)
    return Cost(work=Work(forward=forward_pass, backward=backward_pass), saved=tuple(keeps), scratch=scratch)


def work_of_kernels(*, forward: tuple[float, int], backward: tuple[float, int]) -> Work:
    """The bytes that kernels without products move, and the number of the kernels, in forward and in backward."""
    return Work(
        forward=Direction(moved=forward[0], launches=forward[1]),
        backward=Direction(moved=backward[0], launches=backward[1]),
    )


def with_more(cost: Cost, *, forward: float, backward: float) -> Cost:
    """This cost, where torch's kernels move so many more bytes (`Direction.again`) in passes that the op has."""
    ahead, back = cost.work.forward, cost.work.backward
    work = Work(forward=replace(ahead, again=forward), backward=replace(back, again=backward * (back.launches > 0)))
    return replace(cost, work=work)


def _differentiable(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.dtype != "int64"]


def projection(x: Value, weight: Value, dtype: str, contract: int, workload: Workload) -> Work:
    """`[…, in] × [out…, in]`, computed in `dtype`. Backward: one product for x and one for a weight that trains."""
    local = workload.shape(weight)
    k = math.prod(local[-contract:])
    n = math.prod(local[:-contract])
    product = Product(name="linear", m=workload.count(x) / k, n=n, k=k, dtype=dtype)
    products = linear_backward(product, trains=not workload.is_frozen(weight))
    backward = Direction(products=products, launches=len(products))
    return Work(forward=Direction(products=(product,), launches=1), backward=backward)


def linear_backward(product: Product, *, trains: bool = True) -> tuple[Product, ...]:
    """The products of backward of a linear map: for the gradient of its input, and of a weight that `trains`."""
    of_input = replace(product, name=f"{product.name}_backward", contracts="n")
    return (of_input, replace(product, name=f"{product.name}_weights", contracts="m")) if trains else (of_input,)


def fused_attention(q: Value, k: Value, v: Value, out: Value, workload: Workload, *, keys: float) -> Work:
    """The products q·kᵀ and scores·v with `keys` keys for each token: those that it attends to, as in MFU figures.

    Scores stay on chip. Backward has twice the products of forward, and repeats the scores.
    """
    batch, sequence, heads, width = workload.shape(q)
    rows, groups = batch * sequence * heads, batch * heads
    scores = Product(name="scores", m=rows, n=keys, k=width, groups=groups, dtype=q.dtype, kind="attention")
    values = replace(scores, name="values", n=workload.shape(v)[3], k=keys)
    repeated = replace(scores, is_repeated=True)
    moved = workload.bytes(q, k, v, out)
    return Work(
        forward=Direction(products=(scores, values), moved=moved, launches=1),
        backward=Direction(products=(repeated, *(scores, values) * 2), moved=2 * moved, launches=1),
    )


def experts_work(
    rows: float,
    largest: float,
    experts: Sequence[Value],
    workload: Workload,
    *,
    forward: int,
    backward: int,
    moved: float = 0,
) -> Work:
    """Up, activation and down over `rows` rows. `experts` are the rank's up, down and, where given, both biases.

    The up product writes the pre-activation, which is saved, and the activated rows. Backward recomputes the activated
    rows and writes the gradient of the pre-activation. `moved` are further bytes, the same forward and backward.
    """
    up, _, *biases = experts
    groups, parts, hidden, dim = workload.shape(up)
    width = workload.width(up.dtype)
    up_product = Product(
        name="up", m=rows, n=parts * hidden, k=dim, groups=groups, largest=largest, dtype=up.dtype, kind="grouped"
    )
    down_product = replace(up_product, name="down", n=dim, k=hidden)
    bias_bytes = rows * (parts * hidden + dim) * width if biases else 0
    return Work(
        forward=Direction(products=(up_product, down_product), moved=rows * hidden * width + moved, launches=forward),
        backward=Direction(
            products=(*linear_backward(down_product), *linear_backward(up_product)),
            moved=2 * rows * parts * hidden * width + bias_bytes + moved,
            launches=backward + len(biases),
        ),
    )


def experts_scratch(
    rows: float, largest: float, experts: Sequence[Value], workload: Workload, *, gathers: tuple[int, int]
) -> tuple[float, float]:
    """Scratch of `experts_work`: activated rows and, in backward, gradients of hidden rows.

    On CPU a buffer holds the rows of one expert at a time, on other devices all rows. `gathers` are the numbers of
    copies of rows, as wide as the model, in forward and in backward, where an expert's rows are not contiguous.
    """
    up = experts[0]
    _, parts, hidden, dim = workload.shape(up)
    row_bytes = (largest if workload.device == "cpu" else rows) * workload.width(up.dtype)
    return row_bytes * (hidden + gathers[0] * dim), row_bytes * ((2 + parts) * hidden + gathers[1] * dim)


def saved_inside_experts(result: Value, rows: float, up: Value, workload: Workload) -> tuple[Saved, Saved]:
    """The tensors inside an op of experts that it saves: `rows` pre-activations in the dtype of `up`, their table."""
    experts, parts, hidden, _ = workload.shape(up)
    table = table_length(rounded(rows), rounded(experts))
    return (
        workload.inner(result, "hidden", rows * parts * hidden, up.dtype),
        Saved(f"{result.name}:table", INT32 * table),
    )


def used_share(experts: Value, workload: Workload) -> float:
    """The fraction of all experts that one token goes to; guests are no experts of their own."""
    count = experts.shape[0]
    assert isinstance(count, int)
    if isinstance(experts, Parameter):
        count -= experts.guests
    return workload.sizes["choices"] * workload.share(experts) / count
