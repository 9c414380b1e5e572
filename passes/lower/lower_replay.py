"""Lowers the routes of a model with `train { replay = true }`: those that it takes, and those that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.passes.ir import Block, Output, Value
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder, Located
from moec.passes.lower.gates.gated import Gated
from moec.passes.lower.lower_losses import TOKENS


def replayed(b: Builder, gated: Gated, span: Located) -> Gated:
    """The gate's results with the choices of a new input of the layer, and the weights that the gate gives them."""
    gate = b.producer(gated.e)
    assert gate.scores, "the language refuses `replay` for gates without scores"
    scores, k = gate.named(gate.operands)[gate.scores], b.scope[gated.e].shape[-1]
    choices = b.input(Value(name="choices", shape=(*TOKENS, k), dtype="int64", role="choices"))
    w, e = b.add(o.Replay, scores, gated.e, choices, to="w e", span=span)
    return replace(gated, w=w, e=e, by_scores=False, some_are_none=True)


def routes_input(layers: Sequence[Block]) -> list[Value]:
    """The input `routes` of `forward`, where layers take choices."""
    widths = [width for block in layers if (width := _width(block))]
    shape = (*TOKENS, len(widths), max(widths, default=0))
    return [Value(name="routes", shape=shape, dtype="int64", role="routes")] if widths else []


def choices_of_layers(b: Builder, layers: Sequence[Block]) -> list[str]:
    """For each layer the name of its choices, taken from `routes`; the empty string for a layer that takes none."""
    names: list[str] = []
    for number, block in enumerate(layers):
        width, mixture = _width(block), sum(map(bool, names))
        to = f"given_{number}"
        choices = b.one(o.TakeRoutes, "routes", to=to, span=block.span, mixture=mixture, k=width) if width else ""
        names.append(choices)
    return names


def given_routes(b: Builder, layer_outputs: Sequence[Output]) -> list[Output]:
    """The output `routes` of `forward`, from the choices that layers give."""
    choices = [output.name for output in layer_outputs if output.role == "choices"]
    if not choices:
        return []
    largest_k = max(width for name in choices if isinstance(width := b.scope[name].shape[-1], int))
    stacked = b.one(o.StackRoutes, *choices, to="stacked", most=largest_k)
    return [Output(b.one(o.WholeSequences, stacked, to="chosen"), "routes")]


def _width(block: Block) -> int:
    """The choices of a token that a layer takes; 0 of a layer that takes none."""
    choices = block.input("choices")
    width = 0 if choices is None else choices.shape[-1]
    assert isinstance(width, int)
    return width
