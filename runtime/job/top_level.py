"""Runs the graph that calls the layers, node by node: a layer is the module that `model.layers` has at the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from moec.codegen.emit import emit_graph, facts_of, site_of, weight_users
from moec.passes.ir import Output, Program, Role
from moec.passes.ir.interface import FORWARD
from moec.runtime.errors import JobError
from moec.runtime.job.home import Home, own_weights
from moec.runtime.job.weights import Microbatches

if TYPE_CHECKING:
    from moec.runtime.job.module import PlanModule


class Outline:
    """The nodes of the graph, and when parameters are fetched and values dropped; copies of a model share it.

    `segments` are the parameters used between two calls of layers: they are fetched together, before their first use.
    """

    def __init__(self, graph: fx.Graph, results: Sequence[Output]) -> None:
        nodes = tuple(graph.nodes)
        self.inputs = {role: node for node in nodes if (role := _role(node)) is not None}
        self.nodes = tuple(node for node in nodes if node.op != "placeholder")
        self.results = tuple(results)
        self.num_layers = sum(node.op == "call_module" for node in nodes)
        self.segments = _segments(self.nodes)
        self.index_of = {first_use: index for index, (first_use, _) in enumerate(self.segments)}
        self.last_used_at = _last_uses(nodes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outline:
        return self


class TopLevel:
    """`forward` of a stage. Parameters used between two calls of layers share one `Weights`, called at the first."""

    def __init__(
        self, program: Program, home: Home, owner: nn.Module, microbatches: Microbatches, *, float64: bool
    ) -> None:
        forward = program.block(FORWARD)
        graph = emit_graph(program, forward, groups=home.groups, float64=float64)
        self._outline = Outline(graph, forward.outputs)
        sites = {name: site_of(op, None) for name, op in weight_users(forward).items()}
        self.weights = [
            own_weights(owner, "", [_parameter(node) for node in segment], sites, home, microbatches)
            for _, segment in self._outline.segments
        ]

    def run(self, model: PlanModule, tokens: Tensor) -> dict[tuple[Role, int | None], Any]:
        """The results of a forward pass by `Output.key`."""
        if len(model.layers) != self._outline.num_layers:
            raise JobError(
                "MOE0710",
                f"the model has {len(model.layers)} layers, and its plan {self._outline.num_layers}",
                "how many layers there are, the file says; one may be replaced by a module that gives as many results",
            )
        for weights in model.all_weights():
            weights.begin()
        try:
            return self._run(model, tokens)
        finally:
            for weights in model.all_weights():
                weights.drop_begun()

    def _run(self, model: PlanModule, tokens: Tensor) -> dict[tuple[Role, int | None], Any]:
        outline = self._outline
        values: dict[fx.Node, Any] = {outline.inputs["tokens"]: tokens}
        for node in outline.nodes:
            if node in outline.index_of:
                index = outline.index_of[node]
                values.update(zip(outline.segments[index][1], self.weights[index](), strict=True))
            match node.op:
                case "output":
                    (given,) = node.args
                    found = given if isinstance(given, tuple | list) else (given,)
                    return {output.key: values[value] for output, value in zip(outline.results, found, strict=True)}
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


def _role(node: fx.Node) -> Role | None:
    """The role of an input; None of all other nodes."""
    value = facts_of(node).value
    return value.role if node.op == "placeholder" and value is not None else None


def _parameter(node: fx.Node) -> str:
    name = facts_of(node).parameter
    assert name is not None
    return name


def _segments(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The parameters used between two calls of layers, each list with the node that is the first to use one."""
    segments: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
    first_use, segment, seen = None, list[fx.Node](), set[fx.Node]()
    for node in nodes:
        new = [used for used in node.all_input_nodes if used.op == "placeholder" and facts_of(used).parameter]
        new = [used for used in new if used not in seen]
        if new and not segment:
            first_use = node
        segment += new
        seen.update(new)
        if node.op in ("call_module", "output") and first_use is not None:
            segments.append((first_use, tuple(segment)))
            first_use, segment = None, []
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
