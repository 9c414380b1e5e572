"""Reads the text form of a Program back: `parse_program(print_program(p)) == p`, spans apart."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from lark import Lark, Transformer

from moec.passes.ir import ops  # noqa: F401  (registers every op)
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Placement, Shard
from moec.passes.ir.mesh import Mesh
from moec.passes.ir.op import Op
from moec.passes.ir.program import Block, Program, Stage
from moec.passes.ir.value import Init, Parameter, Value


def parse_program(text: str) -> Program:
    """The Program that `text` prints. Raises `lark.exceptions.UnexpectedInput` on anything else."""
    program: Program = _ToProgram().transform(_parser().parse(text))
    return program


@cache
def _parser() -> Lark:
    grammar = files("moec.passes.ir").joinpath("text.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr")


class _Typed(dict[str, Any]):
    """The fields of a Value, before it has a name."""


class _ToProgram(Transformer[Any, Any]):
    def start(self, children: list[Any]) -> Program:
        name, *rest = children
        return Program(
            name=json.loads(name),
            meshes=tuple(c for c in rest if isinstance(c, Mesh)),
            tokens=next((c for c in rest if isinstance(c, Layout)), REPLICATED),
            blocks=tuple(c for c in rest if isinstance(c, Block)),
            stages=tuple(c for c in rest if isinstance(c, Stage)),
        )

    def mesh(self, children: list[Any]) -> Mesh:
        return Mesh(json.loads(children[0]), tuple(children[1:]))

    def axis(self, children: list[Any]) -> tuple[str, int]:
        return str(children[0]), int(children[1])

    def tokens(self, children: list[Any]) -> Layout:
        (layout,) = children
        assert isinstance(layout, Layout)
        return layout

    def stage(self, children: list[Any]) -> Stage:
        return Stage(index=int(children[0]), blocks=tuple(json.loads(name) for name in children[1:]))

    def block(self, children: list[Any]) -> Block:
        tagged: dict[str, list[Any]] = {}
        for kind, item in children[1:]:
            tagged.setdefault(kind, []).append(item)
        return Block(
            name=json.loads(children[0]),
            experts=tagged["on"][0] if "on" in tagged else None,
            final="final" in tagged,
            inputs=tuple(tagged.get("input", ())),
            parameters=tuple(tagged.get("parameter", ())),
            ops=tuple(tagged.get("op", ())),
            outputs=tagged["return"][0],
        )

    def on(self, children: list[Any]) -> tuple[str, str]:
        return "on", json.loads(children[0])

    def final(self, children: list[Any]) -> tuple[str, bool]:
        return "final", True

    def input(self, children: list[Any]) -> tuple[str, Value]:
        return "input", Value(name=str(children[0])[1:], **children[1])

    def parameter(self, children: list[Any]) -> tuple[str, Parameter]:
        name, typed, init, *rest = children
        sums = next((c for c in rest if isinstance(c, tuple)), None)
        decays = "decays" in rest
        return "parameter", Parameter(name=str(name)[1:], init=init, decays=decays, sum_over=sums, **typed)

    def init(self, children: list[Any]) -> Init:
        return Init(kind=str(children[0]), std=float(children[1]) if len(children) > 1 else 0.0)

    def decays(self, children: list[Any]) -> str:
        return "decays"

    def sums(self, children: list[Any]) -> tuple[str, ...]:
        return tuple(map(str, children))

    def return_(self, children: list[Any]) -> tuple[str, tuple[str, ...]]:
        return "return", tuple(children)

    def op(self, children: list[Any]) -> tuple[str, Op]:
        results = [str(c)[1:] for c in children if getattr(c, "type", "") == "VALUE"]
        mnemonic = next(str(c) for c in children if getattr(c, "type", "") == "NAME")
        typed = [c for c in children if isinstance(c, _Typed)]
        attributes = next((c for c in children if isinstance(c, dict) and not isinstance(c, _Typed)), {})
        values = tuple(Value(name=name, **t) for name, t in zip(results, typed, strict=True))
        operands = tuple(c for c in children if type(c) is str)
        return "op", Op.registry[mnemonic](operands=operands, results=values, **attributes)

    def operand(self, children: list[Any]) -> str:
        name = str(children[0])
        return name if name.startswith("@") else name[1:]

    def attributes(self, children: list[Any]) -> dict[str, Any]:
        return dict(children)

    def attribute(self, children: list[Any]) -> tuple[str, Any]:
        return str(children[0]), children[1]

    def number(self, children: list[Any]) -> int | float:
        text = str(children[0])
        return int(text) if text.lstrip("+-").isdigit() else float(text)

    def name(self, children: list[Any]) -> str | bool:
        return {"true": True, "false": False}.get(children[0], str(children[0]))

    def string(self, children: list[Any]) -> Any:
        return json.loads(children[0])

    def items(self, children: list[Any]) -> tuple[Any, ...]:
        return tuple(children)

    def type(self, children: list[Any]) -> _Typed:
        dtype, *rest = children
        layout = next((c for c in rest if isinstance(c, Layout)), None)
        dims = [c for c in rest if not isinstance(c, Layout)]
        ragged = next((name for kind, name in dims if kind == "rows"), None)
        shape = tuple("rows" if kind == "rows" else dim for kind, dim in dims)
        return _Typed(dtype=str(dtype), shape=shape, layout=layout, ragged=ragged)

    def fixed(self, children: list[Any]) -> tuple[str, int]:
        return "fixed", int(children[0])

    def rows(self, children: list[Any]) -> tuple[str, str]:
        return "rows", str(children[0])[1:]

    def symbol(self, children: list[Any]) -> tuple[str, str]:
        return "symbol", str(children[0])

    def layout(self, children: list[Any]) -> Layout:
        return Layout.of(children)

    def placed(self, children: list[Any]) -> tuple[str, Placement]:
        axis, kind, argument = map(str, children)
        return axis, Shard(int(argument)) if kind == "shard" else Partial(argument)


# `return` is a keyword of Python, and the name of the rule.
setattr(_ToProgram, "return", _ToProgram.return_)
