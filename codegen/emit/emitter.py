"""Builds the torch.fx graph of one block, node by node.

torch.fx prints a graph as Python and runs that text. No text of a plan enters it: fx names nodes, inputs are numbered,
and targets are the operator objects that an op's emission function names. Attributes reach a node as the numbers,
words and lists that the op's class declares.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.codegen.emit.dtypes import DTYPES
from moec.passes.ir import Block, Dim, Op, Program, Value, local_shape
from moec.passes.ir.mesh import group_name

INFO = "moec"

WaysOf = Callable[[Block, Op], str | None]
"""Maps an op of experts to the kernels of its products: the text of a `Ways`, or None to choose them at each call."""

LAYER = "layer"
"""The input of a layer's graph that is the layer's number."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The op, the value or the parameter (`attention.q.weight`) that a node stands for.

    `key` names the node in its block: a value by its name, a parameter with `@` before it, an intermediate node by its
    op's first result and a number. An op that is in two Programs has the same keys in both.
    """

    key: str
    op: Op | None = None
    value: Value | None = None
    parameter: str | None = None


def info_of(node: fx.Node) -> NodeInfo:
    """The `NodeInfo` of a node of an emitted graph."""
    info: NodeInfo = node.meta[INFO]
    return info


def target_name(node: fx.Node) -> str:
    """`moec.all_to_all.default`, `getitem`, or the path of a layer that is called."""
    return node.target.__name__ if node.target is operator.getitem else str(node.target)


def site_of(op: Op, layer: int | str | None) -> str:
    """The part of the model that an op belongs to, for the end of a message: "layer 3 (mixtral.moe:14)".

    `layer` may be "{layer}", which the runtime replaces by a layer's number.
    """
    part = f"layer {layer}" if layer is not None else f"the model's {op.results[0].name}"
    return f"{part} ({op.span})" if op.span else part


class Emitter:
    """The graph of one block: inputs, a layer's number, settings, states, tables and parameters, as it declares them.

    The number is a 0-d int64 tensor and an input, because identical layers share one graph.
    """

    def __init__(self, program: Program, block: Block, groups: str, float64: bool, ways: WaysOf | None = None) -> None:
        self.program, self.block = program, block
        self.meshes = program.meshes_of(block) if program.meshes else None
        self.graph = fx.Graph()
        self._groups, self._float64, self._ways = groups, float64, ways
        self._nodes: dict[str, fx.Node] = {}
        self._steps: dict[str, int] = {}
        for index, value in enumerate(block.inputs):
            self._nodes[value.name] = self._placeholder(f"input_{index}", NodeInfo(value.name, value=value))
        self._layer = self._placeholder(LAYER, NodeInfo(LAYER)) if block.name in program.layer_blocks else None
        for setting in block.settings:
            key = f"${setting.name}"
            self._nodes[key] = self._placeholder(f"setting_{setting.name}", NodeInfo(key, value=setting))
        for index, state in enumerate(block.states):
            key = f"^{state.name}"
            self._nodes[key] = self._placeholder(f"state_{index}", NodeInfo(key, value=state))
        for index, table in enumerate(block.tables):
            self._nodes[table.name] = self._placeholder(f"table_{index}", NodeInfo(table.name, value=table))
        for index, parameter in enumerate(block.parameters):
            key = f"@{parameter.name}"
            info = NodeInfo(key, value=parameter, parameter=parameter.name)
            self._nodes[key] = self._placeholder(f"weight_{index}", info)

    def _placeholder(self, name: str, info: NodeInfo) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta[INFO] = info
        return node

    def finish(self) -> fx.Graph:
        """Adds the output, one value bare or several as a tuple, and returns the graph."""
        results = tuple(self._nodes[output.name] for output in self.block.outputs)
        output = self.graph.output(results[0] if len(results) == 1 else results)
        output.meta[INFO] = NodeInfo("output")
        return self.graph

    def refs(self, op: Op) -> list[fx.Node]:
        """The nodes of an op's operands."""
        return [self._nodes[name] for name in op.operands]

    def ref(self, operand: str) -> fx.Node:
        """The node of one operand."""
        return self._nodes[operand]

    def value(self, operand: str) -> Value:
        """The Program's value that an operand names."""
        return self.block.scope[operand]

    def shape(self, operand: str) -> tuple[Dim, ...]:
        """An operand's shape on one rank."""
        value = self.block.scope[operand]
        if self.meshes is None or value.layout is None:
            return value.shape
        return local_shape(value.shape, value.layout, self.meshes)

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype of this name; in a float64 graph, float64 for every floating dtype."""
        dtype = DTYPES[name]
        return torch.float64 if self._float64 and dtype.is_floating_point else dtype

    def group(self, axis: str) -> str:
        """The name of the process groups along `axis`, prefixed with the job's."""
        return self._groups + group_name(axis, self.block.experts)

    def site(self, op: Op) -> dict[str, Any]:
        """The arguments of a conversion, for its messages, that name the part of the model to which the op belongs."""
        if self._layer is None:
            return {"site": site_of(op, None)}
        return {"site": site_of(op, "{layer}"), "layer": self._layer}

    def ways(self, op: Op) -> str | None:
        """The kernels of an op of experts (`WaysOf`); None in a float64 graph, which is for proofs."""
        return self._ways(self.block, op) if self._ways is not None and not self._float64 else None

    def layer_number(self) -> fx.Node:
        """The input that is the layer's number."""
        assert self._layer is not None, self.block.name
        return self._layer

    def call(self, op: Op, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An intermediate node of an op."""
        return self._note(self.graph.call_function(target, args, kwargs), op)

    def note_scores(self, op: Op, logits: fx.Node) -> fx.Node:
        """Router logits [B, S, n] for an op without `moec::route`; notes tokens without scores, as `route` does."""
        return self.call(op, torch.ops.moec.note_scores.default, logits)

    def trace(self, op: Op, function: Callable[..., Any], *operands: fx.Node) -> fx.Node:
        """The last node of `function`, which calls operators on tensors and reads no values of them."""
        tracer, last = fx.proxy.GraphAppendingTracer(self.graph), next(reversed(self.graph.nodes))
        result: fx.Node = function(*(fx.Proxy(node, tracer) for node in operands)).node
        node = last.next
        while node.op != "root":
            self._note(node, op)
            node = node.next
        return result

    def result(self, op: Op, target: Any, *args: Any, **kwargs: Any) -> None:
        """The node that gives an op's one result."""
        (value,) = op.results
        self._give(self.call(op, target, *args, **kwargs), op, value)

    def results(self, op: Op, target: Any, *args: Any, **kwargs: Any) -> None:
        """The nodes that give an op's several results."""
        self._give_each(self.call(op, target, *args, **kwargs), op)

    def set_results(self, op: Op, *nodes: fx.Node) -> None:
        """Makes existing nodes an op's several results."""
        for node, value in zip(nodes, op.results, strict=True):
            self._give(node, op, value)

    def item(self, op: Op, node: fx.Node, index: int) -> fx.Node:
        """One of a node's several tensors, as an intermediate node of an op."""
        return self.call(op, operator.getitem, node, index)

    def unpack_first(self, op: Op, node: fx.Node) -> None:
        """Makes the first of a node's several tensors an op's one result."""
        self._give(self.item(op, node, 0), op, op.results[0])

    def set_first_result(self, op: Op, node: fx.Node) -> None:
        """Makes an existing node an op's first result."""
        self._give(node, op, op.results[0])

    def call_layer(self, op: Op, layer: int, num_results: int) -> None:
        """The node that runs a layer, and its results; a layer with one result gives it bare."""
        node = self._note(
            self.graph.create_node("call_module", self.program.layers[layer].path, tuple(self.refs(op))), op
        )
        if num_results == 1:
            self._give(node, op, op.results[0])
        else:
            self._give_each(node, op)

    def _note(self, node: fx.Node, op: Op) -> fx.Node:
        name = op.results[0].name
        self._steps[name] = number = self._steps.get(name, 0) + 1
        node.meta[INFO] = NodeInfo(f"{name}#{number}", op)
        return node

    def _give(self, node: fx.Node, op: Op, value: Value) -> None:
        node.meta[INFO] = NodeInfo(value.name, op, value)
        self._nodes[value.name] = node

    def _give_each(self, node: fx.Node, op: Op) -> None:
        for index, value in enumerate(op.results):
            self._give(self.item(op, node, index), op, value)


Emissions = dict[type[Op], Callable[[Emitter, Op], None]]
"""The functions that emit ops, by the ops' classes."""
