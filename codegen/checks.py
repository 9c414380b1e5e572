"""What a plan's types cannot say of it, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moec.codegen.folder import MANIFEST, PlanError
from moec.codegen.graph import Node, StageGraphs
from moec.codegen.operators import ALLOWED, COLLECTIVES, GETITEM
from moec.codegen.plan import Plan, groups_of
from moec.passes.ir import Layout

MAX_EXPANDED_NODES = 1_000_000
"""Nodes that a graph may run, called graphs counted as often as they are called."""


def refuse(path: Path, message: str) -> PlanError:
    """The error for a file that moec did not write like this."""
    return PlanError("MOE0601", "this plan cannot be trusted", path, message, "compile the .moe file again")


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
    axes = {axis for mesh in plan.meshes.values() for axis in mesh.wide_axes()}
    for name, parameter in plan.parameters.items():
        if parameter.mesh not in plan.meshes:
            raise refuse(path, f"{name} lies on a mesh that does not exist")
        if not {*parameter.sum_over} <= {*manifest.groups}:
            raise refuse(path, f"{name} sums its gradient over a group that does not exist")
        _layout(path, parameter.layout, axes)
    for stage in plan.stages:
        _check_stage(root / "stages" / f"{stage.index}.json", stage, plan, axes)


def _layout(path: Path, text: str, axes: set[str]) -> Layout:
    try:
        layout = Layout.parse(text)
    except ValueError as error:
        raise refuse(path, str(error)) from error
    if not axes.issuperset(layout.axes):
        raise refuse(path, f"the layout {text!r} names an axis that no mesh has")
    return layout


def _check_stage(path: Path, stage: StageGraphs, plan: Plan, axes: set[str]) -> None:
    names = [graph.name for graph in stage.graphs]
    if len(set(names)) != len(names) or not {"forward", "loss"} <= set(names):
        raise refuse(path, "its graphs are not named once each, with forward and loss among them")
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
        if [node.op for node in graph.nodes].index("output") != len(graph.nodes) - 1:
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
    if node.op == "call_function" and node.target not in ALLOWED:
        return f"names the operator {node.target!r}, which plans may not"
    if node.op == "call_module" and node.graph not in callable_graphs:
        return f"calls {node.graph!r}, which is no graph before it"
    if node.op != "call_module" and node.graph is not None:
        return "names a graph, but calls none"
    if node.op in ("placeholder", "output") and node.target != node.name:
        return f"has the target {node.target!r}"
    if node.target == GETITEM and not (len(node.args) == 2 and type(node.args[1]) is int and not node.kwargs):
        return "takes something other than one result"
    if node.target in COLLECTIVES:
        named = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)]
        if len(named) != 1 or named[0] not in groups:
            return f"names the group {named!r}, which does not exist"
    return None
