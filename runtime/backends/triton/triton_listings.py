"""Reads a compiler's listings: loops of Triton's intermediate code (TTGIR), and instructions of PTX and SASS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from moec.codegen.kernels.resources import Loop

_PRODUCT = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) (.*)")
_RESULT = re.compile(r"^\s*(%[\w-]+)(?::\d+)? = (\S+)")
_WAIT = re.compile(r"(async_wait|dot_wait) .*\{(?:num|pendings) = (\d+)")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_CARRIED = re.compile(r"(%[\w-]+) = (%[\w-]+(?:#\d+)?)")
_SHAPE = re.compile(r"(?:memdesc|tensor)<([0-9]+(?:x[0-9]+)*)x")


@dataclass(slots=True)
class _Body:
    """A loop with a product in it: the product's operands, and the waits of each step beside the product.

    Waits in branches inside of the loop are left out: a persistent loop has its epilogue in one.
    """

    indent: int
    operands: list[str]
    waits: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class _Function:
    """The lines that define values, by value, and the loops with a product, in order."""

    defined: Mapping[str, str]
    bodies: tuple[_Body, ...]

    @classmethod
    def of(cls, ttgir: str) -> _Function:
        defined: dict[str, str] = {}
        bodies: dict[int, _Body] = {}
        waits: list[tuple[int, int, str, int]] = []  # loop, indent, kind and number
        loops: list[tuple[int, int]] = []  # the open loops' lines and indents
        for number, line in enumerate(ttgir.splitlines()):
            indent = len(line) - len(line.lstrip())
            while loops and indent <= loops[-1][1] and line.strip():
                loops.pop()
            result = _RESULT.match(line)
            if result:
                defined[result[1]] = line
            if "scf.for" in line:
                loops.append((number, indent))
                defined.update({name: f"{name} = carried {first}" for name, first in _CARRIED.findall(line)})
            elif loops:
                waits += [(loops[-1][0], indent, kind, int(least)) for kind, least in _WAIT.findall(line)]
                for product in _PRODUCT.findall(line):
                    body = bodies.setdefault(loops[-1][0], _Body(indent, [], {}))
                    body.operands.extend(_VALUE.findall(product)[:2])
        for loop, indent, kind, least in waits:
            if loop in bodies and bodies[loop].indent == indent:
                bodies[loop].waits.setdefault(kind, []).append(least)
        return cls(defined, tuple(bodies.values()))

    def buffers(self, value: str) -> int:
        """The number of steps in an operand's shared memory: its elements divided by the operand's."""
        visited: set[str] = set()
        size: int | None = None
        while value not in visited:
            visited.add(value)
            line = self.defined.get(value.partition("#")[0], "")
            operation = line.partition(" = ")[2]
            if operation.startswith("ttg.local_alloc"):
                allocated = _elements(operation)
                return 1 if size is None or allocated is None else allocated // size
            if operation.startswith("ttg.memdesc_index"):
                size = _elements(operation.partition(" -> ")[2])
            values = _VALUE.findall(operation)
            if not values:
                return 1
            value = values[0]
        return 1


def _elements(types: str) -> int | None:
    shape = _SHAPE.search(types)
    return prod(map(int, shape[1].split("x"))) if shape else None


_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync\S*?\.(m\d+n\d+k\d+)")
_COPIES = re.compile(r"cp\.async\.wait_group\s+(\d+)")
_PRODUCTS = re.compile(r"wgmma\.wait_group\S*\s+(\d+)")


def loops_of(ttgir: str, ptx: str) -> tuple[Loop, ...]:
    """The loops with a product in them, in order: buffers from TTGIR, instructions and waits from PTX.

    Buffers are those of the operand that has fewest; one in registers, or in memory that one step fills, has one.
    If LLVM removed or copied a loop, each loop gets the instructions and waits of all loops.
    """
    function, texts = _Function.of(ttgir), list(_innermost(ptx.splitlines()))
    if len(texts) != len(function.bodies):
        texts = ["\n".join(texts)] * len(function.bodies)
    return tuple(_loop(function, body, text) for body, text in zip(function.bodies, texts, strict=True))


def _loop(function: _Function, body: _Body, text: str) -> Loop:
    return Loop(
        buffers=min(map(function.buffers, body.operands)),
        copies_pending=_least(_COPIES.findall(text), body.waits.get("async_wait", [])),
        products_pending=_least(_PRODUCTS.findall(text), body.waits.get("dot_wait", [])),
        instructions=tuple(dict.fromkeys(_MATRIX.findall(text))),
    )


def _least(waits: list[str], waits_of_steps: list[int]) -> int | None:
    """The smallest wait of those that each step makes; PTX does not show which are in a branch."""
    numbers = list(map(int, waits))
    return min((number for number in numbers if number in waits_of_steps), default=min(numbers, default=None))


def bulk_copies(ptx: str) -> int:
    """The instructions that copy a tile of a tensor to shared memory (TMA)."""
    return len(re.findall(r"cp\.async\.bulk\.tensor\S*shared\S*global", ptx))


def serialized(sass: str, ptx: str) -> bool:
    """Whether the assembler made each wgmma wait for the previous one, as it does if sums are read too early.

    The only sign in SASS are waits for all products that PTX does not have.
    """
    waits = len(re.findall(r"WARPGROUP\.DEPBAR\.LE\s+gsb0,\s*0x0\b", sass))
    return waits > len(re.findall(r"wgmma\.wait_group\S*\s+0\b", ptx))


def _innermost(lines: list[str]) -> Iterator[str]:
    """The innermost loops around matrix instructions: from a label to the last branch back to it."""
    labels = {label[1]: number for number, line in enumerate(lines) if (label := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        for target in _BRANCH.findall(line):
            if labels[target] <= number:
                ends[labels[target]] = number
    loops: dict[tuple[int, int], None] = {}
    for number, line in enumerate(lines):
        if _MATRIX.search(line):
            enclosing = [(end - start, start) for start, end in ends.items() if start <= number <= end]
            if enclosing:
                loops.setdefault(min(enclosing))
    for length, start in loops:
        yield "\n".join(lines[start : start + length + 1])
