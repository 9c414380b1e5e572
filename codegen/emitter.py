"""Writes the graph of one block, node by node."""

from __future__ import annotations

from typing import TypedDict

from moec.codegen.graph import Arg, Graph, Node, Ref
from moec.codegen.operators import GETITEM, SIGNATURES
from moec.passes.ir import Block, Dim, Op, Program, Shard, Value
from moec.passes.ir.mesh import group_name


class BlockEmitter:
    """Writes one block's graph; an op's results keep the Program's names, `.` as `_`."""

    def __init__(self, program: Program, block: Block) -> None:
        self.block = block
        self.meshes = program.meshes_of(block) if program.meshes else None
        self.outputs_of = {b.name: len(b.outputs) for b in program.blocks}
        self.nodes: list[Node] = []
        self.nested: list[Graph] = []
        self.names: dict[str, str] = {}

        for value in block.inputs:
            self._placeholder(value)

    def graphs(self) -> list[Graph]:
        """The block's graph, after those of its nested modules."""
        results = tuple(self.ref(name) for name in self.block.outputs)
        self.nodes.append(Node(name="output", op="output", target="output", args=results))
        return [*self.nested, Graph(name=self.block.name, nodes=tuple(self.nodes))]

    def _placeholder(self, value: Value) -> None:
        name = self._name(value)
        self.nodes.append(Node(name=name, op="placeholder", target=name, **facts(value)))

    def _name(self, value: Value) -> str:
        name = value.name.replace(".", "_")
        self.names[value.name] = name
        return name

    def ref(self, operand: str) -> Ref:
        """An operand as an argument; a parameter is fetched where it is first used."""
        if operand not in self.names:
            assert operand.startswith("@"), operand
            path = operand[1:]
            name = path.replace(".", "_")
            self.nodes.append(Node(name=name, op="get_attr", target=path))
            self.names[operand] = name
        return Ref(node=self.names[operand])

    def refs(self, op: Op) -> list[Ref]:
        """An op's operands as arguments."""
        return [self.ref(name) for name in op.operands]

    def shape(self, operand: str) -> tuple[Dim, ...]:
        """An operand's shape on one rank."""
        value = self.block.scope[operand]
        if self.meshes is None or value.layout is None:
            return value.shape
        shape = list(value.shape)
        for axis, placement in value.layout.placements:
            if isinstance(placement, Shard):
                size = shape[placement.dim]
                if isinstance(size, int):
                    shape[placement.dim] = size // self.meshes.size(axis)
        return tuple(shape)

    def group(self, axis: str) -> str:
        """What the plan calls the communicators along `axis`."""
        return group_name(axis, self.block.experts)

    def step(self, op: Op, suffix: str, target: str, *args: Arg, **kwargs: Arg) -> Ref:
        """A node on the way to an op's result."""
        name = f"{op.results[0].name.replace('.', '_')}_{suffix}"
        self._append(op, name, target, args, kwargs, None)
        return Ref(node=name)

    def result(self, op: Op, target: str, *args: Arg, evaluation: tuple[Arg, ...] | None = None, **kwargs: Arg) -> None:
        """The node that gives an op's one result; `evaluation`: its arguments in evaluation, if others."""
        (value,) = op.results
        self._append(op, self._name(value), target, args, kwargs, value, evaluation)

    def results(
        self, op: Op, target: str, *args: Arg, evaluation: tuple[Arg, ...] | None = None, **kwargs: Arg
    ) -> None:
        """The nodes that give an op's several results; `evaluation`: its arguments in evaluation, if others."""
        name = f"{op.results[0].name.replace('.', '_')}_all"
        self._append(op, name, target, args, kwargs, None, evaluation)
        whole = Ref(node=name)
        for index, value in enumerate(op.results):
            self._append(op, self._name(value), GETITEM, (whole, index), {}, value)

    def call(self, op: Op, target: str, graph: str, args: list[Ref], num_results: int) -> None:
        """The node that runs a submodule, and its results; a module with one result gives it bare."""
        span = str(op.span) if op.span else None
        if num_results == 1:
            value = op.results[0]
            name = self._name(value)
            node = Node(
                name=name, op="call_module", target=target, graph=graph, args=tuple(args), span=span, **facts(value)
            )
            self.nodes.append(node)
            return
        whole = f"{op.results[0].name.replace('.', '_')}_all"
        self.nodes.append(Node(name=whole, op="call_module", target=target, graph=graph, args=tuple(args), span=span))
        for index, value in enumerate(op.results):
            self._append(op, self._name(value), GETITEM, (Ref(node=whole), index), {}, value)

    def _append(
        self,
        op: Op,
        name: str,
        target: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        value: Value | None,
        evaluation: tuple[Arg, ...] | None = None,
    ) -> None:
        assert target in SIGNATURES, target
        span = str(op.span) if op.span else None
        node = Node(name=name, op="call_function", target=target, args=args, kwargs=kwargs, span=span)
        if evaluation is not None and evaluation != args:
            node = node.model_copy(update={"evaluation": evaluation})
        if value is not None:
            node = node.model_copy(update=dict(facts(value)))
        self.nodes.append(node)


class Facts(TypedDict):
    """What a node says of the Program's value that it gives."""

    value: str
    layout: str | None
    ragged: str | None


def facts(value: Value) -> Facts:
    """What a node says of the Program's value that it gives."""
    layout = None if value.layout is None else str(value.layout)
    return {"value": value.name, "layout": layout, "ragged": value.ragged}
