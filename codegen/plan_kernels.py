"""The kernels of a plan: which shapes its graphs ask for, and `kernels/*.py`, their source, for people and profilers.

A plan's kernels are a function of its other content. They are rendered again when it is read and compared, so that an
edited one is refused, and they are never imported: what runs is rendered from shapes, at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moec.codegen.graph import Graph, Node
from moec.codegen.kernels import (
    GATED,
    DownShape,
    GatedShape,
    KernelShape,
    RouteShape,
    TilesShape,
    UpShape,
    complaint,
    render,
)
from moec.codegen.kernels_rows import PlacesShape, QueuesShape
from moec.codegen.plan import Body, ParameterData, Plan
from moec.codegen.stored_tiles import Choice, TileKey, choose, key_of
from moec.passes.ir import Layout, Shard
from moec.passes.tally import sequence_of

FAMILIES: Mapping[str, str] = {"hip": "cdna", "a100": "ampere"}
"""Whose tiles a device takes, by its kind or name; Hopper's otherwise."""


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """A shape, the body that asks for it, its choices a token, the `.moe` line, and which of its kernels are launched.

    All of them where `only` names none.
    """

    shape: KernelShape
    body: str
    k: int
    span: str | None
    only: tuple[str, ...] = ()


def kernel_files(plan: Plan) -> dict[str, str]:
    """The source of every kernel by its path in the plan folder."""
    cited: dict[KernelShape, list[str]] = {}
    for kernel in kernels_of(plan):
        where = f"{kernel.body} ({kernel.span})" if kernel.span else kernel.body
        users = cited.setdefault(kernel.shape, [])
        if where not in users:
            users.append(where)
    return {f"kernels/{shape.name}.py": f"{_head(users)}{render(shape)}" for shape, users in cited.items()}


def _head(users: list[str]) -> str:
    lines = "".join(f"# {user}\n" for user in users)
    return f"{lines}# For reading: moec renders this again from its own templates, and never imports this file.\n\n"


def kernels_of(plan: Plan) -> tuple[PlanKernel, ...]:
    """What a rank of the plan launches. Nothing on processors, where plain torch does the work."""
    if plan.spec.cluster.device.kind == "cpu":
        return ()
    return tuple(
        kernel
        for stage in plan.stages
        for body in plan.manifest.bodies
        if body.graph in stage.by_name()
        for kernel in (*_of_mixture(plan, body, stage.by_name()), *_of_dense(plan, stage.graph(body.graph)))
        if complaint(kernel.shape) is None
    )


def _of_mixture(plan: Plan, body: Body, graphs: Mapping[str, Graph]) -> Iterator[PlanKernel]:
    nodes = graphs[body.graph].nodes
    parameters = {parameter.name: parameter for parameter in body.parameters}
    calls = [node for node in nodes if node.op == "call_module" and f"{node.target}.up.weight" in parameters]
    routes = [node for node in nodes if node.target == "moec.route.default"]
    if len(calls) != 1 or len(routes) != 1:
        return
    (call,), (route,) = calls, routes
    assert call.graph is not None
    up = parameters[f"{call.target}.up.weight"]
    experts, dim, dtype = up.shape[0], up.shape[-1], up.dtype
    _, k, score, after, normalize = route.args
    assert isinstance(k, int)
    assert isinstance(score, str)

    def kernel(shape: KernelShape, node: Node, *only: str) -> PlanKernel:
        return PlanKernel(shape, body.graph, k, node.span, only)

    # Logits and weights are float32 whatever the model's dtype is.
    yield kernel(
        RouteShape(experts=experts, k=k, score=score, after=bool(after), normalize=bool(normalize), dtype="fp32"), route
    )
    asked: dict[KernelShape, tuple[Node, list[str]]] = {}
    for node in (*nodes, *graphs[call.graph].nodes):
        for shape, names in _of_rows(node.target, experts, k, dim, dtype):
            asked.setdefault(shape, (node, []))[1].extend(names)
    for shape, (node, launched) in asked.items():
        yield kernel(shape, node, *dict.fromkeys(launched))
    for node in graphs[call.graph].nodes:
        if node.target in ("moec.expert_mlp.default", "moec.mixture_mlp.default"):
            of_tokens = k if node.target == "moec.mixture_mlp.default" else 0
            sources = _sources(nodes, plan)
            tiles, *products = _products(plan, up, node, k, sources, of_tokens)
            yield kernel(tiles, node, *(("table",) if sources == 1 else ()))
            for shape in products:
                yield kernel(shape, node)


def _of_rows(target: str, experts: int, k: int, dim: int, dtype: str) -> Iterator[tuple[KernelShape, tuple[str, ...]]]:
    """The kernels with which an operator and its backward count choices and move rows."""
    own, every = QueuesShape(experts=experts, k=k), QueuesShape(experts=experts, k=1)
    places = PlacesShape(k=k, dim=dim, dtype=dtype, weights="fp32")
    counting = ("count", "scan")
    match target.removeprefix("moec.").removesuffix(".default"):
        case "permute":
            yield every, (*counting, "rank")
            yield places, ("fill", "add_rows")
        case "permute_padded":
            yield own, (*counting, "keep")
            yield every, (*counting, "place")
            yield places, ("fill", "add_rows")
        case "permute_dynamic":
            yield every, (*counting, "place")
            yield places, ("fill", "add_rows")
        case "mixture_mlp":
            yield every, (*counting, "rank")
            yield places, ("invert", "combine", "add_parts", "add_rows")
        case "combine":
            yield places, ("combine", "combine_backward")
        case "combine_padded":
            yield places, ("combine", "mark", "combine_backward")
        case "sum_rows":
            yield places, ("add_rows", "fill")
        case "count_queues":
            yield own, counting
        case "queue_starts":
            yield own, ("start",)
        case "keep_choices":
            yield own, (*counting, "keep")
        case "largest_load":
            yield every, counting


def _of_dense(plan: Plan, graph: Graph) -> Iterator[PlanKernel]:
    """The gated activations between two dense projections: their width is what the first was unflattened to."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.target in ("moec.swiglu.default", "moec.geglu.default"):
            source = node
            while source.target != "aten.unflatten.int" and source.refs():
                source = nodes[source.refs()[0]]
            if source.args and isinstance(source.args[-1], tuple):
                activation, width = node.target.split(".")[1], source.args[-1][-1]
                shape = GatedShape(hidden=width, activation=activation, dtype=plan.spec.subject.dtype.value)
                yield PlanKernel(shape, graph.name, 1, node.span)


def _products(plan: Plan, up: ParameterData, node: Node, k: int, sources: int, of_tokens: int) -> Iterator[KernelShape]:
    bias, activation, *weights = node.args[6:] if of_tokens else node.args[5:]
    experts, _, hidden, dim = _local_shape(plan, up)
    rows = rows_per_rank(plan, k)
    tiles = tiles_of(plan, up.dtype, rows, experts, (dim, hidden), str(activation)).tiles
    known = (experts, dim, hidden, str(activation), up.dtype, sources > 1, of_tokens, bias is not None)
    yield TilesShape(experts=experts, rows=tiles.up.rows)
    yield UpShape.of(*known, tiles.up)
    yield DownShape.of(*known, tiles.down, weighted=any(weight is not None for weight in weights))


def tiles_of(plan: Plan, dtype: str, rows: int, experts: int, widths: tuple[int, int], activation: str) -> Choice:
    """The tiles of a product on the plan's device, and where they are from."""
    device = plan.spec.cluster.device
    family = FAMILIES.get(device.kind) or FAMILIES.get(device.name) or "hopper"
    own = plan.tiles.by_key() if plan.tiles is not None else {}
    return choose(dtype, rows, experts, widths, activation in GATED, device=device.name, family=family, tuned=own)


@dataclass(frozen=True, slots=True)
class PlanProducts:
    """The grouped products of a layer's experts as a rank runs them: `rows` rows, which come from `sources` ranks."""

    key: TileKey
    up: UpShape
    down: DownShape
    rows: int
    sources: int


def products_of(plan: Plan) -> tuple[PlanProducts, ...]:
    """What tiles can be stored for, once for each key."""
    kernels = kernels_of(plan)
    ups = [(kernel, kernel.shape) for kernel in kernels if isinstance(kernel.shape, UpShape)]
    downs = [kernel.shape for kernel in kernels if isinstance(kernel.shape, DownShape)]
    bodies = {body.graph: body for body in plan.manifest.bodies}
    found: dict[TileKey, PlanProducts] = {}
    for (kernel, up), down in zip(ups, downs, strict=True):
        rows = rows_per_rank(plan, kernel.k)
        key = key_of(up.dtype, rows, up.experts, (up.dim, up.hidden), up.activation in GATED)
        mesh = plan.meshes[bodies[kernel.body].experts or "dense"]
        found.setdefault(key, PlanProducts(key, up, down, rows, dict(mesh.axes).get("ep", 1)))
    return tuple(found.values())


def tokens_per_rank(plan: Plan) -> int:
    """Of a batch, or of one sequence for each of its shares where the file trains nothing; at least 1."""
    train = plan.spec.train
    tokens = (train.batch if train else plan.data_size) * sequence_of(plan.spec)
    return max(1, tokens // plan.world_size)


def rows_per_rank(plan: Plan, k: int) -> int:
    """Rows that a rank's experts get of so many tokens, were all of them equally busy."""
    return tokens_per_rank(plan) * k


def _sources(nodes: tuple[Node, ...], plan: Plan) -> int:
    """From how many ranks rows come: ragged ones lie by rank, those in places of a capacity by expert."""
    for node in nodes:
        if node.target == "moec.exchange_counts.default":
            return len(plan.manifest.groups[str(node.args[-1])][0])
    return 1


def _local_shape(plan: Plan, parameter: ParameterData) -> tuple[int, ...]:
    shape, mesh = list(parameter.shape), plan.meshes[parameter.mesh]
    for axis, placement in Layout.parse(parameter.layout).placements:
        assert isinstance(placement, Shard)
        shape[placement.dim] //= mesh.size(axis)
    assert math.prod(shape) > 0
    return tuple(shape)
