"""What the ops of a mixture of experts are in operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moec.codegen.emitter import BlockEmitter, facts
from moec.codegen.graph import Arg, Graph, Node, Ref
from moec.codegen.operators import GETITEM
from moec.passes.ir import Op
from moec.passes.ir import ops as o


def _route(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Route)
    e.results(op, "moec.route.default", *e.refs(op), op.k, op.score, op.order == "after", op.normalize)


def _permute(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.Permute)
    e.results(op, "moec.permute.default", *e.refs(op), op.num_experts)


def _permute_real(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.PermuteReal)
    e.results(op, "moec.permute.default", *e.refs(op), op.num_experts, some_are_none=True)


def _of_operands(e: BlockEmitter, op: Op) -> None:
    e.result(op, f"moec.{op.mnemonic}.default", *e.refs(op))


def _expert_mlp(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.ExpertMlp)
    inputs, experts = _apart(op, "rows", "counts", "weights")
    args = (Ref(node="rows"), Ref(node="counts"), *_of_experts(experts), op.activation, _weights(inputs))
    span = str(op.span) if op.span else None
    body = [
        Node(name="y_all", op="call_function", target="moec.expert_mlp.default", args=args, span=span),
        _result(op, GETITEM, Ref(node="y_all"), 0),
    ]
    _in_own_module(e, op, inputs, experts, body)


def _expert_mlp_padded(e: BlockEmitter, op: Op) -> None:
    """All places of an expert are rows to it: those of zeros come out as something that is never combined."""
    assert isinstance(op, o.ExpertMlpPadded)
    inputs, experts = _apart(op, "rows", "weights")
    span = str(op.span) if op.span else None

    def call(name: str, target: str, *args: Arg) -> Node:
        return Node(name=name, op="call_function", target=target, args=args, span=span)

    flat = {name: call(f"flat_{name}", "aten.flatten.using_ints", Ref(node=name), 0, 1) for name in inputs}
    weights = Ref(node="flat_weights") if "weights" in flat else None
    body = [
        call("counts", "moec.even_counts.default", Ref(node="rows")),
        *flat.values(),
        call(
            "y_all", "moec.expert_mlp.default",
            Ref(node="flat_rows"), Ref(node="counts"), *_of_experts(experts), op.activation, weights,
        ),
        call("y_flat", GETITEM, Ref(node="y_all"), 0),
        _result(op, "aten.view_as.default", Ref(node="y_flat"), Ref(node="rows")),
    ]  # fmt: skip
    _in_own_module(e, op, inputs, experts, body)


def _mixture_mlp(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.MixtureMlp)
    inputs, of_experts = _apart(op, "x", "experts", "weights")
    args: tuple[Arg, ...] = (*(Ref(node=name) for name in inputs), *_of_experts(of_experts), op.activation)
    span = str(op.span) if op.span else None
    body = [
        Node(name="y_all", op="call_function", target="moec.mixture_mlp.default", args=args, span=span),
        _result(op, GETITEM, Ref(node="y_all"), 0),
        _result(op, GETITEM, Ref(node="y_all"), 1, which=1),
    ]
    _in_own_module(e, op, inputs, of_experts, body)


def _apart(op: Op, *names: str) -> tuple[dict[str, str], list[str]]:
    """What experts are given, by the names that it has in their module, and the names of their parameters.

    What may be left out, weights of rows, is named last.
    """
    experts = [name for name in op.operands if name.startswith("@")]
    given = op.operands[: len(op.operands) - len(experts)]
    return dict(zip(names, given, strict=False)), experts


def _weights(inputs: dict[str, str]) -> Ref | None:
    return Ref(node="weights") if "weights" in inputs else None


def _result(op: Op, target: str, *args: Ref | int, which: int = 0) -> Node:
    span = str(op.span) if op.span else None
    name = ("y", "counts")[which]
    return Node(name=name, op="call_function", target=target, args=args, span=span, **facts(op.results[which]))


PARTS = ("up.weight", "down.weight", "up.bias", "down.bias")
"""The parameters of experts, in the order of an op's operands."""


def _of_experts(weights: Sequence[str]) -> tuple[Arg, ...]:
    """An operator's arguments for the experts' weights and biases: None for biases that there are not."""
    nodes = (Ref(node=part.replace(".", "_")) for part in PARTS[: len(weights)])
    return (*nodes, *(None,) * (len(PARTS) - len(weights)))


def _in_own_module(e: BlockEmitter, op: Op, inputs: dict[str, str], weights: list[str], body: Sequence[Node]) -> None:
    """The experts are a module of their own: their parameters shard over another mesh than the layer's."""
    prefix, parts = weights[0][1:].removesuffix(".up.weight"), PARTS[: len(weights)]
    assert weights == [f"@{prefix}.{part}" for part in parts]
    placeholders = [
        Node(name=name, op="placeholder", target=name, **facts(e.block.scope[operand]))
        for name, operand in inputs.items()
    ]
    parameters = [Node(name=part.replace(".", "_"), op="get_attr", target=part) for part in parts]
    results = tuple(Ref(node=node.name) for node in body[-len(op.results) :])
    output = Node(name="output", op="output", target="output", args=results)
    name = f"{e.block.name}.experts"
    e.nested.append(Graph(name=name, nodes=(*placeholders, *parameters, *body, output)))
    e.call(op, prefix, name, [e.ref(operand) for operand in inputs.values()], num_results=len(op.results))


def _groups(e: BlockEmitter, group: str, shares: int) -> int:
    """The routing groups among a rank's sequences, as the operators count them: 0 where each sequence is one."""
    if group == "sequence":
        return 0
    if group == "batch":
        return 1
    return shares // e.meshes.dense.size("dp") if e.meshes is not None else shares


def _count_choices(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.CountChoices)
    e.result(op, "moec.count_choices.default", *e.refs(op), op.num_experts, _groups(e, op.group, op.shares))


def _queue_starts(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.QueueStarts)
    e.result(op, "moec.queue_starts.default", *e.refs(op), _groups(e, op.group, op.shares))


def _permute_padded(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.PermutePadded)
    counted: tuple[Arg, ...] = (*e.refs(op), _groups(e, op.group, op.shares), _spread(e, op.group))
    args = (*counted, op.parts, op.whole, op.least)
    evaluation = (*counted, op.eval_parts, op.eval_whole, op.least)
    e.results(op, "moec.permute_padded.default", *args, evaluation=evaluation)


def _spread(e: BlockEmitter, group: str) -> int:
    """How many times a rank's tokens of a routing group the whole group is."""
    if e.meshes is None:
        return 1
    return e.meshes.dense.size("tp") * (e.meshes.dense.size("dp") if group == "batch" else 1)


def _keep_choices(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.KeepChoices)
    counted: tuple[Arg, ...] = (*e.refs(op), _groups(e, op.group, op.shares), _spread(e, op.group))
    evaluation = (*counted, op.eval_parts, op.eval_whole, op.least)
    e.result(op, "moec.keep_choices.default", *counted, op.parts, op.whole, op.least, evaluation=evaluation)


def _counting(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.CountQueues | o.LargestLoad)
    e.result(op, f"moec.{op.mnemonic}.default", *e.refs(op), op.num_experts)


def _permute_dynamic(e: BlockEmitter, op: Op) -> None:
    assert isinstance(op, o.PermuteDynamic)
    e.results(op, "moec.permute_dynamic.default", *e.refs(op), op.num_experts)


MIXTURES: dict[type[Op], Callable[[BlockEmitter, Op], None]] = {
    o.Combine: _of_operands,
    o.CombinePadded: _of_operands,
    o.CountChoices: _count_choices,
    o.CountQueues: _counting,
    o.ExpertMlp: _expert_mlp,
    o.ExpertMlpPadded: _expert_mlp_padded,
    o.KeepChoices: _keep_choices,
    o.LargestLoad: _counting,
    o.MixtureMlp: _mixture_mlp,
    o.Permute: _permute,
    o.PermuteDynamic: _permute_dynamic,
    o.PermutePadded: _permute_padded,
    o.PermuteReal: _permute_real,
    o.PermuteWeights: _of_operands,
    o.QueueStarts: _queue_starts,
    o.Route: _route,
    o.SumRows: _of_operands,
}
