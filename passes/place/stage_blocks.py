"""Cuts `forward` into the blocks of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moec.passes.ir import Block, Op, Output, Value
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Add, Call


class UncuttableError(ValueError):
    """A stage would need a value of an earlier one that stages do not hand on."""

    def __init__(self, value: str, op: Op) -> None:
        super().__init__(f"`{op.mnemonic}` needs %{value} of an earlier stage")


def cut_forward(forward: Block, lasts: Sequence[int]) -> list[Block]:
    """The blocks of the stages whose last layers are `lasts`, in order; the last stage is up to the end of `forward`.

    A stage hands the residual stream to the next one, and the sum of the balance terms so far. It computes the whole
    numbers of tokens from the batch itself. Raises `UncuttableError`.
    """
    before_cuts = set(lasts[:-1])
    ends = [place + 1 for place, op in enumerate(forward.ops) if isinstance(op, Call) and op.layer in before_cuts]
    segments = [forward.ops[a:b] for a, b in zip([0, *ends], [*ends, len(forward.ops)], strict=True)]
    blocks, received = list[Block](), dict[str, Value]()
    balance = _BalanceTerms(forward)
    for number, own in enumerate(segments):
        ops, total = balance.in_segment(own, received.get("balance"))
        if number:
            stream = segments[number - 1][-1].results[0].name
            ops = tuple(_with_operand(op, stream, received["residual"].name) for op in ops)
        ops = (*_numbers_of_tokens(segments[:number], ops), *ops)
        _require_known(forward, ops, received.values())
        values = {v.name: v for op in ops for v in op.results} | {v.name: v for v in received.values()}
        counts = [output for output in forward.outputs if output.layer is not None and output.name in values]
        given, handed_on = list[Value](received.values()), dict[str, Value]()
        if number < len(segments) - 1:
            result = own[-1].results[0]
            first, others = Output(result.name, "residual"), list[Output]()
            handed_on["residual"] = replace(result, name="received", role="residual")
            if total:
                handed_on["balance"] = replace(values[total[0].name], name="balance_before", role="balance")
        else:
            first, *others = (o for o in forward.outputs if o.layer is None and o.role != "balance")
        blocks.append(_block(forward, number, given, ops, [first, *total, *others, *counts]))
        received = handed_on
    return blocks


class _BalanceTerms:
    """The sum of all layers' balance terms, which each stage continues."""

    def __init__(self, forward: Block) -> None:
        output = next((output for output in forward.outputs if output.role == "balance"), None)
        producer = {value.name: op for op in forward.ops for value in op.results}
        total = producer[output.name] if output else None
        self._total = total if isinstance(total, Add) else None
        self._terms = self._total.operands if self._total else (output.name,) if output else ()

    def in_segment(self, ops: tuple[Op, ...], so_far: Value | None) -> tuple[tuple[Op, ...], list[Output]]:
        """The ops of a stage, with those that add its terms to the sum `so_far`, and the output with the new sum."""
        results = {value.name: value for op in ops for value in op.results}
        own = [*([so_far.name] if so_far else []), *(term for term in self._terms if term in results)]
        ops = tuple(op for op in ops if op is not self._total)
        if len(own) < 2 or self._total is None:
            return ops, [Output(name, "balance") for name in own]
        return (*ops, replace(self._total, operands=tuple(own))), [Output(self._total.results[0].name, "balance")]


def _numbers_of_tokens(earlier: Iterable[Sequence[Op]], ops: Sequence[Op]) -> list[Op]:
    """The ops of earlier stages that compute the whole numbers which `ops` need from the batch."""
    wanted, found = {name for op in ops for name in op.operands}, list[Op]()
    before = [op for segment in earlier for op in segment]
    for op in reversed(before):
        of_numbers = not isinstance(op, Call) and all(value.dtype == "int64" for value in op.results)
        if of_numbers and not wanted.isdisjoint(value.name for value in op.results):
            found.insert(0, op)
            wanted.update(op.operands)
    return found


def _require_known(forward: Block, ops: Sequence[Op], received: Iterable[Value]) -> None:
    known = {*forward.declared(), *_results(ops), *(value.name for value in received)}
    for op in ops:
        for name in op.operands:
            if name not in known:
                raise UncuttableError(name, op)


def _results(ops: Iterable[Op]) -> set[str]:
    return {value.name for op in ops for value in op.results}


def _with_operand(op: Op, old: str, new: str) -> Op:
    return replace(op, operands=tuple(new if name == old else name for name in op.operands))


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
