"""How the tensors of a Hugging Face checkpoint are made of moec's parameters: reshapes, permutations and slices alone.

A rule says of one tensor, by axes with names:

    Rule("model.layers.3.self_attn.q_proj.weight", "(h c) d", (Piece("layers.3.attention.q.weight", "h c d"),))

the tensor's first dim is the heads `h` times their width `c`, and the parameter has these as dims of their own. Several
pieces lie one after another along the axis `along`: of DeepSeek's `kv_b_proj` "(h c) r" a head's rows are first those
of its key, then those of its value. A piece may be a part of its parameter: `at = {"e": 7, "p": 0}` is expert 7's gate.
Read from the tensor to the parameters a rule loads, from the parameters to the tensor it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

ONE = "1"
"""An axis of size 1 that the parameter does not have."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter or state with a letter or word for each of its dims; `at` fixes some dims at an index."""

    parameter: str
    axes: str
    at: Mapping[str, int] = field(default_factory=dict)

    @property
    def free(self) -> tuple[str, ...]:
        """The axes that are not fixed, in the parameter's order."""
        return tuple(axis for axis in self.axes.split() if axis not in self.at)


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor: its `name`, its `form` by axes, and its pieces.

    `optional`: the file may lack it. `written`: whether `save_hf` writes it. A tensor that is optional and not written
    repeats what another has (the head of a model with tied embeddings).
    """

    name: str
    form: str
    pieces: tuple[Piece, ...]
    along: str = ""
    optional: bool = False
    written: bool = True

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The axes in each dim of the tensor."""
        return groups_of(self.form)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the tensor with every dim taken apart."""
        return tuple(axis for group in self.groups for axis in group)

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The size of each axis, from the parameters' shapes; along `along` that of all pieces."""
        sizes = {ONE: 1}
        for piece in self.pieces:
            for axis, size in zip(piece.axes.split(), shapes[piece.parameter], strict=True):
                if axis == self.along and axis not in piece.at:
                    sizes[axis] = sizes.get(axis, 0) + size
                elif axis not in piece.at:
                    sizes[axis] = size
        return sizes

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The tensor's shape."""
        sizes = self.sizes(shapes)
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups)


@cache
def groups_of(form: str) -> tuple[tuple[str, ...], ...]:
    """`(h c) d` as (("h", "c"), ("d",))."""
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in form.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            inside = []
        elif token == ")":
            assert inside is not None
            groups.append(tuple(inside))
            inside = None
        elif inside is not None:
            inside.append(token)
        else:
            groups.append((token,))
    return tuple(groups)


def same(name: str, parameter: str, axes: str = "d", *, optional: bool = False, written: bool = True) -> Rule:
    """A tensor that is one parameter as it is."""
    return Rule(name, axes, (Piece(parameter, axes),), optional=optional, written=written)
