"""Ops of the dense parts: embedding, norms, projections, attention, element-wise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.layout import Layout, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require, size_of
from moec.passes.ir.ops.tokens import Blocks, follow_tokens
from moec.passes.ir.value import Value, promoted


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Op):
    """Rows of a table: ids `[batch, sequence]`, table `[vocab, dim]` → `[batch, sequence, dim]`."""

    mnemonic: ClassVar[str] = "embed"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table = operands
        require(ids.dtype == "int64" and len(table.shape) == 2, self, "wants int64 ids and a [vocab, dim] table")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPositions(Op):
    """The first rows of a table, for each sequence: ids `[batch, sequence]`, table `[context, dim]` → as `embed`."""

    mnemonic: ClassVar[str] = "embed_positions"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table = operands
        require(len(ids.shape) == 2 and len(table.shape) == 2, self, "wants ids and a [context, dim] table")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        placing = follow_tokens(self, operands[:1], parameters=1)
        if any(placement == Shard(1) for _, placement in placing.results[0].placements):
            raise LayoutError("embed_positions has no rule for a sharded sequence")
        return placing


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm(Op):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dim, in at least fp32 (Zhang & Sennrich 2019)."""

    mnemonic: ClassVar[str] = "rms_norm"
    eps: float

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        require(weight.shape == x.shape[-1:], self, "wants a weight as wide as the last dim")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Op):
    """`(x − mean) / sqrt(variance + eps) * weight + bias` over the last dim, in at least fp32 (Ba et al. 2016).

    x, weight, and bias where there is one.
    """

    mnemonic: ClassVar[str] = "layer_norm"
    eps: float

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, *vectors = operands
        require(len(vectors) in (1, 2), self, "wants a weight, and at most a bias")
        require(all(v.shape == x.shape[-1:] for v in vectors), self, "wants vectors as wide as the last dim")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=len(operands) - 1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Op):
    """Contracts the last `contract` dims of x and weight: `[…, in]`, `[out…, in]` → `[…, out…]`."""

    mnemonic: ClassVar[str] = "linear"
    contract: int = 1

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        n = self.contract
        require(x.shape[-n:] == weight.shape[-n:], self, f"{x.shape[-n:]} and {weight.shape[-n:]} do not contract")
        require(x.dtype == weight.dtype, self, "wants one dtype")
        return (Type(shape=(*x.shape[:-n], *weight.shape[:-n]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=1)

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        x, weight = operands
        return 2 * size_of(x.shape[: -self.contract], sizes) * size_of(weight.shape, sizes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AddBias(Op):
    """x `[batch, sequence, out…]`, bias `[out…]` → x + bias. No part of `linear`, whose result may be a partial sum."""

    mnemonic: ClassVar[str] = "add_bias"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, bias = operands
        require(x.shape[2:] == bias.shape and x.dtype == bias.dtype, self, "wants a bias for each output")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Op):
    """Rotary positions on `[batch, sequence, heads, head_dim]`, half-split convention (Su et al. 2021)."""

    mnemonic: ClassVar[str] = "rope"
    theta: float

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        width = x.shape[-1]
        require(len(x.shape) == 4 and isinstance(width, int) and width % 2 == 0, self, "wants heads of even width")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """Causal softmax attention: q `[batch, sequence, heads, head_dim]`, k and v with `kv_heads` that divide heads."""

    mnemonic: ClassVar[str] = "attention"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        q, k, v = operands
        require(k.shape == v.shape and q.shape[:2] == k.shape[:2], self, "wants k like v, over the tokens of q")
        require(q.shape[3] == k.shape[3], self, "wants one head width")
        return (Type(shape=q.shape, dtype=q.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        placing = follow_tokens(self, operands)
        if any(placement == Shard(1) for _, placement in placing.results[0].placements):
            raise LayoutError("attention has no rule for a sharded sequence")
        return placing

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        # Scores and values, the causal half of each (the convention that MFU figures use).
        return 2 * size_of(operands[0].shape, sizes) * sizes["sequence"]


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(Op):
    """`[…, parts, hidden]` → `[…, hidden]`.

    Of two parts, `swiglu` is silu(first) · second, `geglu` gelu(first) · second; `gelu` (erf), `relu` and its square
    `relu2` have one.
    """

    mnemonic: ClassVar[str] = "activation"
    kind: str

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(x.shape[-2] == ACTIVATION_PARTS[self.kind], self, f"{x.shape[-2]} parts")
        return (Type(shape=(*x.shape[:-2], x.shape[-1]), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands)


ACTIVATION_PARTS = {"swiglu": 2, "geglu": 2, "gelu": 1, "relu": 1, "relu2": 1}
"""How many projections of the input an activation takes. Named as the language names the feed-forwards."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Op):
    """The sum of values of one type."""

    mnemonic: ClassVar[str] = "add"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        first = operands[0]
        require(all(v.shape == first.shape and v.dtype == first.dtype for v in operands), self, "types differ")
        return (Type(shape=first.shape, dtype=first.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Linear, so partial sums add to a partial sum.
        layout: Layout = layout_of(operands[0])
        return Placing((layout,) * len(operands), (layout,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Router(Op):
    """Logits in at least fp32: `[batch, sequence, dim]`, weight `[experts, dim]` → `[batch, sequence, experts]`."""

    mnemonic: ClassVar[str] = "router"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        require(x.shape[-1] == weight.shape[-1], self, "widths differ")
        return (Type(shape=(*x.shape[:-1], weight.shape[0]), dtype=promoted(x.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], parameters=1)

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        x, weight = operands
        return 2 * size_of(x.shape[:-1], sizes) * size_of(weight.shape, sizes)
