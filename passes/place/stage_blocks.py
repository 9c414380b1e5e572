"""Cuts `forward` into the blocks of pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from moec.passes.ir import Block, Op, Output, Role, Value
from moec.passes.ir.interface import FORWARD, HANDED_ON
from moec.passes.ir.ops import Add, Call, StackRoutes


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
    """The blocks of the stages whose last layers are `lasts`, in order; the last stage is up to the end of `forward`.

    A stage hands the residual stream to the next one, the sum of the balance terms so far, and of a term over all
    layers the sums over its layers so far. It computes the whole numbers of tokens from the batch itself, and gives
    the routes of its own mixtures. Raises `UncuttableError`.
    """
    numbers = _numbers_of_tokens(forward)
    balance, routes = _BalanceTerms(forward), _Routes(forward)
    apart = {op.results[0].name for op in (*numbers, *balance.ops, *routes.ops)}
    segments = _segments((op for op in forward.ops if op.results[0].name not in apart), lasts)
    last_users = {name: (number, op) for number, ops in enumerate(segments) for op in ops for name in op.operands}
    blocks, received = list[Block](), dict[str, Value]()  # by their names in `forward`
    for number, segment in enumerate(segments):
        known = {value.name: value for op in segment for value in op.results} | received
        sums, total = balance.so_far(known, received)
        stacks, chosen = routes.of(known)
        ops = (*(_with_operands(op, received) for op in segment), *sums, *stacks)
        ops = (*_needed(numbers, ops), *ops)
        _require_known(forward, ops, received.values())
        if number < len(segments) - 1:
            stream = next(op for op in segments[number + 1] if isinstance(op, Call)).operands[0]
            later_users = {name: op for name, (last, op) in last_users.items() if name in known and last > number}
            crossing = _crossing(known, stream, later_users)
            outputs = [Output(known[name].name, role) for role, name in crossing.items()]
        else:
            crossing, outputs = {}, [forward.outputs[0]]
        outputs[1:1] = total
        counts = [output for output in forward.outputs if output.layer is not None and output.name in known]
        blocks.append(_block(forward, number, [*received.values()], ops, [*outputs, *chosen, *counts]))
        results = {value.name: value for op in ops for value in op.results} | {v.name: v for v in received.values()}
        handed_on = {role: (name, known[name]) for role, name in crossing.items()}
        if crossing:
            handed_on |= {output.role: (balance.name, results[output.name]) for output in total}
        received = {
            name: replace(value, name=_RECEIVED[role], role=role)
            for role, (name, value) in sorted(handed_on.items(), key=lambda item: HANDED_ON.index(item[0]))
        }
    return blocks


def _numbers_of_tokens(forward: Block) -> list[Op]:
    """The ops that compute whole numbers from nothing but the batch."""
    known, ops = {value.name for value in (*forward.inputs, *forward.settings)}, list[Op]()
    for op in forward.ops:
        is_whole = not isinstance(op, Call) and all(value.dtype == "int64" for value in op.results)
        if is_whole and all(name.removeprefix("$") in known for name in op.operands):
            known.update(value.name for value in op.results)
            ops.append(op)
    return ops


def _needed(numbers: Sequence[Op], ops: Iterable[Op]) -> list[Op]:
    """The ops among `numbers` whose results `ops` need."""
    wanted, needed = {name for op in ops for name in op.operands}, list[Op]()
    for op in reversed(numbers):
        if not wanted.isdisjoint(value.name for value in op.results):
            needed.insert(0, op)
            wanted.update(op.operands)
    return needed


def _segments(ops: Iterable[Op], lasts: Sequence[int]) -> list[list[Op]]:
    """The ops of each stage. What comes between two layers is of the stage of the first one."""
    segments, firsts = [list[Op]()], {last + 1 for last in lasts[:-1]}
    for op in ops:
        if isinstance(op, Call) and op.layer in firsts:
            segments.append([])
        segments[-1].append(op)
    return segments


def _crossing(known: Mapping[str, Value], stream: str, users: Mapping[str, Op]) -> dict[Role, str]:
    """What `users` in later stages need of those before a cut, by role: the residual stream `stream`, and sums of a
    balance term over all layers."""
    found: dict[Role, str] = {"residual": stream}
    for name, op in users.items():
        if name != stream:
            role: Role = "choice_counts" if known[name].dtype == "int64" else "probabilities"
            if role in found:
                raise UncuttableError(name, op)
            found[role] = name
    return found


class _BalanceTerms:
    """The sum of all layers' balance terms, which each stage continues. `name`: that of the whole sum, if any."""

    def __init__(self, forward: Block) -> None:
        output = forward.output("balance")
        self.name = output.name if output else ""
        total = next((op for op in forward.ops if isinstance(op, Add) and op.results[0].name == self.name), None)
        self.ops = () if total is None else (total,)
        self._terms = (self.name,) if total is None else total.operands

    def so_far(self, known: Collection[str], received: Mapping[str, Value]) -> tuple[list[Op], list[Output]]:
        """The op that adds the terms which a stage computes to those before it, and the output with the sum."""
        before = [received[self.name].name] if self.name in received else []
        own = [*before, *(term for term in self._terms if term in known and term not in received)]
        if len(own) < 2 or not self.ops:
            return [], [Output(name, "balance") for name in own]
        (total,) = self.ops
        return [replace(total, operands=tuple(own))], [Output(self.name, "balance")]


class _Routes:
    """The ops that stack the choices of all layers, of which each stage gives its own."""

    def __init__(self, forward: Block) -> None:
        first = next((place for place, op in enumerate(forward.ops) if isinstance(op, StackRoutes)), len(forward.ops))
        self.ops = forward.ops[first:]

    def of(self, known: Collection[str]) -> tuple[list[Op], list[Output]]:
        """The ops that stack the choices of a stage's layers, and the output with them."""
        own = [name for name in self.ops[0].operands if name in known] if self.ops else []
        if not own:
            return [], []
        stacks = [replace(self.ops[0], operands=tuple(own)), *self.ops[1:]]
        stacks = [replace(op, results=tuple(_with_mixtures(value, len(own)) for value in op.results)) for op in stacks]
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
