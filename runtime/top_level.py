"""Runs the graph that calls the layers, node by node: a layer is the module that `model.layers` has at the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from moec.codegen.fx import build_graph
from moec.codegen.graph import Ref, StageGraphs
from moec.runtime.home import Home, own_weights
from moec.runtime.weights import Microbatches

if TYPE_CHECKING:
    from moec.runtime.module import PlanModule


class Outline:
    """The nodes of the graph, and when parameters are fetched and values dropped; copies of a model share it.

    `segments` are the parameters between two calls of layers, which are fetched together, at the first of them.
    """

    def __init__(self, graph: fx.Graph, results: Sequence[str]) -> None:
        self.nodes = tuple(graph.nodes)
        self.results = tuple(results)
        self.segments = _segments(self.nodes)
        self.index_of = {segment[0]: index for index, segment in enumerate(self.segments)}
        self.last_used_at = _last_uses(self.nodes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outline:
        return self


class TopLevel:
    """`forward` of a stage. Parameters used between two calls of layers share one `Weights`, called at the first."""

    def __init__(
        self, stage: StageGraphs, home: Home, owner: nn.Module, microbatches: Microbatches, *, float64: bool
    ) -> None:
        built = build_graph(stage, "forward", groups=home.groups, float64=float64)
        results = [arg.node for arg in stage.graph("forward").nodes[-1].args if isinstance(arg, Ref)]
        self._outline = Outline(built.graph, results)
        self.weights = [
            own_weights(owner, "", [str(node.target) for node in segment], built.sites, home, microbatches)
            for segment in self._outline.segments
        ]

    def run(self, model: PlanModule, tokens: Tensor) -> dict[str, Any]:
        """The results of a forward pass by their names."""
        for weights in model.all_weights():
            weights.begin()
        try:
            return self._run(model, tokens)
        finally:
            for weights in model.all_weights():
                weights.drop_begun()

    def _run(self, model: PlanModule, tokens: Tensor) -> dict[str, Any]:
        outline = self._outline
        values: dict[fx.Node, Any] = {}
        for node in outline.nodes:
            match node.op:
                case "placeholder":
                    values[node] = tokens
                case "get_attr":
                    if node in outline.index_of:
                        index = outline.index_of[node]
                        values.update(zip(outline.segments[index], self.weights[index](), strict=True))
                case "output":
                    (given,) = node.args
                    found = given if isinstance(given, tuple | list) else (given,)
                    return dict(zip(outline.results, (values[value] for value in found), strict=True))
                case "call_module":
                    layer = model.layers[int(str(node.target).rpartition(".")[2])]
                    values[node] = layer(*(values[arg] for arg in node.args))
                case _:
                    assert callable(node.target)
                    args = [_value(arg, values) for arg in node.args]
                    values[node] = node.target(*args, **{k: _value(v, values) for k, v in node.kwargs.items()})
            for dead in outline.last_used_at.get(node, ()):
                del values[dead]
        raise AssertionError("a graph without an output")


def _value(arg: Any, values: Mapping[fx.Node, Any]) -> Any:
    return values[arg] if isinstance(arg, fx.Node) else arg


def _segments(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    segments: list[tuple[fx.Node, ...]] = []
    segment: list[fx.Node] = []
    for node in nodes:
        if node.op == "get_attr":
            segment.append(node)
        if node.op in ("call_module", "output") and segment:
            segments.append(tuple(segment))
            segment = []
    return segments


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The values that each node is the last to use."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen and node.op != "output":
                found.setdefault(node, []).append(used)
            seen.add(used)
    return found
