"""Ops of a mixture of experts after its gate: permute, expert_mlp, combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moec.passes.ir.attribute_types import ActivationName, ActivationParameter, Count
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_activation, require_choices
from moec.passes.ir.value import Attribute, Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise, experts_scratch, experts_work, saved_inside_experts, used_share

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


def experts_layout(meshes: Meshes, by_expert: Mapping[str, Placement], otherwise: Placement) -> Layout:
    """The layout on the expert mesh with the placements `by_expert`, and `otherwise` on all other wide axes.

    Cuts of one dim are in the order of `by_expert`, then in the order of the mesh, `ep` last: rows go to their experts
    over `ep` first, and only the last cut can be undone.
    """
    assert meshes.experts is not None, "an op of a mixture stands in a block without an expert mesh"
    other_axes = sorted((a for a in meshes.experts.wide_axes() if a not in by_expert), key=lambda axis: axis == "ep")
    return Layout.of({**by_expert, **dict.fromkeys(other_axes, otherwise)})


def group_layout(group: str, meshes: Meshes) -> Layout:
    """The layout of per-group counts: sharded over `dp`, or replicated for `group = batch`, which spans all ranks."""
    return REPLICATED if group == "batch" else meshes.own_tokens.only(Shard(0))


@op("permute", "x experts -> rows counts positions", operator="permute", moves=True)
class Permute(TokenOp):
    """Makes rows, sorted by expert: x, experts → rows (ragged), counts `[sources, experts]`, positions.

    Values go from the dense mesh to the expert mesh here: a rank's tokens become its rows. With `some_are_none` some
    choices may be −1: these get no row, and the position −1.
    """

    num_experts: Count
    some_are_none: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts = operands
        require_choices(self, experts, x)
        counts = self.results[1].name
        return (
            Type(shape=(self.num_experts, "rows", x.shape[-1]), dtype=x.dtype, ragged=counts),
            Type(shape=("sources", self.num_experts), dtype="int64"),
            Type(shape=experts.shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = own_tokens(self, 2, meshes).operands
        own_rows = experts_layout(meshes, {}, Shard(1))
        own_counts = experts_layout(meshes, {}, Shard(0))
        return Placing(tokens, (own_rows, own_counts, tokens[0]))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts = operands[1]
        return {"rows": workload.whole(experts), "choices": workload.shape(experts)[-1]}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(results[2]), forward=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activates(TokenOp):
    """Base of ops of experts with an activation between their projections: its word, and its `PARAMETERS`."""

    tiled: ClassVar[bool] = True
    activation: ActivationName
    clamp: ActivationParameter = None
    alpha: ActivationParameter = None

    def activates(self) -> dict[str, Attribute]:
        """The attributes of the activation."""
        return {"activation": self.activation, "clamp": self.clamp, "alpha": self.alpha}


def require_experts(op: Activates, x: Value, by_name: Mapping[str, Value]) -> None:
    """Experts of x `[…, dim]`: up `[experts, parts, hidden, dim]`, down `[experts, dim, hidden]`, maybe both biases.

    All have the dtype of x. A bias is `[experts, parts, hidden]` or `[experts, dim]`: one number for each output.
    """
    up, down = by_name["up"], by_name["down"]
    experts, parts, hidden, _ = up.shape
    require_activation(op, op.activation, parts)
    dim = x.shape[-1]
    require(up.shape[3] == dim and down.shape == (experts, dim, hidden), op, "widths differ")
    biases = [by_name[name] for name in ("up_bias", "down_bias") if name in by_name]
    require(all(value.dtype == x.dtype for value in (up, down, *biases)), op, "wants one dtype")
    bias_shapes = [up.shape[:-1], down.shape[:-1]]
    require(not biases or [bias.shape for bias in biases] == bias_shapes, op, "wants a bias for each output, or none")


def experts_of(by_name: Mapping[str, Value]) -> list[Value]:
    """Up, down and, where given, both biases, from operands by name."""
    return [by_name[name] for name in ("up", "down", "up_bias", "down_bias") if name in by_name]


def require_weights(op: Op, rows: Value, by_name: Mapping[str, Value]) -> None:
    """Requires one weight for each row, or no weights."""
    weights = by_name.get("weights")
    fits = weights is None or (weights.shape, weights.ragged) == (rows.shape[:-1], rows.ragged)
    require(fits, op, "wants a weight for each row, or none")


HIDDEN = 2
"""The hidden dim of up `[experts, parts, hidden, dim]`, of its bias, and of down `[experts, dim, hidden]`."""


@dataclass(frozen=True, slots=True)
class ExpertsPlacing:
    """The layouts of experts that `ep` cuts, and whose hidden width `etp` may cut, of their rows and their results.

    Where `etp` cuts them, its ranks have the rows of all of them, and each computes a term of every result. Where it
    does not, its ranks have different rows, as those of `edp` have.
    """

    weights: Layout
    rows: Layout
    counts: Layout
    results: Layout

    @classmethod
    def of(cls, op: Op, weight: Value, meshes: Meshes) -> ExpertsPlacing:
        """The layouts by that of `weight`. Raises `LayoutError` for another cut."""
        weights = layout_of(weight)
        by_ep, by_etp = weights.get("ep"), weights.get("etp")
        other_axes = set(weights.axes) - {"ep", "etp"}
        if other_axes or by_ep not in (None, Shard(0)) or by_etp not in (None, Shard(HIDDEN)):
            raise LayoutError(f"{op.mnemonic} has no rule for experts that lie as {weights}")
        received = {} if by_ep is None else {"ep": Shard(0)}
        rows = experts_layout(meshes, received, Shard(1))
        counts = experts_layout(meshes, {axis: Shard(1) for axis in received}, Shard(0))
        if by_etp is None:
            return cls(weights, rows, counts, rows)
        rows, counts = rows.replace("etp", None), counts.replace("etp", None)
        return cls(weights, rows, counts, rows.replace("etp", Partial()))

    def of_operands(self, by_name: Mapping[str, Value]) -> tuple[Layout, ...]:
        """The layouts of an op's operands. The bias of down, which is a term of every result, is added once."""
        down_bias = self.weights.replace("etp", Partial()) if self.weights.get("etp") else self.weights
        layouts = {"rows": self.rows, "weights": self.rows, "counts": self.counts, "down_bias": down_bias}
        return tuple(layouts.get(name, self.weights) for name in by_name)


@op("expert_mlp", "rows counts up down up_bias? down_bias? weights? -> y", operator="expert_mlp", saved="hidden table")
class ExpertMlp(Activates):
    """Applies to each row its expert: rows, counts, experts as in `require_experts`, and optional weights of rows."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        rows, counts = by_name["rows"], by_name["counts"]
        require(rows.ragged == counts.name, self, f"rows are counted by {rows.ragged}, not {counts.name}")
        require_weights(self, rows, by_name)
        require_experts(self, rows, by_name)
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        by_name = self.named(operands)
        placing = ExpertsPlacing.of(self, by_name["up"], meshes)
        return Placing(placing.of_operands(by_name), (placing.results,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        by_name = self.named(operands)
        rows, experts = by_name["rows"], experts_of(by_name)
        count = workload.count(rows) / workload.row(rows)
        work = experts_work(count, workload.most_rows(rows), experts, workload, forward=3, backward=4)
        inner = saved_inside_experts(results[0], count, experts[0], workload)
        saved = (*workload.keep(*operands), *inner)
        scratch = experts_scratch(count, workload.most_rows(rows), experts, workload, gathers=(2, 3))
        used = used_share(experts[0], workload)
        return Cost(work=work, saved=saved, used=used, scratch=scratch, of_experts=True)


@op("combine", "rows positions weights -> mixed", operator="combine", moves=True)
class Combine(TokenOp):
    """Sums each token's weighted rows; from the expert mesh to the dense mesh."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, weights = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = own_tokens(self, 2, meshes)
        return Placing((experts_layout(meshes, {}, Shard(1)), *tokens.operands), tokens.results)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(*operands))
