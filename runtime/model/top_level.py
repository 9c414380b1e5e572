"""Runs the graph that calls the layers, node by node. Layers are read from `model.layers` at each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from moec.codegen.emit import emit_graph, info_of, last_uses, site_of, weight_users
from moec.passes.ir import Output, OutputKey, Program, Role, Setting
from moec.passes.ir.interface import forwards
from moec.passes.ir.ops import Call
from moec.runtime import unscored
from moec.runtime.action_log import note_action
from moec.runtime.errors import JobError
from moec.runtime.guards.every_guard import first_complaint
from moec.runtime.guards.guard import PassEnds
from moec.runtime.inputs.settings import setting_values
from moec.runtime.model.plan_layer import layer_inside
from moec.runtime.model.split_products import split_products_of
from moec.runtime.ranks.checks import Complaint
from moec.runtime.weights.home import Home, make_weights
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.regathering import Handles

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule


class Outline:
    """The nodes of the graph, where it gathers and casts parameters, and where it drops values.

    Copies of a model share an outline.

    `segments`: the parameters first used between two calls of layers, gathered and cast together before that use.
    """

    def __init__(self, graph: fx.Graph, results: Sequence[Output]) -> None:
        nodes = tuple(graph.nodes)
        self.inputs = {role: node for node in nodes if (role := _role(node)) is not None}
        self.settings = {name: node for node in nodes if (name := _setting(node)) is not None}
        self.nodes = tuple(node for node in nodes if node.op != "placeholder")
        self.results = tuple(results)
        self.segments = _segments(self.nodes)
        self.index_of = {first_use: index for index, (first_use, _) in enumerate(self.segments)}
        self.last_used_at = last_uses(nodes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outline:
        return self


class TopLevel:
    """`forward` of a stage. Each segment's parameters have one `Weights`, called at the segment's first use.

    `layers` are the numbers of the layers that it calls, `routers` their gates in the order in which they run.
    """

    def __init__(
        self, program: Program, stage: int, routers: Sequence[str], home: Home, owner: nn.Module, open_step: OpenStep,
        *, float64: bool,
    ) -> None:  # fmt: skip
        self._open_step = open_step
        forward = forwards(program)[stage]
        self.layers, self.routers = [op.layer for op in forward.ops if isinstance(op, Call)], tuple(routers)
        self._depth = len(program.layers)
        graph = emit_graph(program, forward, groups=home.groups, float64=float64)
        if program.splits_backward:
            split_products_of(graph)
        self._outline = Outline(graph, forward.outputs)
        sites = {name: site_of(op, None) for name, op in weight_users(forward).items()}
        self.weights = [
            make_weights(owner, "", [_parameter(node) for node in segment], sites, home, open_step)
            for _, segment in self._outline.segments
        ]

    def run(
        self, model: PlanModule, inputs: Mapping[Role, Tensor], *, reads_values: bool
    ) -> tuple[dict[OutputKey, Any], Complaint | None]:
        """The results of a forward pass by `Output.key`, and the complaint about its router logits. `inputs`: those of
        the graph, by role."""
        if len(model.layers) != self._depth:
            raise JobError(
                "MOE0710",
                f"the model has {len(model.layers)} layers, and its plan {self._depth}",
                "the file fixes the number of layers; replace a layer by a module with as many results",
            )
        for weights in model.weights_of(self):
            weights.begin()
        self._open_step.last_use = None
        try:
            with unscored.noting() as masks:
                results = self._run(model, inputs)
        finally:
            self._open_step.last_use = None
            for weights in model.weights_of(self, wrapped=True):
                weights.drop_prepared()
        return results, first_complaint(PassEnds(masks, self.routers, reads_values=reads_values))

    def _run(self, model: PlanModule, inputs: Mapping[Role, Tensor]) -> dict[OutputKey, Any]:
        outline = self._outline
        values: dict[fx.Node, Any] = {node: inputs[role] for role, node in outline.inputs.items()}
        settings = setting_values(list(outline.settings), model.settings, training=model.training)
        values.update(zip(outline.settings.values(), settings, strict=True))
        handles, prefetches = Handles(), self._prefetches(model)
        next(prefetches, None)
        for node in outline.nodes:
            if node in outline.index_of:
                index = outline.index_of[node]
                values.update(zip(outline.segments[index][1], self.weights[index](handles), strict=True))
                next(prefetches, None)
            match node.op:
                case "output":
                    (results,) = node.args
                    nodes = results if isinstance(results, tuple | list) else (results,)
                    return {output.key: values[value] for output, value in zip(outline.results, nodes, strict=True)}
                case "call_module":
                    layer = model.layers[_layer_number(node)]
                    next(prefetches, None)
                    note_action("forward", f"layers.{_layer_number(node)}")
                    values[node] = layer(*(values[arg] for arg in node.args))
                case _:
                    assert callable(node.target)
                    args = [_value(arg, values) for arg in node.args]
                    with handles.saved_as_handles():
                        values[node] = node.target(*args, **{k: _value(v, values) for k, v in node.kwargs.items()})
            for unused in outline.last_used_at.get(node, ()):
                del values[unused]
        raise AssertionError("a graph without an output")

    def _prefetches(self, model: PlanModule) -> Iterator[None]:
        """Starts the gather of one segment's or layer's weights at each `next`, in the order of their use.

        A user's module in a layer's place has no weights of the plan: its `next` does nothing.
        """
        for node in self._outline.nodes:
            if node in self._outline.index_of:
                self.weights[self._outline.index_of[node]].prefetch()
                yield
            if node.op == "call_module":
                layer = layer_inside(model.layers[_layer_number(node)])
                if layer is not None:
                    layer._weights.prefetch(layer.guests_of_pass())
                yield


def _layer_number(node: fx.Node) -> int:
    return int(str(node.target).rpartition(".")[2])


def _value(arg: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(arg, list | tuple):
        return [_value(item, values) for item in arg]
    return values[arg] if isinstance(arg, fx.Node) else arg


def _role(node: fx.Node) -> Role | None:
    """The role of an input; None for other nodes."""
    value = info_of(node).value
    return value.role if node.op == "placeholder" and value is not None else None


def _setting(node: fx.Node) -> str | None:
    """The name of a setting; None for other nodes."""
    value = info_of(node).value
    return value.name if node.op == "placeholder" and isinstance(value, Setting) else None


def _parameter(node: fx.Node) -> str:
    name = info_of(node).parameter
    assert name is not None
    return name


def _segments(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The parameters first used between two calls of layers, each tuple with the first node that uses one of them."""
    segments: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
    first_use, segment, in_segments = None, list[fx.Node](), set[fx.Node]()
    for node in nodes:
        unassigned = [used for used in node.all_input_nodes if used.op == "placeholder" and info_of(used).parameter]
        unassigned = [used for used in unassigned if used not in in_segments]
        if unassigned and not segment:
            first_use = node
        segment += unassigned
        in_segments.update(unassigned)
        if node.op in ("call_module", "output") and first_use is not None:
            segments.append((first_use, tuple(segment)))
            first_use, segment = None, []
    return segments
