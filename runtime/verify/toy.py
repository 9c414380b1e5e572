"""A plan at toy widths: the same layers, degrees, groups and ops, with numbers so small that one machine runs it.

The Program is the given plan's own, in which the numbers that stand for widths are replaced. Which these are is seen
by compiling the plan's Spec twice, as it is and with toy widths: the two may differ in them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from moec.codegen.plan import Plan, groups_of
from moec.grammar import to_text
from moec.grammar.diagnostics import InternalError
from moec.grammar.spec import Layer, LayerModule, Model, Moe, Spec, TokenEmbedding
from moec.passes.ir import Block, Op, Parameter, Program
from moec.passes.lower.lower_model import context_of
from moec.passes.pipeline import compile_program

DIM, HEAD_DIM, HIDDEN, VOCAB = 16, 4, 8, 64
"""A head of 4 turns at two speeds, so that rope's theta still counts."""

SEQUENCE, SHORT_SEQUENCE, MANY_RANKS = 8, 4, 65
"""Tokens of a sequence, and on as many ranks as this or more."""

Node_ = TypeVar("Node_", Layer, Moe)


@dataclass(frozen=True, slots=True)
class Width:
    """One kind of width that was shrunk."""

    name: str
    before: int
    toy: int

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.toy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """The first thing in a plan that differs from what moec compiles the plan's own Spec to."""

    layer: str
    op: str
    value: str
    span: str | None


@dataclass(frozen=True, slots=True)
class ToyPlan:
    """A plan at toy widths, what they were, and where it is not the plan that moec would write."""

    plan: Plan
    widths: tuple[Width, ...]
    unlike: Unlike | None


def at_toy_widths(plan: Plan, *, fewer_experts: bool = False) -> ToyPlan:
    """`plan` with its own ops and toy widths. `fewer_experts` keeps only as many as degrees and gates need.

    Raises `InternalError` if what moec compiles depends on widths by more than numbers that are widths.
    """
    shrink = _Shrink(plan, fewer_experts)
    spec = shrink.spec()
    own, toy = (compile_program(s).program for s in (plan.spec, spec))
    _require_same_but_for(own, toy, shrink.widths)
    small = replace(plan, spec_text=to_text(spec), program=_resized(plan.program, own, toy), tiles=None)
    return ToyPlan(small, shrink.widths, _first_unlike(plan, own))


# ---- Programs --------------------------------------------------------------------------------------


def _resized(given: Program, own: Program, toy: Program) -> Program:
    """`given` with the toy's number wherever it has the number that moec wrote."""
    pairs = {o.name: (o, t) for o, t in zip(own.blocks, toy.blocks, strict=True)}
    blocks = (_resized_block(block, *pairs[block.name]) if block.name in pairs else block for block in given.blocks)
    return replace(given, blocks=tuple(blocks))


def _resized_block(given: Block, own: Block, toy: Block) -> Block:
    def resized(items: Sequence[Any], before: Sequence[Any], after: Sequence[Any], name: Callable[[Any], str]) -> Any:
        pairs = {name(o): (o, t) for o, t in zip(before, after, strict=True)}
        return tuple(_at(item, *pairs[name(item)]) if name(item) in pairs else item for item in items)

    return replace(
        given,
        inputs=resized(given.inputs, own.inputs, toy.inputs, lambda value: value.name),
        parameters=resized(given.parameters, own.parameters, toy.parameters, lambda value: value.name),
        ops=resized(given.ops, own.ops, toy.ops, lambda op: op.results[0].name),
    )


def _at(given: Any, own: Any, toy: Any) -> Any:
    """The toy's number in place of one that moec wrote; another, which somebody else wrote, stays."""
    if isinstance(given, tuple) and isinstance(own, tuple) and isinstance(toy, tuple):
        if len(given) == len(own) == len(toy):
            return tuple(_at(g, o, t) for g, o, t in zip(given, own, toy, strict=True))
        return given
    if is_dataclass(given) and type(given) is type(own) is type(toy):
        changed = {}
        for each in fields(given):
            before = getattr(given, each.name)
            after = _at(before, getattr(own, each.name), getattr(toy, each.name))
            if after is not before:
                changed[each.name] = after
        return replace(given, **changed) if changed else given  # type: ignore[type-var]
    return toy if given == own and given != toy else given


def _require_same_but_for(own: Program, toy: Program, widths: Sequence[Width]) -> None:
    """Requires ops, parameters and meshes to differ only in shrunk widths and ranks' parts of them."""
    if own.meshes != toy.meshes:
        raise InternalError(f"{own.name}: toy widths change its meshes")
    for before, after in _unequal(own.blocks, toy.blocks):
        numbers = isinstance(before, int) and isinstance(after, int)
        if not numbers or not any(before * width.toy == after * width.before for width in widths):
            raise InternalError(f"{own.name}: at toy widths {before!r} of its Program becomes {after!r}")


def _unequal(own: Any, toy: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of leaves that differ, except spans, which come from two texts."""
    if isinstance(own, tuple) and isinstance(toy, tuple) and len(own) == len(toy):
        for before, after in zip(own, toy, strict=True):
            yield from _unequal(before, after)
    elif is_dataclass(own) and type(own) is type(toy):
        for each in fields(own):
            if each.compare:
                yield from _unequal(getattr(own, each.name), getattr(toy, each.name))
    elif own != toy:
        yield own, toy


def _first_unlike(plan: Plan, own: Program) -> Unlike | None:
    """Where `plan` first differs from `own`, which was compiled from its Spec; lines of the file apart."""
    given = plan.program
    for block, other in zip_longest(given.blocks, own.blocks):
        if block == other:
            continue
        if block is None or other is None or block.name != other.name:
            return Unlike(layer=(block or other).name, op="block", value=(block or other).name, span=None)
        return _unlike_in(block, other)
    if plan.groups != (groups := groups_of(own.meshes)):
        name = next(name for name in {**plan.groups, **groups} if plan.groups.get(name) != groups.get(name))
        return Unlike(layer="plan", op="group", value=name, span=None)
    return Unlike(layer="plan", op="mesh", value="", span=None) if given.meshes != own.meshes else None


def _unlike_in(block: Block, other: Block) -> Unlike:
    for op, wanted in zip_longest(block.ops, other.ops):
        if op != wanted:
            missing = wanted is not None and wanted.results[0].name not in block.scope
            unlike = wanted if missing or op is None else op
            # Of a missing op, the line where it should be: `wanted` has the lines of the plan's own spec.moe.
            at = _place(op if op is not None else block)
            return Unlike(layer=block.name, op=unlike.mnemonic, value=unlike.results[0].name, span=at)
    for parameter, like in zip_longest(block.parameters, other.parameters):
        if parameter != like:
            at = _place(parameter if parameter is not None else block)
            return Unlike(layer=block.name, op="parameter", value=f"@{(parameter or like).name}", span=at)
    return Unlike(layer=block.name, op="block", value=block.name, span=None)


def _place(node: Block | Op | Parameter) -> str | None:
    return str(node.span) if node.span else None


# ---- the Spec --------------------------------------------------------------------------------------

_ORDER = ("dim", "vocab", "padding", "head_dim", "hidden", "experts", "sequence")


class _Shrink:
    """Writes a Spec with toy widths. Layers that were one object stay one, and those that were two stay two."""

    def __init__(self, plan: Plan, fewer_experts: bool) -> None:
        self._given, self._ranks = plan.spec, plan.world_size
        meshes = plan.meshes.values()
        self._pieces = math.lcm(*(mesh.size(axis) for mesh in meshes for axis in ("tp", "etp", "cp")))
        self._eps = math.lcm(*(mesh.size("ep") for mesh in meshes)) if fewer_experts else None
        self._toys: dict[tuple[str, int], int] = {}
        self._hidden = self._ladder("hidden", _hidden_widths(plan.spec), HIDDEN)
        self._heads = self._ladder("head_dim", _head_widths(plan.spec), HEAD_DIM)
        self._made: dict[int, object] = {}

    def spec(self) -> Spec:
        """The Spec."""
        if not self._given.has_model:
            return self._given.replace(layers=(self._layer_module(self._given.layer),))
        model, train = self._given.model, self._given.train
        tokens = self._shrunk("sequence", context_of(self._given), self._tokens())
        vocab = self._shrunk("vocab", model.vocab, VOCAB)
        small = model.replace(
            dim=self._shrunk("dim", model.dim, DIM),
            vocab=vocab,
            embedding=self._embedding(vocab),
            context=tokens,
            layers=tuple(self._once(layer, self._layer) for layer in model.layers),
        )
        if train is None:
            return self._given.replace(model=small)
        return self._given.replace(model=small, train=train.replace(sequence=min(tokens, train.sequence)))

    def _layer_module(self, layer: LayerModule) -> LayerModule:
        """The subject of a `layer` file. Nothing in its ops is as long as a sequence."""
        dim = self._shrunk("dim", layer.subject.dim, DIM)
        return layer.replace(dim=dim, moe=self._mixture(layer.moe))

    def _embedding(self, vocab: int) -> TokenEmbedding:
        """The padding id is one of the toy vocabulary's: the last, if it was beyond it."""
        embedding = self._given.model.embedding
        if embedding.padding is None or embedding.padding < vocab:
            return embedding
        self._toys["padding", embedding.padding] = vocab - 1
        return embedding.replace(padding=vocab - 1)

    @property
    def widths(self) -> tuple[Width, ...]:
        """What was shrunk."""
        shrunk = (Width(name, before, toy) for (name, before), toy in self._toys.items() if toy != before)
        return tuple(sorted(shrunk, key=lambda width: (_ORDER.index(width.name), width.before)))

    def _tokens(self) -> int:
        return SEQUENCE if self._ranks < MANY_RANKS else SHORT_SEQUENCE

    def _shrunk(self, name: str, width: int, wanted: int, pieces: int | None = None) -> int:
        """The toy width: it divides over as many ranks as `width` does, and no more."""
        each = pieces or self._pieces
        shared = math.gcd(width, each)
        toy = next((toy for toy in range(wanted, width) if math.gcd(toy, each) == shared), width)
        self._toys[name, width] = toy
        return toy

    def _ladder(self, name: str, found: Iterator[int], smallest: int) -> Mapping[int, int]:
        """Toy widths for all that are found; those that differ still do."""
        step = math.lcm(self._pieces, 4)
        return {
            width: self._shrunk(name, width, smallest + step * place) for place, width in enumerate(sorted(set(found)))
        }

    def _once(self, node: Node_, make: Callable[[Node_], Node_]) -> Node_:
        if id(node) not in self._made:
            self._made[id(node)] = make(node)
        made = self._made[id(node)]
        assert isinstance(made, type(node))
        return made

    def _layer(self, layer: Layer) -> Layer:
        width = self._heads[_head_width(self._given.model, layer)]
        changed: dict[str, object] = {"attention": layer.attention.replace(head_dim=width)}
        if layer.ffn is not None:
            changed["ffn"] = self._narrow(layer.ffn)
        if layer.moe is not None:
            changed["moe"] = self._once(layer.moe, self._mixture)
        return layer.replace(**changed)

    def _mixture(self, moe: Moe) -> Moe:
        (experts,) = moe.parts
        count = experts.count
        if self._eps is not None:
            count = self._shrunk("experts", count, max(getattr(moe.gate, "k", 1), self._eps), self._eps)
        beside = {name: self._narrow(path) for name in ("shared", "residual") if (path := getattr(moe, name))}
        return moe.replace(experts=experts.replace(count=count, body=self._narrow(experts.body)), **beside)

    def _narrow(self, path: Any) -> object:
        return path.replace(hidden=self._hidden[path.hidden])


def _hidden_widths(spec: Spec) -> Iterator[int]:
    paths: list[Any] = [layer.ffn for layer in spec.model.layers] if spec.has_model else []
    for moe in spec.subject.mixtures:
        if moe is not None:
            paths += [moe.shared, moe.residual, *(part.body for part in moe.parts)]
    return (path.hidden for path in paths if path is not None)


def _head_widths(spec: Spec) -> Iterator[int]:
    return (_head_width(spec.model, layer) for layer in spec.model.layers) if spec.has_model else iter(())


def _head_width(model: Model, layer: Layer) -> int:
    attention: Any = layer.attention
    return int(attention.head_dim or model.dim // attention.heads)
