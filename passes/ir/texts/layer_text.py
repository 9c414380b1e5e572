"""The text of layers and their bodies: a line for consecutive layers of the same body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from moec.grammar.layer_numbers import numbered
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ir_error import UnreadableLineError, quoted
from moec.passes.ir.limits import LABEL, MAX_LAYER
from moec.passes.ir.ops import Call
from moec.passes.ir.program import Block, Layer
from moec.passes.ir.texts.lines import Lines
from moec.passes.ir.texts.parse_type import integer

_LAYERS = re.compile(rf'  layers? ([0-9]++)(?:\.\.([0-9]++))? of ("{LABEL}"(?:, "{LABEL}")*+)')


def layer_lines(layers: Iterable[Layer]) -> Iterator[str]:
    """The text of layers."""
    for bodies, run in groupby(layers, key=lambda layer: layer.bodies):
        yield f"  {numbered([layer.number for layer in run])} of {', '.join(map(json.dumps, bodies))}"


def read_layers(lines: Lines, blocks: Sequence[Block]) -> tuple[Layer, ...]:
    """The layers, which `forward` must run by their bodies. Raises `UnreadableLineError`."""
    called_bodies, names = _called(blocks), {block.name for block in blocks}
    layers: list[Layer] = []
    while lines.next_starts_with("  layer"):
        first, last, text = lines.take_match(_LAYERS, "`layers …` and their body").groups()
        bodies = tuple(text[1:-1].split('", "'))
        for name in bodies:
            if name not in names:
                raise UnreadableLineError(f"there is no block {quoted(name)}")
        if len(bodies) > 1:
            raise UnreadableLineError("layers of several bodies are not supported yet")
        start = integer(first, "the number of a layer", 0, MAX_LAYER)
        if start != len(layers):
            raise UnreadableLineError(f"layer {len(layers)} is the next, not {start}")
        for number in range(start, integer(last or first, "the number of a layer", start, MAX_LAYER) + 1):
            called_body = called_bodies.get(number)
            if called_body not in bodies:
                runs = f"by {quoted(called_body)}, which is no body of it" if called_body else "by no block"
                raise UnreadableLineError(f"`forward` runs layer {number} {runs}")
            layers.append(Layer(number, bodies))
    missing = sorted(called_bodies.keys() - range(len(layers)))
    if missing:
        raise UnreadableLineError(f"layer {missing[0]} has no body")
    known = {FORWARD, *(body for layer in layers for body in layer.bodies)}
    for block in blocks:
        calls_none = not any(isinstance(op, Call) for op in block.ops)
        if block.name not in known and calls_none and block.input("residual") and block.output("residual"):
            raise UnreadableLineError(f"{quoted(block.name)} is the body of no layer")
    return tuple(layers)


def _called(blocks: Sequence[Block]) -> dict[int, str]:
    """The block by which each layer is called."""
    bodies: dict[int, str] = {}
    for call in (op for block in blocks for op in block.ops if isinstance(op, Call)):
        if call.layer in bodies:
            raise UnreadableLineError(f"layer {call.layer} runs twice")
        bodies[call.layer] = call.block
    return bodies
