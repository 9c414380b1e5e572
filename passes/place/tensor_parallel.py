"""tensor_parallel: rewrites kv heads and the cross-entropy so that `tp` can shard them, and kv heads for `cp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moec.passes.ir import Block, Op, Parameter, Program, Value
from moec.passes.ir import ops as o
from moec.passes.ir.value import promoted


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Three exact rewrites.

    Fewer kv heads than ranks of `tp`: each kv head is repeated, and every rank slices its copy before the projection.
    Fewer kv heads on a rank of `tp` than ranks of `cp`: keys and values are repeated before ranks of `cp` change tokens
    for heads. Logits with a sharded vocabulary: the cross-entropy becomes a maximum, two sums and the remaining
    per-token terms, with reductions over `tp` in between.
    """

    def apply(self, program: Program) -> Program:
        """The rewritten Program, with the same semantics."""
        dense = program.mesh("dense")
        for size, rewrite in ((dense.size("tp"), _for_tp), (dense.size("cp"), _for_cp)):
            if size > 1:
                blocks = tuple(rewrite(program, block, size) for block in program.blocks)
                program = replace(program, blocks=blocks)
        return program


def _for_tp(program: Program, block: Block, tp: int) -> Block:
    if (logits := block.input("logits")) is not None:
        vocab = logits.shape[-1]
        assert isinstance(vocab, int)
        whole = len(logits.shape) == 2 or vocab % tp  # classes of images are on every rank
        return block if whole else _Rewriter(program, block).run(_cross_entropy_in_parts)
    attention = _attention_of(block)
    heads = _num_kv_heads(block, attention) if attention is not None else tp
    if attention is None or heads % tp == 0:
        return block
    weights = _kv_weights(block, attention)
    return _Rewriter(program, block).run(lambda rewriter, op: _repeat_weights(rewriter, op, weights, tp // heads))


def _for_cp(program: Program, block: Block, cp: int) -> Block:
    attention = _attention_of(block)
    heads = _num_kv_heads(block, attention) // program.mesh("dense").size("tp") if attention is not None else cp
    if attention is None or heads % cp == 0:
        return block
    kv = _kv_heads(block, attention)
    return _Rewriter(program, block).run(lambda rewriter, op: _repeat_kv(rewriter, op, kv, cp // heads))


def _attention_of(block: Block) -> o.Attention | None:
    return next((op for op in block.ops if isinstance(op, o.Attention)), None)


def kv_heads_of(block: Block) -> int | None:
    """The number of heads of keys and values in a block; None without attention."""
    attention = _attention_of(block)
    return _num_kv_heads(block, attention) if attention is not None else None


def _num_kv_heads(block: Block, attention: o.Attention) -> int:
    heads = block.scope[attention.keys_and_values[0]].shape[2]
    assert isinstance(heads, int)
    return heads


def _kv_heads(block: Block, attention: o.Attention) -> set[str]:
    """The names of the keys and values that attention takes, and of all heads from which they are computed."""
    heads = set(attention.keys_and_values)
    for op in reversed(block.ops):
        if heads & {result.name for result in op.results}:
            heads |= {n for n, v in zip(op.operands, block.operands(op), strict=True) if len(v.shape) == 4}
    return heads


def _kv_weights(block: Block, attention: o.Attention) -> dict[str, Parameter]:
    """The parameters that have a part for each kv head: of the ops whose results are heads of keys or values."""
    heads, weights = _kv_heads(block, attention), dict[str, Parameter]()
    for op in block.ops:
        if heads & {result.name for result in op.results}:
            operands = zip(op.operands, block.operands(op), strict=True)
            weights |= {n: v for n, v in operands if isinstance(v, Parameter) and len(v.shape) > 1}
    return weights


class _Rewriter:
    """Rebuilds a block, and infers the types of results again."""

    def __init__(self, program: Program, block: Block) -> None:
        self.program, self.block = program, block
        self.ops: list[Op] = []
        self.scope = block.declared()
        self.renamed: dict[str, str] = {}

    def run(self, rule: Callable[[_Rewriter, Op], None]) -> Block:
        """The block rebuilt by `rule`, which appends the replacement of each op."""
        for op in self.block.ops:
            rule(self, op)
        return replace(self.block, ops=tuple(self.ops))

    def append(self, op: Op) -> None:
        """Appends `op` with renamed operands; a result whose shape has changed gets a new name."""
        op = replace(op, operands=tuple(self.renamed.get(name, name) for name in op.operands))
        types = op.infer([self.scope[name] for name in op.operands], self.program.block_map)
        results = []
        for value, t in zip(op.results, types, strict=True):
            name = value.name
            if value.shape and value.shape != t.shape:
                name = self.renamed[value.name] = f"{value.name}_copies"
            results.append(replace(value, name=name, shape=t.shape, dtype=t.dtype))
        self.scope.update({v.name: v for v in results})
        self.ops.append(op.with_results(results))

    def one(self, kind: type[Op], operands: Sequence[str], to: str, like: Op, **attributes: Any) -> str:
        """Appends a new op with one result called `to`, with the span of `like`; returns the name."""
        unnamed = Value(name=to, shape=(), dtype="")
        self.append(kind(operands=tuple(operands), results=(unnamed,), span=like.span, **attributes))
        return to


def _repeat_weights(rewriter: _Rewriter, op: Op, weights: Mapping[str, Parameter], copies: int) -> None:
    operands = list(op.operands)
    for i, operand in enumerate(operands):
        if operand in weights:
            stem = "_".join(operand.split(".")[-2:])
            operands[i] = rewriter.one(o.RepeatHeads, [operand], f"{stem}_copies", op, copies=copies)
            if weights[operand].shard:
                operands[i] = rewriter.one(o.Slice, [operands[i]], f"{stem}_copy", op, axis="tp", dim=0)
    rewriter.append(replace(op, operands=tuple(operands)))


def _repeat_kv(rewriter: _Rewriter, op: Op, kv: set[str], copies: int) -> None:
    """Repeats keys and values before rope, or before attention if there is no rope."""
    if isinstance(op, o.Rope | o.Attention):
        operands = list(op.operands)
        for i, operand in enumerate(operands):
            if operand in kv and operand not in rewriter.renamed:
                operands[i] = rewriter.one(o.RepeatHeads, [operand], f"{operand}_heads", op, copies=copies, dim=2)
        op = replace(op, operands=tuple(operands))
    rewriter.append(op)


def _cross_entropy_in_parts(rewriter: _Rewriter, op: Op) -> None:
    if not isinstance(op, o.CrossEntropy):
        rewriter.append(op)
        return
    logits, labels = op.operands
    if (dtype := rewriter.scope[logits].dtype) != promoted(dtype):
        logits = rewriter.one(o.Widen, [logits], "wide_logits", op)
    largest = rewriter.one(o.LogitMax, [logits], "largest", op)
    sums = rewriter.one(o.SumExp, [logits, largest], "sums", op)
    label_logit = rewriter.one(o.LabelLogit, [logits, labels], "label_logit", op)
    rewriter.one(o.CrossEntropyOfSums, [sums, largest, label_logit, labels], op.results[0].name, op)
