"""The kernels of a plan: the shapes that its ops need, and their source, for people and profilers.

No kernel is stored. At the first call, the kernels that run are rendered from their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.kernel_shape import KernelShape, complaint, render
from moec.codegen.kernels.plan_ways import Experts, Target, rows_per_rank, shape_on_rank, target_of, ways_of
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape
from moec.codegen.kernels.shapes import GatedShape, RouteShape, TilesShape
from moec.codegen.kernels.stored_tiles import TileKey, key_of
from moec.codegen.kernels.tile_rule import in_bulk
from moec.codegen.kernels.tiles import KERNELS, Kernel
from moec.codegen.plan import Plan
from moec.passes.ir import Block, Op, Program
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.mixture_values import choices_of, choices_per_token

Heads = o.ChosenHeads | o.MixHeads


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """A kernel shape, the block and op that need it, the choices per token, and which of its kernels are launched.

    If `only` is empty, all of them are launched.
    """

    shape: KernelShape
    block: str
    k: int
    op: Op
    only: tuple[str, ...] = ()

    @property
    def span(self) -> str | None:
        """The `.moe` line of the op."""
        return str(self.op.span) if self.op.span else None


def kernel_sources(plan: Plan) -> dict[str, str]:
    """The source of every kernel by its file name, with the blocks that use it."""
    cited: dict[KernelShape, list[str]] = {}
    for kernel in kernels_of(plan):
        where = f"{kernel.block} ({kernel.span})" if kernel.span else kernel.block
        users = cited.setdefault(kernel.shape, [])
        if where not in users:
            users.append(where)
    return {f"{shape.name}.py": f"{_head(users)}{render(shape)}" for shape, users in cited.items()}


def _head(users: list[str]) -> str:
    return "".join(f"# {user}\n" for user in users) + "\n"


def kernels_of(plan: Plan, on: Target | None = None) -> tuple[PlanKernel, ...]:
    """The kernels that one rank of the plan launches, on its own device or another one.

    None for a plan for CPU, where plain torch computes everything.
    """
    if plan.spec.cluster.device.kind == "cpu":
        return ()
    return tuple(
        kernel
        for block in plan.program.blocks
        for kernel in (*_of_mixture(plan, block, on), *_of_dense(plan, block))
        if complaint(kernel.shape) is None
    )


def _of_mixture(plan: Plan, block: Block, on: Target | None) -> Iterator[PlanKernel]:
    if choices_of(block) is None and not any(isinstance(op, Heads | Experts) for op in block.ops):
        return  # experts of slots, as `soft` has them, serve no choices
    k = choices_per_token(block)

    def kernel(shape: KernelShape, op: Op, *only: str) -> PlanKernel:
        return PlanKernel(shape, block.name, k, op, only)

    asked: dict[KernelShape, tuple[Op, list[str]]] = {}
    for op in block.ops:
        of_op = _of_heads(plan, block, op) if isinstance(op, Heads) else _of_rows(op, block, k)
        for shape, names in of_op:
            asked.setdefault(shape, (op, []))[1].extend(names)
    for shape, (op, launched) in asked.items():
        yield kernel(shape, op, *dict.fromkeys(launched))
    sources = sources_of(plan.program, block)
    tables: set[KernelShape] = set()
    for experts in block.ops:
        if isinstance(experts, Experts):
            up, down, by_library = _products(plan, block, experts, k, sources, on)
            tiles = TilesShape(experts=up.experts, rows=up.rows)
            if tiles not in tables:
                yield kernel(tiles, experts, *(("table",) if sources == 1 else ()))
            tables.add(tiles)
            yield kernel(up, experts)
            yield kernel(down, experts)
            around = AroundShape.of(down)
            if passes := around.launched(by_library):
                yield kernel(around, experts, *passes)


def _of_rows(op: Op, block: Block, k: int) -> Iterator[tuple[KernelShape, tuple[str, ...]]]:
    """The kernels that an op and its backward launch to choose experts, count choices and move rows."""
    experts = _experts_of(op, block)
    own, every = QueuesShape(experts=experts, k=k), QueuesShape(experts=experts, k=1)
    moved = block.scope[op.operands[0]]  # tokens or rows
    dim = moved.shape[-1] if moved.shape else 1
    places = PlacesShape(k=k, dim=dim if isinstance(dim, int) else 1, dtype=moved.dtype, weights="fp32")
    counting = ("count", "scan")
    match op:
        case o.Route():
            shape = _route_shape(op, experts)
            yield shape, () if shape == shape.of_backward else ("route",)
            if shape != shape.of_backward:
                yield shape.of_backward, ("route_backward",)
        case o.NestedRoute():
            yield _plain_route_shape(op.outer, op.k, op.score, op.order, op.normalize), ()
            yield _plain_route_shape(op.inner, op.inner_k, op.inner_score, op.inner_order, op.inner_normalize), ()
        case o.SampleExperts():
            yield _plain_route_shape(experts, 1, "softmax", "after", False), ("route",)
        case o.Permute():
            yield every, (*counting, "rank")
            yield places, ("fill", "add_rows")
        case o.PermutePadded():
            yield own, (*counting, "keep")
            yield every, (*counting, "place")
            yield places, ("fill", "add_rows")
        case o.PermuteDynamic():
            yield every, (*counting, "place")
            yield places, ("fill", "add_rows")
        case o.MixtureMlp():
            yield every, (*counting, "rank")
            yield places, ("invert", "combine", "add_parts", "add_rows")
        case o.Combine():
            yield places, ("combine", "combine_backward")
        case o.CombinePadded():
            yield places, ("combine", "mark", "combine_backward")
        case o.SumRows():
            yield places, ("add_rows", "fill")
        case o.CountQueues():
            yield own, counting
        case o.QueueStarts():
            yield own, ("start",)
        case o.KeepChoices():
            yield own, (*counting, "keep")
        case o.LargestLoad():
            yield every, counting


def _of_heads(plan: Plan, block: Block, op: Heads) -> Iterator[tuple[KernelShape, tuple[str, ...]]]:
    """The kernels that sort a rank's choices by group of heads, and move rows from tokens and back.

    Between attention and its output a row is a choice of its own, with the rank's heads of the group.
    """
    given, inside = op.named(op.operands), 1 if isinstance(op, o.ChosenHeads) else 2
    groups, *sizes = shape_on_rank(plan.program, block, given["weight"])
    width, dim = sizes[inside - 1] * sizes[inside], sizes[2 if inside == 1 else 0]
    k, dtype = block.scope[given["experts"]].shape[-1], block.scope[given["weight"]].dtype
    assert isinstance(k, int)
    of_tokens, of_choices = (
        PlacesShape(k=choices, dim=row, dtype=dtype, weights="fp32") for choices, row in ((k, dim), (1, width))
    )
    yield QueuesShape(experts=groups, k=1), ("count", "scan", "rank")
    yield of_choices, ("fill", "add_rows")
    if isinstance(op, o.ChosenHeads):
        yield of_tokens, ("fill", "add_rows")
    else:
        yield of_tokens, ("combine", "combine_backward")


def _plain_route_shape(experts: int, k: int, score: str, order: str, normalize: bool) -> RouteShape:
    """Logits and weights are float32 whatever the model's dtype is."""
    return RouteShape(experts=experts, k=k, score=score, after=order == "after", normalize=normalize, dtype="fp32")


def _route_shape(op: o.Route, experts: int) -> RouteShape:
    return replace(
        _plain_route_shape(experts, op.k, op.score, op.order, op.normalize),
        scale=op.scale,
        groups=op.groups,
        keep_groups=op.keep_groups,
        group_score=op.group_score,
        biased="bias" in op.optional,
    )


def _experts_of(op: Op, block: Block) -> int:
    """The experts that an op of a gate or a permutation tells apart; 1 for other ops."""
    given = op.named(block.operands(op))
    match op:
        case o.Permute() | o.PermuteDynamic() | o.CountQueues() | o.LargestLoad():
            return op.num_experts
        case o.MixtureMlp():
            experts = given["up"].shape[0]
        case o.Route() | o.SampleExperts():
            experts = given["logits"].shape[-1]
        case o.QueueStarts():
            experts = given["counts"].shape[-1]
        case o.PermutePadded() | o.KeepChoices():
            experts = given["starts"].shape[-1]
        case _:
            experts = 1
    assert isinstance(experts, int)
    return experts


def _of_dense(plan: Plan, block: Block) -> Iterator[PlanKernel]:
    """The gated activations between two dense projections, at their width on one rank."""
    for op in block.ops:
        if isinstance(op, o.Activation) and ACTIVATIONS[op.kind].gated:
            width = shape_on_rank(plan.program, block, op.operands[0])[-1]
            shape = GatedShape(
                hidden=width, activation=op.kind, dtype=op.results[0].dtype, clamp=op.clamp, alpha=op.alpha
            )
            yield PlanKernel(shape, block.name, 1, op)


def _products(
    plan: Plan, block: Block, op: Experts, k: int, sources: int, on: Target | None
) -> tuple[UpShape, DownShape, frozenset[Kernel]]:
    """Both projections' shapes, and the products that a library computes."""
    given = op.named(op.operands)
    dtype = block.scope[given["up"]].dtype
    experts, _, hidden, dim = shape_on_rank(plan.program, block, given["up"])
    of_tokens = k if isinstance(op, o.MixtureMlp) else 0
    ways = ways_of(plan, block, op, on).ways
    known = (experts, dim, hidden, op.activation, dtype, sources > 1, of_tokens, "up_bias" in given)
    device = on or target_of(plan)
    bulk = in_bulk(dtype, (dim, hidden), device.family, device.name)
    numbers: dict[str, Any] = {"clamp": op.clamp, "alpha": op.alpha, "bulk": bulk}
    up = UpShape.of(*known, ways, **numbers)
    down = DownShape.of(*known, ways, weighted="weights" in op.optional, **numbers)
    return up, down, frozenset(name for name in KERNELS if ways.tile(name) is None)


@dataclass(frozen=True, slots=True)
class PlanProducts:
    """The grouped products of a layer's experts on one rank, over `rows` rows from `sources` ranks."""

    key: TileKey
    up: UpShape
    down: DownShape
    rows: int
    sources: int


def products_of(plan: Plan) -> tuple[PlanProducts, ...]:
    """The products that tiles can be stored for, one per key."""
    kernels = kernels_of(plan)
    ups = [(kernel, kernel.shape) for kernel in kernels if isinstance(kernel.shape, UpShape)]
    downs = [kernel.shape for kernel in kernels if isinstance(kernel.shape, DownShape)]
    found: dict[TileKey, PlanProducts] = {}
    for (kernel, up), down in zip(ups, downs, strict=True):
        rows = rows_per_rank(plan, kernel.k)
        key = key_of(up.dtype, rows, up.experts, (up.dim, up.hidden), ACTIVATIONS[up.activation].gated)
        mesh = plan.meshes[plan.program.block(kernel.block).experts or "dense"]
        found.setdefault(key, PlanProducts(key, up, down, rows, dict(mesh.axes).get("ep", 1)))
    return tuple(found.values())


def sources_of(program: Program, block: Block) -> int:
    """The number of ranks that ragged rows arrive from, source by source; 1 for padded rows, which lie by expert."""
    exchange = next((op for op in block.ops if isinstance(op, o.ExchangeCounts)), None)
    return program.meshes_of(block).size(exchange.axis) if exchange is not None else 1
