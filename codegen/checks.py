"""What a plan's types cannot say of it, checked before anything is built from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from moec.codegen.folder import MANIFEST, PlanError
from moec.codegen.graph import LAYER_RESULT, MODEL_RESULT, Arg, Node, Ref, StageGraphs
from moec.codegen.operators import argument_complaint
from moec.codegen.plan import Body, ParameterData, Plan, groups_of
from moec.codegen.plan_kernels import products_of
from moec.codegen.stored_tiles import FILE as TILES
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.ir import Layout, Shard
from moec.passes.ir.mesh import group_name

MAX_ELEMENTS = 1 << 60
"""Elements of one parameter."""

MAX_EXPANDED_NODES = 1_000_000
"""Nodes that a graph may run, called graphs counted as often as they are called."""

LOSS_GRAPHS = ("valid_labels", "loss")
BALANCE_GRAPHS = ("num_tokens", "aux_loss")
"""Stand beside `forward`: of a model, and where it gives balance terms. Each gives one scalar."""

RESULTS = re.compile(r"balance|counts_[0-9]{1,6}")
"""What the forward graph gives beside it."""


def first_result(stage: StageGraphs) -> str:
    """What the forward graph gives first, or nothing."""
    return (stage.graph("forward").nodes[-1].refs() or [""])[0]


def scalar_graphs(stage: StageGraphs) -> tuple[str, ...]:
    """The graphs beside `forward` that turn its results into scalars. A layer has no loss."""
    loss = LOSS_GRAPHS if first_result(stage) == MODEL_RESULT else ()
    return loss + BALANCE_GRAPHS if "balance" in stage.graph("forward").nodes[-1].refs() else loss


def refuse(path: Path, message: str) -> PlanError:
    """The error for a file that moec did not write like this."""
    return PlanError("MOE0601", path, message, "compile the .moe file again")


def require_consistent(root: Path, plan: Plan) -> None:
    """Names resolve, graphs are in order, groups are those of the meshes. Raises `PlanError`."""
    path = root / MANIFEST
    manifest = plan.manifest
    if "dense" not in plan.meshes or len({mesh.ranks for mesh in plan.meshes.values()}) != 1:
        raise refuse(path, "its meshes do not factor the same ranks")
    if manifest.groups != groups_of(plan.meshes):
        raise refuse(path, "its groups are not those of its meshes")
    if len(plan.parameters) != sum(len(b.parameters) * max(1, len(b.layers)) for b in manifest.bodies):
        raise refuse(path, "a parameter stands in it twice")
    for body in manifest.bodies:
        if body.experts is not None and body.experts not in plan.meshes:
            raise refuse(path, f"{body.graph} lies on a mesh that does not exist")
        for parameter in body.parameters:
            _check_parameter(path, body, parameter, plan)
    axes = {axis for mesh in plan.meshes.values() for axis in mesh.wide_axes()}
    for stage in plan.stages:
        file = root / "stages" / f"{stage.index}.json"
        _check_stage(file, stage, plan, axes)
        _check_bodies(file, stage, plan)
    try:
        spec = plan.spec
    except DiagnosticError as error:
        raise refuse(path, f"the Spec inside it does not compile: {error}") from error
    if spec.subject.name != plan.name:
        raise refuse(path, "the Spec inside it is of another model")
    if first_result(plan.stages[0]) != (MODEL_RESULT if spec.has_model else LAYER_RESULT):
        raise refuse(path, "its forward graph does not give what the Spec inside it says")
    stored = plan.tiles.by_key() if plan.tiles is not None else {}
    foreign = sorted(map(str, stored.keys() - {product.key for product in products_of(plan)}))
    if foreign:
        raise refuse(root / TILES, f"it has tiles for {foreign[0]}, which the plan does not have")


def _check_parameter(path: Path, body: Body, parameter: ParameterData, plan: Plan) -> None:
    name = f"{parameter.name} of {body.graph}"
    if parameter.mesh not in ("dense", body.experts):
        raise refuse(path, f"{name} lies on a mesh that is not its body's")
    if not _groups_of(body, plan).issuperset(parameter.sum_over):
        raise refuse(path, f"{name} sums its gradient over a group that its body does not have")
    if math.prod(parameter.shape) > MAX_ELEMENTS:
        raise refuse(path, f"{name} has more than {MAX_ELEMENTS} elements")
    if not math.isfinite(parameter.std):
        raise refuse(path, f"{name} starts with a spread that is not finite")
    mesh = plan.meshes[parameter.mesh]
    for axis, placement in _layout(path, parameter.layout, set(mesh.wide_axes())).placements:
        size = mesh.size(axis)
        if not isinstance(placement, Shard) or placement.dim >= len(parameter.shape):
            raise refuse(path, f"{name} cannot lie on {parameter.layout}")
        if parameter.shape[placement.dim] % size:
            raise refuse(path, f"{name} does not divide over {axis}")


def _groups_of(body: Body, plan: Plan) -> set[str]:
    """The groups that a body's collectives may run over: those of the dense mesh and of its own experts'."""
    names = [name for name in ("dense", body.experts) if name is not None]
    return {
        group_name(axis, name if name != "dense" else None) for name in names for axis in plan.meshes[name].wide_axes()
    }


def _check_bodies(path: Path, stage: StageGraphs, plan: Plan) -> None:
    """Each body's parameters are those that its graph fetches, its groups its own, its layers those that call it."""
    fetched: dict[str, list[str]] = {}
    groups: dict[str, set[str]] = {}
    for graph in stage.graphs:
        names, over = fetched.setdefault(graph.name, []), groups.setdefault(graph.name, set())
        for node in graph.nodes:
            if node.op == "get_attr":
                names.append(node.target)
            elif node.op == "call_module" and graph.name != "forward":
                names += [f"{node.target}.{name}" for name in fetched[node.graph or ""]]
                over |= groups[node.graph or ""]
            over.update(arg for arg in node.args if isinstance(arg, str) and arg in plan.manifest.groups)
    calls = [(n.target, n.graph) for n in stage.graph("forward").nodes if n.op == "call_module"]
    named = [(f"layers.{number}", body.graph) for body in plan.manifest.bodies for number in body.layers]
    if len({target for target, _ in calls}) != len(calls) or sorted(calls) != sorted(named):
        raise refuse(path, "its forward graph does not call the layers that plan.json names, once each")
    for body in plan.manifest.bodies:
        if not _groups_of(body, plan).issuperset(groups.get(body.graph, ())):
            raise refuse(path, f"{body.graph} names a group of a mesh that it does not lie on")
        if sorted(fetched.get(body.graph, ())) != sorted(p.name for p in body.parameters):
            raise refuse(path, f"{body.graph} does not fetch the parameters that plan.json names, once each")


def _layout(path: Path, text: str, axes: set[str]) -> Layout:
    try:
        layout = Layout.parse(text)
    except ValueError as error:
        raise refuse(path, str(error)) from error
    if not axes.issuperset(layout.axes):
        raise refuse(path, f"the layout {text!r} names an axis that its mesh does not have")
    return layout


def _check_stage(path: Path, stage: StageGraphs, plan: Plan, axes: set[str]) -> None:
    names = [graph.name for graph in stage.graphs]
    if len(set(names)) != len(names) or "forward" not in names:
        raise refuse(path, "its graphs are not named once each, with forward among them")
    others = stage.graph("forward").nodes[-1].refs()[1:]
    if first_result(stage) not in (MODEL_RESULT, LAYER_RESULT) or not all(map(RESULTS.fullmatch, others)):
        raise refuse(path, "its forward graph does not give logits, or y, and balance and counts")
    scalars = scalar_graphs(stage)
    if missing := sorted(set(scalars) - set(names)):
        raise refuse(path, f"it has no graph called {missing[0]}")
    for name in scalars:
        if len(stage.graph(name).nodes[-1].refs()) != 1:
            raise refuse(path, f"its graph {name} does not give one scalar")
    sizes: dict[str, int] = {}
    for graph in stage.graphs:
        seen: set[str] = set()
        size = 0
        for node in graph.nodes:
            complaint = _complaint(node, seen, sizes, set(plan.manifest.groups))
            if complaint:
                raise refuse(path, f"{graph.name}: {node.name} {complaint}")
            if node.layout is not None:
                _layout(path, node.layout, axes)
            seen.add(node.name)
            size += 1 + sizes.get(node.graph or "", 0)
        if [index for index, node in enumerate(graph.nodes) if node.op == "output"] != [len(graph.nodes) - 1]:
            raise refuse(path, f"{graph.name} does not end in its output")
        if size > MAX_EXPANDED_NODES:
            raise refuse(path, f"{graph.name} runs more than {MAX_EXPANDED_NODES} nodes")
        sizes[graph.name] = size


def _complaint(node: Node, seen: set[str], callable_graphs: Mapping[str, int], groups: set[str]) -> str | None:
    """What is wrong with a node where it stands, or None."""
    if node.name in seen:
        return "is defined twice"
    if not seen.issuperset(node.refs()):
        return "uses a node before it is defined"
    if node.evaluation is not None and (node.op != "call_function" or _refs(node.evaluation) != _refs(node.args)):
        return "has other operands in evaluation"
    if node.op == "call_function":
        in_evaluation = (node.evaluation,) if node.evaluation is not None else ()
        complaints = (
            argument_complaint(node.target, args, node.kwargs, groups) for args in (node.args, *in_evaluation)
        )
        return next(filter(None, complaints), None)
    if node.op == "call_module" and node.graph not in callable_graphs:
        return f"calls {node.graph!r}, which is no graph before it"
    if node.op != "call_module" and node.graph is not None:
        return "names a graph, but calls none"
    if node.op in ("placeholder", "output") and node.target != node.name:
        return f"has the target {node.target!r}"
    if node.kwargs or not all(isinstance(arg, Ref) for arg in node.args):
        return "is given something other than results of nodes"
    if node.op in ("placeholder", "get_attr") and node.args:
        return "is given arguments, and takes none"
    return None


def _refs(args: tuple[Arg, ...]) -> list[tuple[int, Arg]]:
    return [(place, arg) for place, arg in enumerate(args) if isinstance(arg, Ref | str)]
