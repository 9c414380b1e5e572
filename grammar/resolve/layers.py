"""`layers` blocks, in order, to one Layer per layer.

Layers with the same blocks behind them are one object: a model of thousands of layers costs what its distinct
ones cost, here and in every pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from moec.grammar.checking import mixture_rules, rules
from moec.grammar.resolve.numbers import number
from moec.grammar.resolve.part_rules import complete
from moec.grammar.resolve.parts import Part, Stated, build, merged
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.schema import NumberKind, fields
from moec.grammar.source import Span
from moec.grammar.spec import Attention, Layer
from moec.grammar.spec.base import Bound, Node
from moec.grammar.syntax.tree import Expression, Name, Range, Sequence

MAX_SELECTED = 1_000_000
"""Most layers that the blocks of a file may select, each counted once per block."""

MAX_COMBINATIONS = 20_000
"""Most different combinations of blocks over a layer: each is merged and built separately."""

_INDEX = NumberKind(whole=True, unit="", bounds=(Bound("at least", 0),))


def resolve_layers(scope: Scope, model: Part) -> tuple[Layer, ...] | Broken:
    """The layers that a `model` block describes, whose other names are resolved already."""
    depth, dim = model.stated.get("depth"), model.stated.get("dim")
    blocks = model.blocks.get(Layer.word, [])
    if depth is None or not isinstance(depth.value, int):
        return BROKEN
    selections = [select_layers(scope, block.selector, depth.value, depth.span) for block in blocks]
    combined = _combine(scope, blocks, selections, depth.value)
    if combined is None:
        return BROKEN
    by_identity: dict[int, list[int]] = {}
    for index, part in enumerate(combined):
        by_identity.setdefault(id(part), []).append(index)
    unsure = any(selection is BROKEN for selection in selections)
    built: dict[int, Node | Broken] = {}
    for key, indices in by_identity.items():
        part = combined[indices[0]]
        built[key] = _layer(scope, part or Part(Layer, model.span, incomplete=unsure), indices, model.span, dim)
    layers = [built[id(part)] for part in combined]
    if unsure or model.incomplete:
        return BROKEN
    good = tuple(layer for layer in layers if isinstance(layer, Layer))
    return good if len(good) == len(layers) else BROKEN


def _combine(
    scope: Scope, blocks: list[Part], selections: list[Iterable[int] | Broken], depth: int
) -> list[Part | None] | None:
    """The merged Part of each layer's blocks; layers with the same blocks get the same Part.

    Number 0 is the combination without blocks; every other number is a combination made from an earlier one by adding a
    block. None, after a diagnostic, if there are too many.
    """
    combinations: list[Part | None] = [None]
    state = [0] * depth
    for block, selection in zip(blocks, selections, strict=True):
        if isinstance(selection, Broken):
            continue
        extended: dict[int, int] = {}
        for layer in selection:
            before = state[layer]
            if before not in extended:
                if len(combinations) > MAX_COMBINATIONS:
                    message = f"more than {MAX_COMBINATIONS:_} different stacks of blocks over a layer"
                    scope.error("MOE0405", block.span, message)
                    return None
                earlier = combinations[before]
                extended[before] = len(combinations)
                combinations.append(merged(earlier, block) if earlier else block)
            state[layer] = extended[before]
    return [combinations[number] for number in state]


def _layer(scope: Scope, part: Part, indices: list[int], model: Span, dim: Stated | None) -> Node | Broken:
    width = dim.value if dim and isinstance(dim.value, int) else None
    stated = part.stated.get("attention")
    if stated and isinstance(stated.value, Attention):
        scope.diagnostics += rules.attention(stated.value, width, dim.span if dim else None)
    if not part.incomplete and not scope.moved & set(fields(Layer)):
        incomplete = list(complete(part, indices, model))
        scope.diagnostics += incomplete
        if incomplete:
            return BROKEN
    layer = build(scope, part)
    if isinstance(layer, Layer):
        scope.diagnostics += mixture_rules.gated(layer.ffn, layer.moe)
    if isinstance(layer, Layer) and layer.moe:
        scope.diagnostics += mixture_rules.mixture(layer.moe)
    return layer


def select_layers(scope: Scope, selector: Expression | None, depth: int, depth_span: Span) -> Iterable[int] | Broken:
    """The numbers of the layers that `selector` picks."""
    if selector is None:
        return range(depth)
    if isinstance(selector, Name) and selector.text == "all" and "all" not in scope.lets:
        help = "write `layers { … }`: without numbers it is all layers"
        return scope.error("MOE0201", selector.span, "`all` is not known here", help=help)
    written = scope.follow(selector)
    value = written.value
    if isinstance(value, Broken):
        return BROKEN
    if isinstance(value, Sequence):
        parts = [select_layers(scope, item, depth, depth_span) for item in value.items]
        if any(isinstance(part, Broken) for part in parts):
            return BROKEN
        return dict.fromkeys(index for part in parts if not isinstance(part, Broken) for index in part)
    if isinstance(value, Range):
        return _range(scope, value, written, depth, depth_span)
    index = number(scope, written, _INDEX)
    if isinstance(index, Broken):
        return BROKEN
    return _checked(scope, range(int(index), int(index) + 1), written, depth, depth_span)


def _range(scope: Scope, value: Range, written: Written, depth: int, depth_span: Span) -> Iterable[int] | Broken:
    if isinstance(value.last, Name) and value.last.text == "depth" and "depth" not in scope.lets:
        help = f"the last layer is {depth - 1}: write that, or use a `let` for both"
        return scope.error("MOE0201", value.last.span, "`depth` is no constant", help=help, instead=str(depth - 1))
    first = number(scope, scope.follow(value.first), _INDEX)
    last = number(scope, scope.follow(value.last), _INDEX)
    step: int | float | Fraction | Broken = 1
    if value.step is not None:
        step = number(scope, scope.follow(value.step), NumberKind(whole=True, unit="", bounds=(Bound("at least", 1),)))
    if isinstance(first, Broken) or isinstance(last, Broken) or isinstance(step, Broken):
        return BROKEN
    return _checked(scope, range(int(first), int(last) + 1, int(step)), written, depth, depth_span)


def _checked(scope: Scope, indices: range, written: Written, depth: int, depth_span: Span) -> Iterable[int] | Broken:
    before = scope.selected
    scope.selected += len(indices) if indices.stop <= depth else 0
    if before > MAX_SELECTED:
        return BROKEN
    if scope.selected > MAX_SELECTED:
        message = f"by here more than {MAX_SELECTED:_} layers are selected"
        return scope.error("MOE0405", written, message, help="say what most layers have in common once, for all")
    problems = list(rules.selected(indices.start, indices.stop - 1, written.span, depth, depth_span))
    scope.diagnostics += problems
    return BROKEN if problems else indices
