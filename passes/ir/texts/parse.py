"""Reads the text form of a Program: `parse_program(print_program(p)) == p`, including spans.

The text is not trusted. Each statement is a line that one regular expression splits; the reader checks every name,
number and word before it makes an op. At the end the Program must print as the same text. `verifier.check_program`
checks types and layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import get_args

from moec.grammar.spec.parallel import Schedule
from moec.passes.ir.ir_error import IrError, UnreadableLineError, at_most, quoted
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.limits import (
    AXIS,
    LABEL,
    MAX_AXES,
    MAX_BLOCKS,
    MAX_LABEL,
    MAX_MESHES,
    MAX_MICROBATCHES,
    MAX_RANKS,
    MAX_STAGES,
)
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.order import Order
from moec.passes.ir.order_messages import waiting
from moec.passes.ir.program import Program, Stage
from moec.passes.ir.texts.layer_text import read_layers
from moec.passes.ir.texts.lines import Lines
from moec.passes.ir.texts.order_text import OrderReader
from moec.passes.ir.texts.parse_attributes import STRING, short_string
from moec.passes.ir.texts.parse_block import BlockReader
from moec.passes.ir.texts.parse_type import TypeReader, integer
from moec.passes.ir.texts.text import program_lines

_HEAD = re.compile(rf"program ({STRING})(?: from ({STRING}))? \{{")
_MESH = re.compile(rf'  mesh "({LABEL})" \{{([a-z0-9=, ]++)\}}')
_AXIS = re.compile(rf"({AXIS}) = ([0-9]++)")
_TOKENS = re.compile(r"  tokens @ ([a-z0-9:() ]++)")
_MICROBATCHES = re.compile(r"  microbatches ([0-9]++)")
_SCHEDULE = re.compile(rf"  schedule ({'|'.join(get_args(Schedule))})")
_STAGE = re.compile(rf'  stage ([0-9]++) on ranks ([0-9]++)\.\.([0-9]++) runs "({LABEL})"')


def parse_program(text: str) -> Program:
    """The Program that `text` prints. Raises `IrError` for a text that `print_program` does not print."""
    lines = Lines(text)
    try:
        program = _read_program(lines)
        lines.end()
        lines.require_same(program_lines(program))
    except UnreadableLineError as error:
        raise IrError(lines.number, str(error)) from None
    return program


def _read_program(lines: Lines) -> Program:
    head = lines.take_match(_HEAD, '`program "…" {`')
    name = short_string(head[1])
    main = short_string(head[2]) if head[2] else None
    meshes: dict[str, Mesh] = {}
    while lines.next_starts_with("  mesh "):
        mesh = _read_mesh(lines)
        if meshes.setdefault(mesh.name, mesh) is not mesh:
            raise UnreadableLineError(f"the mesh {quoted(mesh.name)} stands twice")
        at_most(len(meshes), MAX_MESHES, "meshes")
    types = TypeReader({axis for mesh in meshes.values() for axis in (*dict(mesh.axes), *mesh.joint_axes())})
    tokens = REPLICATED
    if lines.next_starts_with("  tokens "):
        tokens = types.layout(lines.take_match(_TOKENS, "a layout of tokens")[1])
    microbatches = 1
    if lines.next_starts_with("  microbatches "):
        number = lines.take_match(_MICROBATCHES, "a number of micro-batches")[1]
        microbatches = integer(number, "the number of micro-batches", 2, MAX_MICROBATCHES)
    reader = BlockReader(lines, types, meshes.keys(), main)
    blocks = []
    while lines.next_starts_with("\n"):
        lines.take_exactly("")
        blocks.append(reader.block())
        at_most(len(blocks), MAX_BLOCKS, "blocks")
    layers = read_layers(lines, blocks)
    stages: list[Stage] = []
    while lines.next_starts_with("  stage "):
        stages.append(_read_stage(lines, stages, [*meshes.values()], reader.expanded.keys()))
        at_most(len(stages), MAX_STAGES, "stages")
    schedule = "one_f_one_b"
    if len(stages) > 1:
        schedule = lines.take_match(_SCHEDULE, "the schedule of the stages")[1]
    program = Program(
        name=name,
        meshes=tuple(meshes.values()),
        tokens=tokens,
        blocks=tuple(blocks),
        layers=layers,
        stages=tuple(stages),
        microbatches=microbatches,
        schedule=schedule,
    )
    if program.stages and not program.has_equal_stages:
        raise UnreadableLineError("ranks with different numbers of stages")
    orders, order_reader = list[Order](), OrderReader(lines, program)
    while lines.next_starts_with("  order "):
        orders.append(order_reader.order())
        at_most(len(orders), len(stages), "orders")
    if waits := waiting(orders):
        raise UnreadableLineError(f"ranks wait for each other at `{'`, `'.join(map(str, waits))}`")
    lines.take_exactly("}")
    return replace(program, orders=tuple(orders))


def _read_mesh(lines: Lines) -> Mesh:
    match = lines.take_match(_MESH, "a mesh")
    at_most(len(match[1]), MAX_LABEL, "characters in a name")
    axes: dict[str, int] = {}
    for text in match[2].split(", "):
        axis = _AXIS.fullmatch(text)
        if axis is None or axis[1] in axes:
            raise UnreadableLineError(f"an axis and its size are wanted, once, not {quoted(text)}")
        axes[axis[1]] = integer(axis[2], "the size of an axis", 1, MAX_RANKS)
        at_most(len(axes), MAX_AXES, "axes")
    at_most(math.prod(axes.values()), MAX_RANKS, "ranks")
    return Mesh(match[1], tuple(axes.items()))


def _read_stage(lines: Lines, earlier: Sequence[Stage], meshes: Sequence[Mesh], blocks: Collection[str]) -> Stage:
    """The next stage, on the ranks of an `earlier` one or on the next ones, as many as those of the meshes."""
    match = lines.take_match(_STAGE, "a stage")
    if match[1] != str(len(earlier)):
        raise UnreadableLineError(f"stage {len(earlier)} is wanted")
    size = meshes[0].ranks if meshes else 1
    first, last = (integer(number, "a rank", 0, MAX_RANKS) for number in match.group(2, 3))
    next_rank = max((stage.first_rank + size for stage in earlier), default=0)
    if first % size or first > next_rank or last != first + size - 1:
        raise UnreadableLineError(f"stage {len(earlier)} has {size} ranks, from a multiple of it up to {next_rank} on")
    if match[4] not in blocks:
        raise UnreadableLineError(f"there is no block {quoted(match[4])}")
    return Stage(index=len(earlier), first_rank=first, num_ranks=size, forward=match[4])
