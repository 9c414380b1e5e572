"""Graph data → `torch.fx.GraphModule`, node by node, with every operator, name and argument checked.

torch.fx turns a graph into Python source and runs it, so a name or literal that slipped through unchecked would be
code. What reaches it here: names of one pattern, operators of the allow-list resolved one by one, and literals that
fit the operator's signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from moec.codegen.graph import Arg, DTypeLiteral, Graph, Node, Ref, StageGraphs
from moec.codegen.operators import CONVERSIONS, GETITEM, SIGNATURES, argument_complaint
from moec.codegen.python import TORCH_DTYPES
from moec.grammar.diagnostics import InternalError

MakeParameter = Callable[[str], nn.Parameter]
"""Gives the parameter of a full name, such as `layers.3.attention.q.weight`."""

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_DTYPES.items()}


class GraphError(InternalError):
    """A graph that names an operator it may not, or arguments that do not fit it."""


def build_module(
    stage: StageGraphs, graph: str, make_parameter: MakeParameter, *, float64: bool = False
) -> fx.GraphModule:
    """The graph called `graph` as a module, its submodules and parameters in place.

    `float64` reads every floating dtype literal as float64 (`moec verify`). Raises `GraphError`.
    """
    graphs = stage.by_name()
    return _build(graphs, graphs[graph], "", make_parameter, float64)


def parameter_sites(module: fx.GraphModule, prefix: str = "") -> dict[str, str]:
    """What first uses each parameter of a module that `build_module` built, by the parameter's full name."""
    sites: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.users:
            user: Node = next(iter(node.users)).meta["moec"]
            sites.setdefault(prefix + node.target, _site(user, prefix))
        elif node.op == "call_module":
            body = module.get_submodule(node.target)
            assert isinstance(body, fx.GraphModule)
            sites |= parameter_sites(body, f"{prefix}{node.target}.")
    return sites


def operator_sites(module: fx.GraphModule, target: str, prefix: str = "") -> list[str]:
    """What of the model each node of the operator `target` serves, in the order in which they run."""
    sites: list[str] = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.meta["moec"].target == target:
            sites.append(_site(node.meta["moec"], prefix))
        elif node.op == "call_module":
            body = module.get_submodule(node.target)
            assert isinstance(body, fx.GraphModule)
            sites += operator_sites(body, target, f"{prefix}{node.target}.")
    return sites


def _build(graphs: Mapping[str, Graph], data: Graph, prefix: str, make: MakeParameter, float64: bool) -> fx.GraphModule:
    root = nn.Module()
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in data.nodes:
        match node.op:
            case "get_attr":
                _attach(root, node.target, make(prefix + node.target))
            case "call_module":
                assert node.graph is not None
                body = _build(graphs, graphs[node.graph], f"{prefix}{node.target}.", make, float64)
                _attach(root, node.target, body)
        nodes[node.name] = _add_node(graph, node, nodes, prefix, float64)
    return fx.GraphModule(root, graph, class_name="".join(c for c in data.name.title() if c.isalnum()))


def _add_node(graph: fx.Graph, node: Node, nodes: Mapping[str, fx.Node], prefix: str, float64: bool) -> fx.Node:
    args = tuple(_argument(arg, nodes, float64) for arg in node.args)
    kwargs = {name: _argument(arg, nodes, float64) for name, arg in node.kwargs.items()}
    target: Any = node.target
    if node.op == "call_function":
        # Which groups there are, the plan knows (`checks.py`).
        groups = [arg for arg in node.args if isinstance(arg, str)]
        complaint = argument_complaint(node.target, node.args, node.kwargs, groups)
        if complaint:
            raise GraphError(f"{node.name} {complaint}")
        target = resolve(node.target)
        if node.target in CONVERSIONS:
            kwargs["site"] = _site(node, prefix)
    elif node.op == "output":
        # One result is given bare.
        args = args if len(args) == 1 else (args,)
    made = graph.create_node(node.op, target, args, kwargs, name=node.name)
    made.meta["moec"] = node
    return made


def _site(node: Node, prefix: str) -> str:
    """What of the model a node serves, in words that a message can end with: "layer 3 (mixtral.moe:14:5)"."""
    layer = prefix.split(".")[1] if prefix.startswith("layers.") else None
    what = f"layer {layer}" if layer else f"the model's {node.value or node.name}"
    return f"{what} ({node.span})" if node.span else what


def _argument(arg: Arg, nodes: Mapping[str, fx.Node], float64: bool) -> Any:
    match arg:
        case Ref():
            return nodes[arg.node]
        case DTypeLiteral():
            dtype = DTYPES[arg.dtype]
            return torch.float64 if float64 and dtype.is_floating_point else dtype
        case tuple():
            return list(arg)
    return arg


@cache
def resolve(target: str) -> Any:
    """The operator overload that `target` names. Raises `GraphError` unless the allow-list has it."""
    if target not in SIGNATURES:
        raise GraphError(f"{target!r} is not an operator that plans may name")
    if target == GETITEM:
        return operator.getitem
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _attach(root: nn.Module, path: str, child: nn.Parameter | nn.Module) -> None:
    """Sets `child` at a dotted path under `root`, with plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if isinstance(child, nn.Parameter):
        if name not in root._parameters:
            root.register_parameter(name, child)
    else:
        root.add_module(name, child)
