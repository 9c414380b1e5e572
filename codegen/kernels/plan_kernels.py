"""The kernels of a plan: the shapes that its ops need, and their source, for people and profilers.

No kernel is stored. At the first call, the kernels that run are rendered from their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.kernel_shape import KernelShape, complaint, render
from moec.codegen.kernels.plan_ways import Experts, Target, rows_per_rank, shape_on_rank, target_of, ways_of
from moec.codegen.kernels.product_shapes import DownShape, UpShape
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape, SlotsShape
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
    """A kernel shape, the block and op that need it, and the choices per token (`k`).

    `launched`: the shape's kernels that are launched; if it is empty, all are.
    """

    shape: KernelShape
    block: str
    k: int
    op: Op
    launched: tuple[str, ...] = ()

    @property
    def span(self) -> str | None:
        """The `.moe` line of the op."""
        return str(self.op.span) if self.op.span else None


def kernel_sources(plan: Plan) -> dict[str, str]:
    """The source of every kernel by its file name, with the blocks that use it."""
    users_by_shape: dict[KernelShape, list[str]] = {}
    for kernel in kernels_of(plan):
        user = f"{kernel.block} ({kernel.span})" if kernel.span else kernel.block
        users = users_by_shape.setdefault(kernel.shape, [])
        if user not in users:
            users.append(user)
    return {f"{shape.name}.py": f"{_head(users)}{render(shape)}" for shape, users in users_by_shape.items()}


def _head(users: list[str]) -> str:
    return "".join(f"# {user}\n" for user in users) + "\n"


def kernels_of(plan: Plan, target: Target | None = None) -> tuple[PlanKernel, ...]:
    """The kernels that one rank of the plan launches, on its own device or another one.

    None for a plan for CPU, where plain torch computes everything.
    """
    if plan.spec.cluster.device.kind == "cpu":
        return ()
    return tuple(
        kernel
        for block in plan.program.blocks
        for kernel in (*_mixture_kernels(plan, block, target), *_dense_kernels(plan, block))
        if complaint(kernel.shape) is None
    )


def _mixture_kernels(plan: Plan, block: Block, target: Target | None) -> Iterator[PlanKernel]:
    if choices_of(block) is None and not any(isinstance(op, Heads | Experts) for op in block.ops):
        return  # experts of slots, as of `soft`, have no choices
    k = choices_per_token(block)

    def kernel(shape: KernelShape, op: Op, *launched: str) -> PlanKernel:
        return PlanKernel(shape, block.name, k, op, launched)

    launched_by_shape: dict[KernelShape, tuple[Op, list[str]]] = {}
    for op in block.ops:
        op_kernels = _head_kernels(plan, block, op) if isinstance(op, Heads) else _row_kernels(op, block, k)
        for shape, names in op_kernels:
            launched_by_shape.setdefault(shape, (op, []))[1].extend(names)
    for shape, (op, launched) in launched_by_shape.items():
        yield kernel(shape, op, *dict.fromkeys(launched))
    sources = sources_of(plan.program, block)
    tables: set[KernelShape] = set()
    for experts in block.ops:
        if isinstance(experts, Experts):
            up, down, by_library = _products(plan, block, experts, k, sources, target)
            tiles = TilesShape(experts=up.experts, rows=up.rows)
            if tiles not in tables:
                yield kernel(tiles, experts, *(("table",) if sources == 1 else ()))
            tables.add(tiles)
            yield kernel(up, experts)
            yield kernel(down, experts)
            around = AroundShape.of(down)
            if passes := around.launched(by_library):
                yield kernel(around, experts, *passes)


def _row_kernels(op: Op, block: Block, k: int) -> Iterator[tuple[KernelShape, tuple[str, ...]]]:
    """The kernels that an op and its backward launch to choose experts, count choices and move rows."""
    experts = _experts_of(op, block)
    choice_queues, joint_queues = QueuesShape(experts=experts, k=k), QueuesShape(experts=experts, k=1)
    moved = block.scope[op.operands[0]]  # tokens or rows
    dim = moved.shape[-1] if moved.shape else 1
    places = PlacesShape(k=k, dim=dim if isinstance(dim, int) else 1, dtype=moved.dtype, weights="fp32")
    counting = ("count", "scan")
    match op:
        case o.Route():
            shape = _route_shape(op, experts)
            yield shape, () if shape == shape.backward_shape else ("route",)
            if shape != shape.backward_shape:
                yield shape.backward_shape, ("route_backward",)
        case o.NestedRoute():
            yield _plain_route_shape(op.outer, op.k, op.score, op.order, op.normalize), ()
            yield _plain_route_shape(op.inner, op.inner_k, op.inner_score, op.inner_order, op.inner_normalize), ()
        case o.SampleExperts():
            yield _plain_route_shape(experts, 1, "softmax", "after", False), ("route",)
        case o.Permute():
            yield joint_queues, (*counting, "rank")
            yield places, ("fill", "add_rows")
        case o.PermutePadded():
            yield choice_queues, (*counting, "keep")
            yield joint_queues, (*counting, "place")
            yield places, ("fill", "add_rows")
        case o.PermuteDynamic():
            yield joint_queues, (*counting, "place")
            yield places, ("fill", "add_rows")
        case o.MixtureMlp():
            yield joint_queues, (*counting, "rank")
            yield places, ("invert", "combine", "add_parts", "add_rows")
        case o.Combine():
            yield places, ("combine", "combine_backward")
        case o.CombinePadded():
            yield places, ("combine", "mark", "combine_backward")
        case o.SumRows():
            yield places, ("add_rows", "fill")
        case o.CountQueues():
            yield choice_queues, counting
        case o.QueueStarts():
            yield choice_queues, ("start",)
        case o.KeepChoices():
            yield choice_queues, (*counting, "keep")
        case o.LargestLoad():
            yield joint_queues, counting
        case o.AssignSlots():
            yield joint_queues, counting
            _, ranks, slots = block.scope[op.operands[1]].shape
            assert isinstance(ranks, int)
            assert isinstance(slots, int)
            if ranks * slots > experts:  # with guests
                yield joint_queues, ("rank",)
                yield SlotsShape(experts=experts, ranks=ranks, slots=slots), ()


def _head_kernels(plan: Plan, block: Block, op: Heads) -> Iterator[tuple[KernelShape, tuple[str, ...]]]:
    """The kernels that sort a rank's choices by groups of heads, and move rows between tokens and choices.

    Between attention and its output each choice is a row, with the rank's heads of the chosen group.
    """
    operands, inside = op.named(op.operands), 1 if isinstance(op, o.ChosenHeads) else 2
    groups, *sizes = shape_on_rank(plan.program, block, operands["weight"])
    width, dim = sizes[inside - 1] * sizes[inside], sizes[2 if inside == 1 else 0]
    k, dtype = block.scope[operands["experts"]].shape[-1], block.scope[operands["weight"]].dtype
    assert isinstance(k, int)
    token_places, choice_places = (
        PlacesShape(k=choices, dim=row, dtype=dtype, weights="fp32") for choices, row in ((k, dim), (1, width))
    )
    yield QueuesShape(experts=groups, k=1), ("count", "scan", "rank")
    yield choice_places, ("fill", "add_rows")
    if isinstance(op, o.ChosenHeads):
        yield token_places, ("fill", "add_rows")
    else:
        yield token_places, ("combine", "combine_backward")


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
    """The number of experts of a gate's or a permutation's op; 1 for other ops."""
    operands = op.named(block.operands(op))
    match op:
        case o.Permute() | o.PermuteDynamic() | o.CountQueues() | o.LargestLoad() | o.AssignSlots():
            return op.num_experts
        case o.MixtureMlp():
            experts = operands["up"].shape[0]
        case o.Route() | o.SampleExperts():
            experts = operands["logits"].shape[-1]
        case o.QueueStarts():
            experts = operands["counts"].shape[-1]
        case o.PermutePadded() | o.KeepChoices():
            experts = operands["starts"].shape[-1]
        case _:
            experts = 1
    assert isinstance(experts, int)
    return experts


def _dense_kernels(plan: Plan, block: Block) -> Iterator[PlanKernel]:
    """The gated activations between two dense projections, at their width on one rank."""
    for op in block.ops:
        if isinstance(op, o.Activation) and ACTIVATIONS[op.kind].gated:
            width = shape_on_rank(plan.program, block, op.operands[0])[-1]
            shape = GatedShape(
                hidden=width, activation=op.kind, dtype=op.results[0].dtype, clamp=op.clamp, alpha=op.alpha
            )
            yield PlanKernel(shape, block.name, 1, op)


def _products(
    plan: Plan, block: Block, op: Experts, k: int, sources: int, target: Target | None
) -> tuple[UpShape, DownShape, frozenset[Kernel]]:
    """Both projections' shapes, and the products that a library computes."""
    operands = op.named(op.operands)
    dtype = block.scope[operands["up"]].dtype
    experts, _, hidden, dim = shape_on_rank(plan.program, block, operands["up"])
    choices = k if isinstance(op, o.MixtureMlp) else 0
    ways = ways_of(plan, block, op, target).ways
    layer_fields = (experts, dim, hidden, op.activation, dtype, sources > 1, choices, "up_bias" in operands)
    device = target or target_of(plan)
    bulk = in_bulk(dtype, (dim, hidden), device.family, device.name)
    options: dict[str, Any] = {"clamp": op.clamp, "alpha": op.alpha, "bulk": bulk}
    up = UpShape.of(*layer_fields, ways, **options)
    down = DownShape.of(*layer_fields, ways, weighted="weights" in op.optional, **options)
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
    """The products whose tiles can be stored, one for each key."""
    kernels = kernels_of(plan)
    ups = [(kernel, kernel.shape) for kernel in kernels if isinstance(kernel.shape, UpShape)]
    downs = [kernel.shape for kernel in kernels if isinstance(kernel.shape, DownShape)]
    products: dict[TileKey, PlanProducts] = {}
    for (kernel, up), down in zip(ups, downs, strict=True):
        rows = rows_per_rank(plan, kernel.k)
        key = key_of(up.dtype, rows, up.experts, (up.dim, up.hidden), ACTIVATIONS[up.activation].gated)
        mesh = plan.meshes[plan.program.block(kernel.block).experts or "dense"]
        products.setdefault(key, PlanProducts(key, up, down, rows, dict(mesh.axes).get("ep", 1)))
    return tuple(products.values())


def sources_of(program: Program, block: Block) -> int:
    """The number of ranks that ragged rows arrive from, source by source; 1 for padded rows, which lie by expert."""
    axes = {
        axis
        for op in block.ops
        if isinstance(op, o.ExchangeCounts | o.GatherCounts | o.ExchangeAndGatherCounts)
        for axis in op.attributes().values()
    }
    return math.prod(map(program.meshes_of(block).size, axes))
