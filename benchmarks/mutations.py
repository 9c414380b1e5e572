"""Wrong plans by the thousand: one random change to one node or one parameter of a right plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from moec.codegen.graph import Arg, Graph, Node, Ref
from moec.codegen.operators import CONVERSIONS, GETITEM
from moec.codegen.plan import Plan

Change = tuple[str, Plan]
"""What was changed, in words, and the plan that came of it."""


def mutate(plan: Plan, draw: random.Random) -> Change:
    """A plan with one random change that its types and the loader's rules would let through."""
    while True:
        kind = draw.choice(KINDS)
        change = kind(plan, draw)
        if change is not None and change[1] != plan:
            return change


NEUTRAL = ("aten.clamp_min.default",)
"""What changes no number where there is a label: a count of labels is at least 1."""


def _in_graph(plan: Plan, graph: Graph, nodes: Sequence[Node]) -> Plan:
    stage = plan.stages[0]
    changed = Graph(name=graph.name, nodes=tuple(nodes))
    graphs = tuple(changed if g.name == graph.name else g for g in stage.graphs)
    return Plan(plan.manifest, (stage.model_copy(update={"graphs": graphs}),))


def _pick(plan: Plan, draw: random.Random, fits: Callable[[Node], bool]) -> tuple[Graph, int] | None:
    places = [(g, i) for g in plan.stages[0].graphs for i, node in enumerate(g.nodes) if fits(node)]
    return draw.choice(places) if places else None


def _replace(plan: Plan, graph: Graph, index: int, **update: object) -> Plan:
    nodes = list(graph.nodes)
    nodes[index] = nodes[index].model_copy(update=update)
    return _in_graph(plan, graph, nodes)


def another_constant(plan: Plan, draw: random.Random) -> Change | None:
    """A number or a flag of an operator."""

    def constants(node: Node) -> list[int]:
        numbers = (i for i, arg in enumerate(node.args) if isinstance(arg, bool | int | float))
        return list(numbers) if node.op == "call_function" and node.target != GETITEM else []

    place = _pick(plan, draw, lambda node: bool(constants(node)) and node.target not in NEUTRAL)
    if place is None:
        return None
    graph, index = place
    node = graph.nodes[index]
    position = draw.choice(constants(node))
    old = node.args[position]
    new: Arg = not old if isinstance(old, bool) else old * 2 + 1 if isinstance(old, int | float) else old
    args = (*node.args[:position], new, *node.args[position + 1 :])
    return f"{graph.name}: {node.name} gets {new} for {old}", _replace(plan, graph, index, args=args)


def another_operand(plan: Plan, draw: random.Random) -> Change | None:
    """Another earlier value, in the place of one."""
    place = _pick(plan, draw, lambda node: bool(node.refs()) and node.target != GETITEM)
    if place is None:
        return None
    graph, index = place
    node = graph.nodes[index]
    position = draw.choice([i for i, arg in enumerate(node.args) if isinstance(arg, Ref)])
    earlier = draw.choice(graph.nodes[:index]).name
    args = (*node.args[:position], Ref(node=earlier), *node.args[position + 1 :])
    return f"{graph.name}: {node.name} takes {earlier}", _replace(plan, graph, index, args=args)


def a_node_less(plan: Plan, draw: random.Random) -> Change | None:
    """An operator is left out, its consumers take its first operand."""
    place = _pick(
        plan, draw, lambda node: node.op == "call_function" and bool(node.refs()) and node.target not in NEUTRAL
    )
    if place is None:
        return None
    graph, index = place
    gone = graph.nodes[index]
    source = Ref(node=gone.refs()[0])
    nodes = [
        node.model_copy(update={"args": tuple(source if arg == Ref(node=gone.name) else arg for arg in node.args)})
        for node in graph.nodes
        if node is not gone
    ]
    return f"{graph.name}: {gone.name} is left out", _in_graph(plan, graph, nodes)


def another_parameter(plan: Plan, draw: random.Random) -> Change | None:
    """A neighbour's weight."""
    place = _pick(plan, draw, lambda node: node.op == "get_attr")
    if place is None:
        return None
    graph, index = place
    others = [node.target for node in graph.nodes if node.op == "get_attr" and node is not graph.nodes[index]]
    if not others:
        return None
    target = draw.choice(others)
    words = f"{graph.name}: {graph.nodes[index].name} is {target}"
    return words, _replace(plan, graph, index, target=target)


def another_group(plan: Plan, draw: random.Random) -> Change | None:
    """A collective over other ranks."""
    place = _pick(plan, draw, lambda node: node.target in CONVERSIONS)
    if place is None:
        return None
    graph, index = place
    node = graph.nodes[index]
    group = draw.choice(list(plan.manifest.groups))
    args = tuple(group if isinstance(arg, str) else arg for arg in node.args)
    return f"{graph.name}: {node.name} runs over {group}", _replace(plan, graph, index, args=args)


def other_gradient_sums(plan: Plan, draw: random.Random) -> Change | None:
    """A parameter's gradient is summed over other groups, or none."""
    bodies = [body for body in plan.manifest.bodies if body.parameters]
    body = draw.choice(bodies)
    parameter = draw.choice(body.parameters)
    sums = draw.choice([(), *((group,) for group in plan.manifest.groups)])
    changed = parameter.model_copy(update={"sum_over": sums})
    parameters = tuple(changed if p is parameter else p for p in body.parameters)
    new = body.model_copy(update={"parameters": parameters})
    manifest = plan.manifest.model_copy(update={"bodies": tuple(new if b is body else b for b in plan.manifest.bodies)})
    return f"{body.graph}: {parameter.name} sums its gradient over {sums}", Plan(manifest, plan.stages)


KINDS = (
    another_constant,
    another_operand,
    a_node_less,
    another_parameter,
    another_group,
    other_gradient_sums,
)
