"""A plan at toy widths: the same layers, degrees, groups and graphs, with numbers so small that one machine runs it.

The graphs are the given plan's own, in which the literals that stand for widths are replaced. Which these are is seen
by compiling the plan's Spec twice, as it is and with toy widths: the two may differ in them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from moec.codegen.graph import Arg, Graph, Node
from moec.codegen.plan import Body, Plan, make_plan, without_spans
from moec.grammar import to_text
from moec.grammar.diagnostics import InternalError
from moec.grammar.spec import Layer, LayerModule, Model, Moe, Spec, TokenEmbedding
from moec.passes.lower import context_of
from moec.passes.pipeline import compile_program

DIM, HEAD_DIM, HIDDEN, VOCAB = 16, 4, 8, 64
"""A head of 4 turns at two speeds, so that rope's theta still counts."""

SEQUENCE, SHORT_SEQUENCE, MANY_RANKS = 8, 4, 65
"""Tokens of a sequence, and on as many ranks as this or more."""

Node_ = TypeVar("Node_", Layer, Moe)


@dataclass(frozen=True, slots=True)
class Width:
    """One kind of width that was shrunk."""

    name: str
    before: int
    toy: int

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.toy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """The first thing in a plan that differs from what moec compiles the plan's own Spec to."""

    layer: str
    op: str
    value: str
    span: str | None


@dataclass(frozen=True, slots=True)
class ToyPlan:
    """A plan at toy widths, what they were, and where it is not the plan that moec would write."""

    plan: Plan
    widths: tuple[Width, ...]
    unlike: Unlike | None


def at_toy_widths(plan: Plan, *, fewer_experts: bool = False) -> ToyPlan:
    """`plan` with its own graphs and toy widths. `fewer_experts` keeps only as many as degrees and gates need.

    Raises `InternalError` if what moec compiles depends on widths by more than literals that are widths.
    """
    shrink = _Shrink(plan, fewer_experts)
    spec = shrink.spec()
    own, toy = (make_plan(s, compile_program(s).program, plan.manifest.moec) for s in (plan.spec, spec))
    _require_same_but_for(own, toy, shrink.widths)
    pairs = {o.name: (o, t) for o, t in zip(own.stages[0].graphs, toy.stages[0].graphs, strict=True)}
    graphs = tuple(_graph_at(g, *pairs[g.name]) if g.name in pairs else g for g in plan.stages[0].graphs)
    bodies_of = {o.graph: (o, t) for o, t in zip(own.manifest.bodies, toy.manifest.bodies, strict=True)}
    bodies = tuple(_body_at(b, *bodies_of[b.graph]) if b.graph in bodies_of else b for b in plan.manifest.bodies)
    manifest = plan.manifest.model_copy(update={"spec": to_text(spec), "bodies": bodies})
    small = Plan(manifest, (plan.stages[0].model_copy(update={"graphs": graphs}),))
    return ToyPlan(small, shrink.widths, _first_unlike(plan, own))


# ---- graphs ----------------------------------------------------------------------------------------


def _graph_at(given: Graph, own: Graph, toy: Graph) -> Graph:
    pairs = {o.name: (o, t) for o, t in zip(own.nodes, toy.nodes, strict=True)}
    nodes = tuple(_node_at(node, *pairs[node.name]) if node.name in pairs else node for node in given.nodes)
    return given.model_copy(update={"nodes": nodes})


def _node_at(given: Node, own: Node, toy: Node) -> Node:
    if own.args == toy.args or len(given.args) != len(own.args):
        return given
    args = tuple(_arg_at(g, o, t) for g, o, t in zip(given.args, own.args, toy.args, strict=True))
    return given.model_copy(update={"args": args})


def _arg_at(given: Arg, own: Arg, toy: Arg) -> Arg:
    """The toy's literal for the one that moec wrote; another, which somebody else wrote, stays."""
    if isinstance(given, tuple) and isinstance(own, tuple) and isinstance(toy, tuple) and len(given) == len(own):
        return tuple(t if g == o else g for g, o, t in zip(given, own, toy, strict=True))
    return toy if given == own else given


def _body_at(given: Body, own: Body, toy: Body) -> Body:
    pairs = {o.name: (o, t) for o, t in zip(own.parameters, toy.parameters, strict=True)}
    parameters = []
    for parameter in given.parameters:
        before, after = pairs.get(parameter.name, (parameter, parameter))
        shape = _arg_at(parameter.shape, before.shape, after.shape)
        parameters.append(parameter.model_copy(update={"shape": shape}))
    return given.model_copy(update={"parameters": tuple(parameters)})


def _require_same_but_for(own: Plan, toy: Plan, widths: Sequence[Width]) -> None:
    """Graphs, parameters, meshes and groups are alike, but for shrunk widths and ranks' parts of them."""
    for before, after in _unequal(_facts(own), _facts(toy)):
        numbers = isinstance(before, int) and isinstance(after, int)
        if not numbers or not any(before * width.toy == after * width.before for width in widths):
            raise InternalError(f"{own.name}: at toy widths {before!r} of its graphs becomes {after!r}")
    if (own.manifest.meshes, own.manifest.groups) != (toy.manifest.meshes, toy.manifest.groups):
        raise InternalError(f"{own.name}: toy widths change its meshes")


def _facts(plan: Plan) -> list[Any]:
    bare = without_spans(plan)
    bodies = [body.model_dump(mode="json") for body in bare.manifest.bodies]
    return [bodies, [stage.model_dump(mode="json") for stage in bare.stages]]


def _unequal(own: Any, toy: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of leaves that differ."""
    if isinstance(own, dict) and isinstance(toy, dict) and own.keys() == toy.keys():
        for key, value in own.items():
            yield from _unequal(value, toy[key])
    elif isinstance(own, list) and isinstance(toy, list) and len(own) == len(toy):
        for before, after in zip(own, toy, strict=True):
            yield from _unequal(before, after)
    elif own != toy:
        yield own, toy


def _first_unlike(plan: Plan, own: Plan) -> Unlike | None:
    """Where `plan` first differs from `own`, which was compiled from its Spec; lines of the file apart."""
    given, made = without_spans(plan), without_spans(own)
    for graph, other, spans in zip_longest(given.stages[0].graphs, made.stages[0].graphs, plan.stages[0].graphs):
        if graph == other:
            continue
        if graph is None or other is None or graph.name != other.name:
            return Unlike(layer=(graph or other).name, op="graph", value=(graph or other).name, span=None)
        for index, (node, wanted) in enumerate(zip_longest(graph.nodes, other.nodes)):
            if node != wanted:
                missing = wanted is not None and wanted.name not in {n.name for n in graph.nodes}
                at = spans.nodes[min(index, len(spans.nodes) - 1)]
                return _unlike_node(graph.name, wanted if missing else node, at)
    for body, other_body in zip_longest(given.manifest.bodies, made.manifest.bodies):
        if body != other_body:
            return _unlike_body(body, other_body)
    for name in {**given.manifest.groups, **made.manifest.groups}:
        if given.manifest.groups.get(name) != made.manifest.groups.get(name):
            return Unlike(layer="plan", op="group", value=name, span=None)
    return Unlike(layer="plan", op="mesh", value="", span=None) if given.meshes != made.meshes else None


def _unlike_node(graph: str, node: Node, given: Node) -> Unlike:
    return Unlike(layer=graph, op=node.target, value=node.value or node.name, span=given.span)


def _unlike_body(body: Body | None, other: Body | None) -> Unlike:
    some = body or other
    assert some is not None
    given, wanted = (b.parameters if b else () for b in (body, other))
    name = next((f"@{(p or q).name}" for p, q in zip_longest(given, wanted) if p != q), some.graph)
    return Unlike(layer=some.graph, op="parameter", value=name, span=None)


# ---- the Spec --------------------------------------------------------------------------------------

_ORDER = ("dim", "vocab", "padding", "head_dim", "hidden", "experts", "sequence")


class _Shrink:
    """Writes a Spec with toy widths. Layers that were one object stay one, and those that were two stay two."""

    def __init__(self, plan: Plan, fewer_experts: bool) -> None:
        self._given, self._ranks = plan.spec, plan.world_size
        meshes = plan.meshes.values()
        self._pieces = math.lcm(*(mesh.size(axis) for mesh in meshes for axis in ("tp", "etp", "cp")))
        self._eps = math.lcm(*(mesh.size("ep") for mesh in meshes)) if fewer_experts else None
        self._toys: dict[tuple[str, int], int] = {}
        self._hidden = self._ladder("hidden", _hidden_widths(plan.spec), HIDDEN)
        self._heads = self._ladder("head_dim", _head_widths(plan.spec), HEAD_DIM)
        self._made: dict[int, object] = {}

    def spec(self) -> Spec:
        """The Spec."""
        if not self._given.has_model:
            return self._given.replace(layers=(self._layer_module(self._given.layer),))
        model, train = self._given.model, self._given.train
        tokens = self._shrunk("sequence", context_of(self._given), self._tokens())
        vocab = self._shrunk("vocab", model.vocab, VOCAB)
        small = model.replace(
            dim=self._shrunk("dim", model.dim, DIM),
            vocab=vocab,
            embedding=self._embedding(vocab),
            context=tokens,
            layers=tuple(self._once(layer, self._layer) for layer in model.layers),
        )
        if train is None:
            return self._given.replace(model=small)
        return self._given.replace(model=small, train=train.replace(sequence=min(tokens, train.sequence)))

    def _layer_module(self, layer: LayerModule) -> LayerModule:
        """The subject of a `layer` file. Nothing in its graphs is as long as a sequence."""
        dim = self._shrunk("dim", layer.subject.dim, DIM)
        return layer.replace(dim=dim, moe=self._mixture(layer.moe))

    def _embedding(self, vocab: int) -> TokenEmbedding:
        """The padding id is one of the toy vocabulary's: the last, if it was beyond it."""
        embedding = self._given.model.embedding
        if embedding.padding is None or embedding.padding < vocab:
            return embedding
        self._toys["padding", embedding.padding] = vocab - 1
        return embedding.replace(padding=vocab - 1)

    @property
    def widths(self) -> tuple[Width, ...]:
        """What was shrunk."""
        shrunk = (Width(name, before, toy) for (name, before), toy in self._toys.items() if toy != before)
        return tuple(sorted(shrunk, key=lambda width: (_ORDER.index(width.name), width.before)))

    def _tokens(self) -> int:
        return SEQUENCE if self._ranks < MANY_RANKS else SHORT_SEQUENCE

    def _shrunk(self, name: str, width: int, wanted: int, pieces: int | None = None) -> int:
        """The toy width: it divides over as many ranks as `width` does, and no more."""
        each = pieces or self._pieces
        shared = math.gcd(width, each)
        toy = next((toy for toy in range(wanted, width) if math.gcd(toy, each) == shared), width)
        self._toys[name, width] = toy
        return toy

    def _ladder(self, name: str, found: Iterator[int], smallest: int) -> Mapping[int, int]:
        """Toy widths for all that are found; those that differ still do."""
        step = math.lcm(self._pieces, 4)
        return {
            width: self._shrunk(name, width, smallest + step * place) for place, width in enumerate(sorted(set(found)))
        }

    def _once(self, node: Node_, make: Callable[[Node_], Node_]) -> Node_:
        if id(node) not in self._made:
            self._made[id(node)] = make(node)
        made = self._made[id(node)]
        assert isinstance(made, type(node))
        return made

    def _layer(self, layer: Layer) -> Layer:
        width = self._heads[_head_width(self._given.model, layer)]
        changed: dict[str, object] = {"attention": layer.attention.replace(head_dim=width)}
        if layer.ffn is not None:
            changed["ffn"] = self._narrow(layer.ffn)
        if layer.moe is not None:
            changed["moe"] = self._once(layer.moe, self._mixture)
        return layer.replace(**changed)

    def _mixture(self, moe: Moe) -> Moe:
        (experts,) = moe.parts
        count = experts.count
        if self._eps is not None:
            count = self._shrunk("experts", count, max(getattr(moe.gate, "k", 1), self._eps), self._eps)
        beside = {name: self._narrow(path) for name in ("shared", "residual") if (path := getattr(moe, name))}
        return moe.replace(experts=experts.replace(count=count, body=self._narrow(experts.body)), **beside)

    def _narrow(self, path: Any) -> object:
        return path.replace(hidden=self._hidden[path.hidden])


def _hidden_widths(spec: Spec) -> Iterator[int]:
    paths: list[Any] = [layer.ffn for layer in spec.model.layers] if spec.has_model else []
    for moe in spec.subject.mixtures:
        if moe is not None:
            paths += [moe.shared, moe.residual, *(part.body for part in moe.parts)]
    return (path.hidden for path in paths if path is not None)


def _head_widths(spec: Spec) -> Iterator[int]:
    return (_head_width(spec.model, layer) for layer in spec.model.layers) if spec.has_model else iter(())


def _head_width(model: Model, layer: Layer) -> int:
    attention: Any = layer.attention
    return int(attention.head_dim or model.dim // attention.heads)
