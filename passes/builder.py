"""Builds a block op by op, every result typed by its op's own rule; and how new weights start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moec.grammar.source import Span
from moec.passes.ir import Block, Init, Op, Parameter, Setting, SourceLine, Value
from moec.passes.ir.ops import AddBias

INIT_STD = 0.02
"""Standard deviation of new weights (GPT-2, Radford et al. 2019); projections into the residual stream take
`INIT_STD / sqrt(2 * depth)`, so that its variance does not grow with depth (ibid., section 2.3)."""


Located = Span | SourceLine | None
"""Where what a block holds stands in a `.moe` file."""


def normal(std: float = INIT_STD) -> Init:
    """The start of a new weight."""
    return Init(kind="normal", std=std)


def residual_init(depth: int) -> Init:
    """The start of a projection into the residual stream of a model of `depth` layers."""
    return normal(INIT_STD / math.sqrt(2 * depth))


class Builder:
    """Appends ops to a block, naming results and keeping spans."""

    def __init__(self, name: str, inputs: Sequence[Value], span: Located) -> None:
        self.name, self.inputs, self.span = name, tuple(inputs), SourceLine.of(span)
        self.parameters: list[Parameter] = []
        self.settings: list[Setting] = []
        self.ops: list[Op] = []
        self.scope: dict[str, Value] = {v.name: v for v in inputs}
        self.blocks: dict[str, Block] = {}
        self._numbers: dict[str, int] = {}

    def parameter(self, name: str, shape: Sequence[int], dtype: str, init: Init, span: Located) -> str:
        """Declares a parameter; gives its operand name. Vectors (norm weights) and biases do not decay."""
        decays = len(shape) > 1 and not name.endswith(".bias")
        parameter = Parameter(
            name=name, shape=tuple(shape), dtype=dtype, init=init, decays=decays, span=SourceLine.of(span) or self.span
        )
        self.parameters.append(parameter)
        self.scope[f"@{name}"] = parameter
        return f"@{name}"

    def setting(self, setting: Setting) -> str:
        """Declares a setting, once however often it is asked for; gives its operand name."""
        if setting not in self.settings:
            self.settings.append(setting)
        self.scope[f"${setting.name}"] = setting
        return f"${setting.name}"

    def add(self, op: type[Op], *operands: str, to: str, span: Located = None, **attributes: Any) -> list[str]:
        """Appends an op; `to` are the names of its results, made unique; gives those names."""
        names = [self._fresh(name) for name in to.split()]
        unnamed = tuple(Value(name=name, shape=(), dtype="") for name in names)
        made = op(operands=operands, results=unnamed, span=SourceLine.of(span) or self.span, **attributes)
        types = made.infer([self.scope[name] for name in operands], self.blocks)
        results = [
            Value(name=name, shape=t.shape, dtype=t.dtype, ragged=t.ragged)
            for name, t in zip(names, types, strict=True)
        ]
        self.scope.update({v.name: v for v in results})
        self.ops.append(made.with_results(results))
        return names

    def one(self, op: type[Op], *operands: str, to: str, span: Located = None, **attributes: Any) -> str:
        """`add` for an op with one result."""
        (name,) = self.add(op, *operands, to=to, span=span, **attributes)
        return name

    def biased(self, x: str, name: str, span: Located) -> str:
        """x plus a new parameter `name`, which starts as zeros; gives the sum's name, which is x's made unique."""
        value = self.scope[x]
        shape = [dim for dim in value.shape[2:] if isinstance(dim, int)]
        bias = self.parameter(name, shape, value.dtype, Init(kind="zeros"), span)
        return self.one(AddBias, x, bias, to=x.split(".")[0], span=span)

    def _fresh(self, name: str) -> str:
        if name not in self.scope:
            return name
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return f"{name}.{self._numbers[name]}"

    def block(self, outputs: Sequence[str], final: bool = False) -> Block:
        """The finished block."""
        return Block(
            name=self.name,
            inputs=self.inputs,
            parameters=tuple(self.parameters),
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            settings=tuple(self.settings),
            final=final,
            span=self.span,
        )
