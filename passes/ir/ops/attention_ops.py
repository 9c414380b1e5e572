"""Attention, and the ops on heads before it: rotary positions and repeated kv heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from moec.passes.ir.attribute_types import Bounds, Count, DimNumber, Longest, Positive
from moec.passes.ir.layout import REPLICATED, Layout, Shard
from moec.passes.ir.limits import MAX_DIM
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, reduced_layout
from moec.passes.ir.value import Value, promoted
from moec.passes.ir.work.arrays import smaller
from moec.passes.ir.work.cost import Cost, Saved
from moec.passes.ir.work.formulas import elementwise, fused_attention, with_more

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


DimCount = Annotated[int, Bounds(ge=0, le=MAX_DIM)]
NonNegative = Annotated[float, Bounds(ge=0)]
MAX_PAIRS = 4096
"""Frequencies in an attribute."""


def _by_heads(op: Op, operands: Sequence[Value], meshes: Meshes) -> Placing:
    """Every rank has whole sequences of some heads: a cut of the sequence dim becomes a cut of the heads dim.

    A value with one head, which all others share, is on every rank.
    """
    layout, is_shared = reduced_layout(operands[0], meshes), operands[0].shape[2] == 1
    for axis, placement in layout.placements:
        if placement not in (Shard(0), Shard(1), Shard(2)):
            raise LayoutError(f"{op.mnemonic} has no rule for {axis}:{placement}")
    for axis in reversed(layout.cuts(1)):  # `tp` cuts heads first, as it cuts projections
        layout = layout.replace(axis, None if is_shared else Shard(2))
    token_layout = layout.only(Shard(0))
    head_layout = Layout.of((axis, Shard(0)) for axis, placement in layout.placements if placement == Shard(2))

    def operand_layout(value: Value) -> Layout:
        if value.dtype == "int64":
            return token_layout
        return head_layout if len(value.shape) == 1 else layout

    return Placing(tuple(map(operand_layout, operands)), (layout,))


@op("rope", "x positions? -> y", operator="rope")
class Rope(TokenOp):
    """Rotary positions on `[batch, sequence, heads, head_dim]` (Su et al. 2021).

    The `width` dims from dim `start` turn, all where `width` is 0: the first half of them with the second (Llama), or
    `interleaved` neighbours in pairs (GPT-J). `positions` `[batch, sequence]`: default 0, 1, … in each sequence.
    `frequencies` are the radians per position of each pair; where there are none they follow from `theta`. Turned dims
    are multiplied by `factor`.
    """

    theta: Positive
    start: DimCount = 0
    width: DimCount = 0
    interleaved: bool = False
    frequencies: Annotated[tuple[NonNegative, ...], Longest(MAX_PAIRS)] = ()
    factor: Positive = 1.0

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, *positions = operands
        require(len(x.shape) == 4 and isinstance(x.shape[-1], int), self, "wants heads of a known width")
        assert isinstance(x.shape[-1], int)
        width = self.width or x.shape[-1] - self.start
        fits = width > 0 and width % 2 == 0 and self.start + width <= x.shape[-1]
        require(fits, self, "wants heads in which an even number of dims turns")
        require(len(self.frequencies) in (0, width // 2), self, "wants a frequency for each pair")
        _require_token_numbers(self, x, positions)
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _by_heads(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        cost, x = elementwise(self, operands, results, workload, keeps=workload.keep(*operands[1:])), operands[0]
        # Five fp32 tensors that `torch_rope.turned` reads and writes, and a cast before and after; x and y are counted.
        width, wide = workload.width(x.dtype), workload.width(promoted(x.dtype))
        more = workload.count(x) * (5 * wide + 2 * (width + wide) * (width < wide) - 2 * width)
        return with_more(cost, forward=more, backward=more)


def _require_token_numbers(op: Op, x: Value, numbers: Sequence[Value]) -> None:
    """Requires a whole number for each token of x."""
    fits = all(v.dtype == "int64" and v.shape == x.shape[:2] for v in numbers)
    require(fits, op, "wants a whole number for each token")


@op("clip", "x -> y")
class Clip(TokenOp):
    """Clamps x `[batch, sequence, heads, head_dim]` to ± `limit` (`clip_qkv` of DBRX, Databricks 2024)."""

    limit: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = reduced_layout(operands[0], meshes)
        return Placing((layout,), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(*operands))


class Reach(NamedTuple):
    """The tokens that a token attends to: less than `window` tokens away, 0 for all; if `causal`, none later."""

    window: int
    causal: bool

    def keys(self, length: float) -> float:
        """Number of pairs of a token and a key that it attends to, in a text of `length` tokens."""
        window = smaller(self.window or length, length)
        behind = window * length - window**2 / 2
        return behind if self.causal else 2 * behind


@op("attention", "q k v segments? real? sinks? -> attended")
class Attention(Op):
    """Softmax attention: q `[batch, sequence, heads, head_dim]`, k and v with `kv_heads` that divide heads, v and the
    result of any width.

    A token attends to itself and to the tokens before it; not `causal`, to those after it too. With `segments`
    `[batch, sequence]` it attends to tokens of its own segment alone; with `real` `[batch, sequence]` real tokens
    attend to real tokens and padding to padding. With a `window`, 0 for none, it attends to tokens less than that far
    away (Beltagy et al. 2020, section 3.1, whose window has tokens on both sides). Scores are multiplied by `scale`, 0
    for 1 / sqrt(head_dim).

    `sinks` `[heads]` are scores of one more key, whose value is zero, of each head (gpt-oss; Xiao et al. 2023, section
    3.3, "SoftMax-off-by-One" with a learned one).
    """

    causal: bool = True
    window: DimCount = 0
    scale: NonNegative = 0.0

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "" if self.causal else "attention to later tokens (`causal = false`)"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        q, k, v, *optional = operands
        _require_token_numbers(self, q, [value for value in optional if value.dtype == "int64"])
        sinks = [value for value in optional if value.dtype != "int64"]
        dtypes = q.dtype, promoted(q.dtype)
        fits = all(value.shape == q.shape[2:3] and value.dtype in dtypes for value in sinks)
        require(fits and len(sinks) == ("sinks" in self.optional), self, "wants a sink for each head")
        fits_keys = k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2]
        require(fits_keys, self, "wants k and v of equal heads, over the tokens of q")
        require(q.shape[3] == k.shape[3], self, "wants q and k of one width")
        return (Type(shape=(*q.shape[:3], v.shape[3]), dtype=q.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _by_heads(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        q, k, v, *optional = operands
        (attended,) = results
        batch, sequence, heads, _ = workload.shape(q)
        log_sums = workload.inner(attended, "logsumexp", batch * sequence * heads, promoted(q.dtype))
        work = fused_attention(q, k, v, attended, workload, keys=self.reach.keys(sequence) / sequence)
        saved = (*_saved_for_attention(q, k, v, attended, workload), log_sums)
        numbers = [value for value in optional if value.dtype == "int64"]
        if self.window or {"sinks", "segments"} & set(self.optional):
            saved = (*saved, *workload.keep(*optional))
        elif numbers:  # torch turns the mask into numbers of q's dtype
            saved = (*saved, workload.inner(attended, "mask", batch * sequence * sequence, q.dtype))
        return Cost(work=work, saved=saved)

    @property
    def keys_and_values(self) -> tuple[str, ...]:
        """The operands with kv heads, of which there may be fewer than ranks of `tp`."""
        return self.operands[1:3]

    @property
    def reach(self) -> Reach:
        """The tokens that a token attends to."""
        return Reach(int(self.window), self.causal)


def _saved_for_attention(q: Value, k: Value, v: Value, attended: Value, workload: Workload) -> tuple[Saved, ...]:
    """Queries, keys, values and the result, padded to one width."""
    widest = max(width for value in (q, v) if isinstance(width := value.shape[3], int))
    saved: list[Saved] = []
    for name, value in (("q", q), ("k", k), ("v", v), ("out", attended)):
        width = value.shape[3]
        if width == widest:
            saved += workload.keep(value)
        else:
            assert isinstance(width, int)
            saved.append(workload.inner(attended, name, workload.count(value) / width * widest, value.dtype))
    return tuple(saved)


@op("join_shared", "x shared -> y")
class JoinShared(TokenOp):
    """x `[batch, sequence, heads, own]`, shared `[batch, sequence, 1, dims]` → `[batch, sequence, heads, own + dims]`:
    each head's own dims, then those that all heads share."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, shared = operands
        fits = len(x.shape) == len(shared.shape) == 4 and shared.shape[:3] == (*x.shape[:2], 1)
        require(fits and x.dtype == shared.dtype, self, "wants heads, and one more over the same tokens")
        head_dim, shared_dim = x.shape[3], shared.shape[3]
        require(isinstance(head_dim, int) and isinstance(shared_dim, int), self, "wants heads of a known width")
        assert isinstance(head_dim, int)
        assert isinstance(shared_dim, int)
        return (Type(shape=(*x.shape[:3], head_dim + shared_dim), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        head_layout = _by_heads(self, operands[:1], meshes).results[0]
        return Placing((head_layout, head_layout.only(Shard(0))), (head_layout,))


@op("repeat_heads", "x -> copies")
class RepeatHeads(TokenOp):
    """Repeats each head `copies` times: `[heads, …]` → `[heads · copies, …]`, copies side by side; or the heads of
    tokens, `[batch, sequence, heads, head_dim]`, if `dim` is 2.

    Grouped-query attention over the copies is exact, and ranks may cut between copies.
    """

    copies: Count
    dim: DimNumber = 0

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        heads = x.shape[self.dim] if self.dim in (0, 2) and self.dim < len(x.shape) else None
        require(isinstance(heads, int), self, "wants a known number of heads")
        assert isinstance(heads, int)
        shape = (*x.shape[: self.dim], heads * self.copies, *x.shape[self.dim + 1 :])
        return (Type(shape=shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = reduced_layout(operands[0], meshes) if self.dim else REPLICATED
        return Placing((layout,), (layout,))
