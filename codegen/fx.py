"""Graph data → `torch.fx.GraphModule`, node by node, with every operator, name and argument checked.

torch.fx turns a graph into Python source and runs it, so a name or literal that slipped through unchecked would be
code. What reaches it here: names of one pattern, operators of the allow-list resolved one by one, and literals that
fit the operator's signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Function:
    """A graph as a pure function: `module(*inputs, *weights)`, in the order in which `weights` names them.

    `weights` are paths relative to the module that owns the parameters; `sites` says which part of the model uses each.
    """

    module: fx.GraphModule
    weights: tuple[str, ...]
    sites: Mapping[str, str]

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        return self  # a function has no state


def build_function(
    stage: StageGraphs, graph: str, *, prefix: str = "", groups: str = "", float64: bool = False
) -> Function:
    """The graph called `graph` as a function of its inputs and its weights.

    `prefix` is the path of the module that it serves (`layers.3.`), `groups` what the names of its groups begin with.
    Raises `GraphError`.
    """
    graphs = stage.by_name()
    return _Lifter(graphs, groups, float64).lift(graphs[graph], prefix)


@dataclass(frozen=True, slots=True)
class _Lifter:
    """Makes functions of graphs: parameters, which graphs fetch by name, become arguments."""

    graphs: Mapping[str, Graph]
    groups: str
    float64: bool

    def lift(self, data: Graph, prefix: str) -> Function:
        root, graph = nn.Module(), fx.Graph()
        nodes: dict[str, fx.Node] = {}
        nested: dict[str, Function] = {}
        for node in data.nodes:
            if node.op == "placeholder":
                nodes[node.name] = self._add(graph, node, nodes, prefix)
            elif node.op == "call_module":
                assert node.graph is not None
                nested[node.name] = self.lift(self.graphs[node.graph], f"{prefix}{node.target}.")
                attach(root, node.target, nested[node.name].module)
        weights, sites = self._take_weights(graph, data, nested, nodes), dict[str, str]()
        for node in data.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            nodes[node.name] = self._add(graph, node, nodes, prefix)
            for used in node.refs():
                if used in weights:
                    sites.setdefault(weights[used], _site(node, prefix))
            if node.name in nested:
                function = nested[node.name]
                sites.update({f"{node.target}.{path}": function.sites[path] for path in function.weights})
                named = {path: name for name, path in weights.items()}
                nodes[node.name].args += tuple(nodes[named[f"{node.target}.{path}"]] for path in function.weights)
        return Function(_graph_module(root, graph, data.name), tuple(weights.values()), sites)

    def _take_weights(
        self, graph: fx.Graph, data: Graph, nested: Mapping[str, Function], nodes: dict[str, fx.Node]
    ) -> dict[str, str]:
        """Adds an argument for each parameter, nested graphs' included; gives the paths by the names of their nodes."""
        weights: dict[str, str] = {}
        for node in data.nodes:
            if node.op == "get_attr":
                weights[node.name] = node.target
            for path in nested[node.name].weights if node.name in nested else ():
                weights[f"{node.name}_{path.replace('.', '_')}"] = f"{node.target}.{path}"
        for name in weights:
            nodes[name] = graph.placeholder(name)
        return weights

    def _add(self, graph: fx.Graph, node: Node, nodes: Mapping[str, fx.Node], prefix: str) -> fx.Node:
        return _add_node(graph, node, nodes, prefix, self.float64, self.groups)


@dataclass(frozen=True, slots=True)
class TopGraph:
    """A graph for a caller that runs it node by node and owns its modules and parameters; `sites` as in `Function`."""

    graph: fx.Graph
    sites: Mapping[str, str]


def build_graph(stage: StageGraphs, name: str, *, groups: str = "", float64: bool = False) -> TopGraph:
    """The graph called `name` as torch.fx has it, with parameters fetched and modules called by their paths."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    sites: dict[str, str] = {}
    data = stage.graph(name)
    fetched = {node.name: node.target for node in data.nodes if node.op == "get_attr"}
    for node in data.nodes:
        nodes[node.name] = _add_node(graph, node, nodes, "", float64, groups)
        for used in node.refs():
            if used in fetched:
                sites.setdefault(fetched[used], _site(node, ""))
    return TopGraph(graph, sites)


def parameter_sites(module: fx.GraphModule, prefix: str = "") -> dict[str, str]:
    """The first use of each parameter of a module that `build_module` built, by the parameter's full name."""
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
    """Which part of the model each node of the operator `target` serves, in the order in which they run."""
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
                attach(root, node.target, make(prefix + node.target))
            case "call_module":
                assert node.graph is not None
                body = _build(graphs, graphs[node.graph], f"{prefix}{node.target}.", make, float64)
                attach(root, node.target, body)
        nodes[node.name] = _add_node(graph, node, nodes, prefix, float64)
    return _graph_module(root, graph, data.name)


def _graph_module(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    return fx.GraphModule(root, graph, class_name="".join(c for c in name.title() if c.isalnum()))


def _add_node(
    graph: fx.Graph, node: Node, nodes: Mapping[str, fx.Node], prefix: str, float64: bool, groups_prefix: str = ""
) -> fx.Node:
    args = tuple(_argument(arg, nodes, float64) for arg in node.args)
    kwargs = {name: _argument(arg, nodes, float64) for name, arg in node.kwargs.items()}
    target: Any = node.target
    if node.op == "call_function":
        # Only the plan knows its groups (`checks.py` compares): any name is accepted here.
        groups = [arg for arg in node.args if isinstance(arg, str)]
        complaint = argument_complaint(node.target, node.args, node.kwargs, groups)
        if complaint:
            raise GraphError(f"{node.name} {complaint}")
        target = resolve(node.target)
        kinds = SIGNATURES[node.target].positional
        args = tuple(groups_prefix + arg if kind == "group" else arg for kind, arg in zip(kinds, args, strict=True))
        if node.target in CONVERSIONS:
            kwargs["site"] = _site(node, prefix)
    elif node.op == "output":
        # One result is given bare.
        args = args if len(args) == 1 else (args,)
    made = graph.create_node(node.op, target, args, kwargs, name=node.name)
    made.meta["moec"] = node
    return made


def _site(node: Node, prefix: str) -> str:
    """Which part of the model a node serves, for the end of a message: "layer 3 (mixtral.moe:14:5)"."""
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


def attach(root: nn.Module, path: str, child: nn.Parameter | nn.Module) -> None:
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
