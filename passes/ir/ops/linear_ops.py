"""Dense ops: projections, biases, activations, sums and the router's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.attribute_types import ActivationName, ActivationParameter, Bounds, Positive
from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.limits import MAX_RANK
from moec.passes.ir.op import LayoutError, Meshes, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import TOKEN_DIMS, Blocks, own_tokens, reduced_layout
from moec.passes.ir.ops.token_operands import require_activation
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.cost import Cost, Saved, Work
from moec.passes.ir.work.formulas import elementwise, projection, with_more

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("linear", "x weight -> y")
class Linear(TokenOp):
    """Contracts the last `contract` dims of x and weight: `[…, in]`, `[out…, in]` → `[…, out…]`."""

    contract: Annotated[int, Bounds(ge=1, le=MAX_RANK)] = 1

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        n = self.contract
        require(x.shape[-n:] == weight.shape[-n:], self, f"{x.shape[-n:]} and {weight.shape[-n:]} do not contract")
        require(x.dtype == weight.dtype, self, "wants one dtype")
        return (Type(shape=(*x.shape[:-n], *weight.shape[:-n]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        x, weight = operands
        num_kept, out = len(x.shape) - self.contract, len(weight.shape) - self.contract
        weight_layout = layout_of(weight)
        x_layout = reduced_layout(x, meshes)
        x_placements: dict[str, Placement] = {}
        result_placements: dict[str, Placement] = {}
        # Contracted dims and outputs are cut in the order of the weight's cuts, all other dims in that of x.
        for axis in dict.fromkeys((*weight_layout.axes, *x_layout.axes)):
            match weight_layout.get(axis), x_layout.get(axis):
                case Shard(dim=dim), _ if dim < out:  # by columns: each rank computes its outputs
                    result_placements[axis] = Shard(num_kept + dim)
                case Shard(dim=dim), _:  # by rows: each rank computes a term of every output
                    x_placements[axis], result_placements[axis] = Shard(num_kept + dim - out), Partial()
                case None, Shard(dim=dim) as placement if dim < num_kept:
                    x_placements[axis] = result_placements[axis] = placement
                case None, Shard() if (tokens := meshes.own_tokens.get(axis)) is not None:  # heads become tokens again
                    x_placements[axis] = result_placements[axis] = tokens
                case placements:
                    raise LayoutError(f"linear has no rule for {axis}: weight and x are {placements}")
        return Placing((Layout.of(x_placements), weight_layout), (Layout.of(result_placements),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, weight = operands
        keeps = (weight,) if workload.is_frozen(weight) else (x, weight)
        return Cost(work=projection(x, weight, x.dtype, self.contract, workload), saved=workload.keep(*keeps))


@op("add_bias", "x bias -> y")
class AddBias(TokenOp):
    """x `[batch, sequence, out…]`, bias `[out…]` → x + bias. Separate from `linear`, which may give a partial sum."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, bias = operands
        require(x.shape[2:] == bias.shape and x.dtype == bias.dtype, self, "wants a bias for each output")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        x = reduced_layout(operands[0], meshes)
        outs = ((axis, p) for axis, p in x.placements if isinstance(p, Shard) and p.dim >= TOKEN_DIMS)
        bias = Layout.of((axis, Shard(p.dim - TOKEN_DIMS)) for axis, p in outs)
        return Placing((x, bias), (x,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return replace(elementwise(self, operands, results, workload), passes_gradient=True)


@op("activation", "x -> y")
class Activation(TokenOp):
    """`[…, parts, hidden]` → `[…, hidden]`, by a word of `ACTIVATIONS` with its parameters."""

    kind: ActivationName
    clamp: ActivationParameter = None
    alpha: ActivationParameter = None

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require_activation(self, self.kind, x.shape[-2])
        return (Type(shape=(*x.shape[:-2], x.shape[-1]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        last = len(operands[0].shape) - 1
        x = reduced_layout(operands[0], meshes)
        if any(placement == Shard(last - 1) for _, placement in x.placements):
            raise LayoutError("activation has no rule for parts on different ranks")
        moved = ((axis, Shard(last - 1) if placement == Shard(last) else placement) for axis, placement in x.placements)
        return Placing((x,), (Layout.of(moved),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (x,), (y,) = operands, results
        kind = ACTIVATIONS[self.kind]
        saved = workload.keep(x)
        if not kind.gated and kind.function.keeps == "result":
            saved = workload.keep(y)
        elif not kind.gated and kind.function.keeps == "inner":
            saved = (workload.inner(y, "inner", workload.count(y), y.dtype),)
        return elementwise(self, operands, results, workload, keeps=saved)


@op("add", "terms* -> total")
class Add(TokenOp):
    """The sum of values of one type."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        first = operands[0]
        require(all(v.shape == first.shape and v.dtype == first.dtype for v in operands), self, "types differ")
        return (Type(shape=first.shape, dtype=first.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Addition is linear: partial sums add to a partial sum. Where layouts differ, use that of the tokens.
        layouts = [layout_of(v) for v in operands]
        # Axes go in the order of the tokens' cuts, because `replace` appends a new cut as the last of its dim.
        layout = layouts[0]
        for axis in dict.fromkeys(axis for candidate in (meshes.tokens, *layouts) for axis in candidate.axes):
            if len({candidate.get(axis) for candidate in layouts}) > 1:
                layout = layout.replace(axis, meshes.tokens.get(axis) if operands[0].shape else None)
        return Placing((layout,) * len(operands), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        forward = elementwise(self, operands, results, workload).work.forward
        return Cost(work=Work(forward=forward), passes_gradient=True)


@op("scale", "x -> y")
class Scale(TokenOp):
    """`x · factor`: multipliers as in Granite, after muP (Yang et al. 2022, arXiv 2203.03466, table 8).

    The op is linear: a partial sum stays one, and is reduced after it.
    """

    factor: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        return Placing((layout,), (layout,))


@op("router", "x weight bias? -> logits")
class Router(TokenOp):
    """Logits in at least fp32: `[batch, sequence, dim]`, weight `[experts, dim]` → `[batch, sequence, experts]`.

    x and the weight are narrow or wide, each by itself. `bias` `[experts]`, of the weight's dtype, is added to the
    logits (gpt-oss, arXiv 2508.10925, section 2.3). `rounds`: they are computed in the weight's dtype, and then wide.
    """

    rounds: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight, *biases = self.named(operands).values()
        require(x.shape[-1] == weight.shape[-1], self, "widths differ")
        fits = all((bias.shape, bias.dtype) == (weight.shape[:1], weight.dtype) for bias in biases)
        require(fits, self, "wants a bias for each expert")
        require(promoted(x.dtype) == promoted(weight.dtype), self, "wants x of the weight's dtype or of fp32")
        return (Type(shape=(*x.shape[:-1], weight.shape[0]), dtype=promoted(weight.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes, parameters=len(operands) - 1)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, weight, *_ = operands
        (logits,) = results
        dtype = weight.dtype if self.rounds else logits.dtype
        work = projection(x, weight, dtype, 1, workload)
        # The router converts x and the weight to one dtype, and saves the copies.
        keeps: list[Saved] = []
        for name, v in (("x", x), ("weight", weight)):
            if v is x and workload.is_frozen(weight):
                continue
            keeps += workload.keep(v) if v.dtype == dtype else [workload.inner(logits, name, workload.count(v), dtype)]
        cast = sum(
            workload.count(v) * (workload.width(v.dtype) + workload.width(dtype))
            for v in (x, weight)
            if v.dtype != dtype
        )
        return with_more(Cost(work=work, saved=tuple(keeps)), forward=cast, backward=cast)
