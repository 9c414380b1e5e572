"""Ways to make a right plan wrong, one node or one group at a time."""

from __future__ import annotations

from collections.abc import Callable

from moec.codegen.graph import DTypeLiteral, Graph, Node, Ref
from moec.codegen.plan import Plan


def change_graph(plan: Plan, name: str, change: Callable[[list[Node]], list[Node]]) -> Plan:
    stage = plan.stages[0]
    graphs = tuple(
        Graph(name=g.name, nodes=tuple(change(list(g.nodes)))) if g.name == name else g for g in stage.graphs
    )
    return Plan(plan.manifest, (stage.model_copy(update={"graphs": graphs}),))


def change_node(plan: Plan, graph: str, name: str, **update: object) -> Plan:
    def change(nodes: list[Node]) -> list[Node]:
        assert any(node.name == name for node in nodes)
        return [node.model_copy(update=update) if node.name == name else node for node in nodes]

    return change_graph(plan, graph, change)


def bypass(plan: Plan, graph: str, name: str) -> Plan:
    """Takes a node out and gives its consumers its first operand."""

    def change(nodes: list[Node]) -> list[Node]:
        source = next(node for node in nodes if node.name == name).refs()[0]
        swapped = [
            node.model_copy(update={"args": tuple(Ref(node=source) if a == Ref(node=name) else a for a in node.args)})
            for node in nodes
        ]
        return [node for node in swapped if node.name != name]

    return change_graph(plan, graph, change)


def change_sums(plan: Plan, suffix: str, sum_over: tuple[str, ...]) -> Plan:
    bodies = tuple(
        body.model_copy(
            update={
                "parameters": tuple(
                    p.model_copy(update={"sum_over": sum_over}) if p.name.endswith(suffix) else p
                    for p in body.parameters
                )
            }
        )
        for body in plan.manifest.bodies
    )
    return Plan(plan.manifest.model_copy(update={"bodies": bodies}), plan.stages)


def swap_groups(plan: Plan, layers: str = "[1..2]") -> Plan:
    groups = dict(plan.manifest.groups)
    ep, edp = "ep" + layers, "edp" + layers
    groups[ep], groups[edp] = groups[edp], groups[ep]
    return Plan(plan.manifest.model_copy(update={"groups": groups}), plan.stages)


def insert_after(plan: Plan, graph: str, name: str, target: str, *arguments: object) -> Plan:
    """Puts a node between `name` and its consumers: `target` of it and of `arguments`."""

    def change(nodes: list[Node]) -> list[Node]:
        added: list[Node] = []
        for node in nodes:
            args = tuple(Ref(node="planted") if a == Ref(node=name) else a for a in node.args)
            added.append(node.model_copy(update={"args": args}))
            if node.name == name:
                planted = Node(name="planted", op="call_function", target=target, args=(Ref(node=name), *arguments))
                added.append(planted.model_copy(update={"span": node.span}))
        return added

    return change_graph(plan, graph, change)


def change_groups(plan: Plan, name: str, ranks: tuple[tuple[int, ...], ...]) -> Plan:
    """A group that is another list of ranks."""
    groups = {**plan.manifest.groups, name: ranks}
    return Plan(plan.manifest.model_copy(update={"groups": groups}), plan.stages)


def to(name: str, source: str, dtype: str) -> Node:
    """A node that gives `source` in another dtype."""
    args = (Ref(node=source), DTypeLiteral.model_validate({"dtype": dtype}))
    return Node(name=name, op="call_function", target="aten.to.dtype", args=args)


def rounded_to_bf16(plan: Plan, graph: str, name: str) -> Plan:
    """Every consumer of a value gets it rounded to bf16, and in fp32 again."""

    def change(nodes: list[Node]) -> list[Node]:
        changed: list[Node] = []
        for node in nodes:
            args = tuple(Ref(node="planted") if arg == Ref(node=name) else arg for arg in node.args)
            changed.append(node.model_copy(update={"args": args}))
            if node.name == name:
                changed += [to("planted_narrow", name, "bf16"), to("planted", "planted_narrow", "fp32")]
        return changed

    return change_graph(plan, graph, change)
