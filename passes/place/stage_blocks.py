"""Cuts `forward` into the blocks of pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from moec.passes.ir import Block, Op, Output, Role, Value
from moec.passes.ir.interface import FORWARD, HANDED_ON
from moec.passes.ir.ops import Add, Call, Conversion, StackRoutes, SwitchLoss


class UncuttableError(ValueError):
    """A stage would need a value of an earlier one that stages do not hand on."""

    def __init__(self, value: str, op: Op) -> None:
        super().__init__(f"`{op.mnemonic}` needs %{value} of an earlier stage")


_RECEIVED: Mapping[Role, str] = {
    "residual": "received",
    "balance": "balance_before",
    "probabilities": "probabilities_before",
    "choice_counts": "choices_before",
}
"""The names of what a stage takes from the one before it."""


def cut_forward(forward: Block, lasts: Sequence[int]) -> list[Block]:
    """One block for each stage, whose last layers are `lasts`; the last stage goes on to the end of `forward`.

    A stage hands on the values of `HANDED_ON`. It computes integers that depend on the batch alone from the batch, and
    gives the routes of its own mixtures. Raises `UncuttableError`.
    """
    integers, balance, routes = _integers_of_batch(forward), _BalanceTerms(forward), _Routes(forward)
    roles = _sums_over_layers(forward)
    separate = {op.results[0].name for op in (*integers, *balance.ops, *routes.ops)}
    segments = _segments((op for op in forward.ops if op.results[0].name not in separate), lasts)
    last_users = {name: (number, op) for number, ops in enumerate(segments) for op in ops for name in op.operands}
    blocks, received = list[Block](), dict[str, Value]()  # by their names in `forward`
    for number, segment in enumerate(segments):
        values = received | {value.name: value for op in segment for value in op.results}  # by their names in `forward`
        sums, so_far = balance.so_far(values)
        stacks, chosen = routes.of(values)
        ops = (*(_with_operands(op, received) for op in segment), *sums, *stacks)
        ops = (*_needed(integers, ops), *ops)
        _require_known(forward, ops, received.values())
        result = forward.outputs[0]
        given = {result.role: result.name}
        if number < len(segments) - 1:
            stream = segments[number + 1][0].operands[0]  # the next segment begins with the call of a layer
            users = {name: op for name, (last, op) in last_users.items() if name in values and last > number}
            given = _crossing(stream, users, roles)
        if so_far is not None:
            given["balance"], values[balance.name] = balance.name, so_far
        outputs = [
            Output(values[given[role]].name, role) for role in dict.fromkeys((result.role, *HANDED_ON)) if role in given
        ]
        counts = [output for output in forward.outputs if output.layer is not None and output.name in values]
        blocks.append(_block(forward, number, [*received.values()], ops, [*outputs, *chosen, *counts]))
        received = {
            given[role]: replace(values[given[role]], name=_RECEIVED[role], role=role)
            for role in HANDED_ON
            if role in given
        }
    return blocks


def _integers_of_batch(forward: Block) -> list[Op]:
    """The ops whose results are integers that depend on the batch and settings alone."""
    known, ops = {value.name for value in (*forward.inputs, *forward.settings)}, list[Op]()
    for op in forward.ops:
        is_whole = not isinstance(op, Call) and all(value.dtype == "int64" for value in op.results)
        if is_whole and all(name.removeprefix("$") in known for name in op.operands):
            known.update(value.name for value in op.results)
            ops.append(op)
    return ops


def _needed(integers: Sequence[Op], ops: Iterable[Op]) -> list[Op]:
    """The ops among `integers` whose results `ops` need."""
    wanted, needed = {name for op in ops for name in op.operands}, list[Op]()
    for op in reversed(integers):
        if not wanted.isdisjoint(value.name for value in op.results):
            needed.insert(0, op)
            wanted.update(op.operands)
    return needed


def _segments(ops: Iterable[Op], lasts: Sequence[int]) -> list[list[Op]]:
    """The ops of each stage. Ops between two layers belong to the stage of the earlier layer."""
    segments, firsts = [list[Op]()], {last + 1 for last in lasts[:-1]}
    for op in ops:
        if isinstance(op, Call) and op.layer in firsts:
            segments.append([])
        segments[-1].append(op)
    return segments


def _crossing(stream: str, users: Mapping[str, Op], roles: Mapping[str, Role]) -> dict[Role, str]:
    """The values that later stages (`users`) need at a cut, by role: the residual stream `stream`, and those that have
    `roles`."""
    found: dict[Role, str] = {"residual": stream}
    for name, op in users.items():
        if name != stream:
            if name not in roles or roles[name] in found:
                raise UncuttableError(name, op)
            found[roles[name]] = name
    return found


def _sums_over_layers(forward: Block) -> dict[str, Role]:
    """The roles of the sums so far that a balance term over all layers reads (`lower_pooled`), by name."""
    roles = dict[str, Role]()
    for op in reversed(forward.ops):
        if isinstance(op, SwitchLoss):
            read = op.named(op.operands)
            roles[read["probabilities"]], roles[read["choices"]] = "probabilities", "choice_counts"
        elif isinstance(op, Add | Conversion) and op.results[0].name in roles:
            roles |= dict.fromkeys(op.operands, roles[op.results[0].name])
    return roles


class _BalanceTerms:
    """The sum of all layers' balance terms, which each stage continues.

    `name`: the name of the whole sum in `forward`; empty without balance terms.
    """

    def __init__(self, forward: Block) -> None:
        output = forward.output("balance")
        self.name = output.name if output else ""
        total = next((op for op in forward.ops if isinstance(op, Add) and op.results[0].name == self.name), None)
        self.ops: tuple[Op, ...] = () if total is None else (total,)
        self._terms = () if total is None else total.operands

    def so_far(self, values: Mapping[str, Value]) -> tuple[list[Op], Value | None]:
        """The op that adds a stage's terms to the sum of earlier ones, if one is needed, and the new sum, if any."""
        terms = [values[name] for name in (self.name, *self._terms) if name in values]
        if len(terms) < 2:
            return [], terms[0] if terms else None
        (total,) = self.ops
        return [replace(total, operands=tuple(term.name for term in terms))], total.results[0]


class _Routes:
    """The ops that stack the choices of all layers. Each stage stacks those of its layers."""

    def __init__(self, forward: Block) -> None:
        first = next((place for place, op in enumerate(forward.ops) if isinstance(op, StackRoutes)), len(forward.ops))
        self.ops = forward.ops[first:]  # lowering puts nothing after them

    def of(self, values: Collection[str]) -> tuple[list[Op], list[Output]]:
        """The ops that stack the choices of a stage's layers, and the output with them."""
        choices = [name for name in self.ops[0].operands if name in values] if self.ops else []
        if not choices:
            return [], []
        stacks = [replace(self.ops[0], operands=tuple(choices)), *self.ops[1:]]
        stacks = [
            replace(op, results=tuple(_with_mixtures(value, len(choices)) for value in op.results)) for op in stacks
        ]
        return stacks, [Output(stacks[-1].results[0].name, "routes")]


def _with_mixtures(routes: Value, number: int) -> Value:
    batch, sequence, _, most = routes.shape
    return replace(routes, shape=(batch, sequence, number, most))


def _require_known(forward: Block, ops: Iterable[Op], received: Iterable[Value]) -> None:
    known = {*forward.declared(), *(v.name for op in ops for v in op.results), *(value.name for value in received)}
    for op in ops:
        for name in op.operands:
            if name not in known:
                raise UncuttableError(name, op)


def _with_operands(op: Op, received: Mapping[str, Value]) -> Op:
    return replace(op, operands=tuple(received[name].name if name in received else name for name in op.operands))


def _block(
    forward: Block, number: int, received: Sequence[Value], ops: tuple[Op, ...], outputs: Sequence[Output]
) -> Block:
    used = {operand for op in ops for operand in op.operands}
    return replace(
        forward,
        name=f"{FORWARD}[{number}]" if number else FORWARD,
        inputs=(*received, *(v for v in forward.inputs if number == 0 or v.name in used)),
        ops=ops,
        outputs=tuple(outputs),
        parameters=tuple(p for p in forward.parameters if f"@{p.name}" in used),
        settings=tuple(s for s in forward.settings if f"${s.name}" in used),
    )
