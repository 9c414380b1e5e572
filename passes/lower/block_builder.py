"""Builds a block op by op: each op's type rule types its results. Also the initial values of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from moec.grammar.source import Span
from moec.passes.ir import VECTOR, Block, Init, Matrices, Op, Output, Parameter, Setting, SourceLine, State, Value
from moec.passes.ir.op import operand_names
from moec.passes.ir.ops import AddBias, Scale

INIT_STD = 0.02
"""Standard deviation of new weights (GPT-2, Radford et al. 2019); projections into the residual stream take
`INIT_STD / sqrt(2 * depth)`, so that its variance does not grow with depth (ibid., section 2.3)."""


Located = Span | SourceLine | None
"""The place in a `.moe` file that a block, an op or a parameter comes from."""


TABLE = Matrices(rows=1)
"""Embeddings, the head, and routers: a row for each id, expert or position."""
PROJECTION = Matrices(rows=1, hidden=True)
"""A projection with one dim of outputs."""


def normal(std: float = INIT_STD) -> Init:
    """Initial values of a weight: normal with standard deviation `std`."""
    return Init(kind="normal", std=std)


def residual_init(depth: int) -> Init:
    """Initial values of a projection into the residual stream of a model with `depth` layers."""
    return normal(INIT_STD / math.sqrt(2 * depth))


_NONE: Mapping[str, str] = MappingProxyType({})


class Builder:
    """Appends ops to a block, naming results and keeping spans."""

    def __init__(self, name: str, inputs: Sequence[Value], span: Located) -> None:
        self.name, self.inputs, self.span = name, tuple(inputs), SourceLine.of(span)
        self.parameters: list[Parameter] = []
        self.settings: list[Setting] = []
        self.states: list[State] = []
        self.ops: list[Op] = []
        self.scope: dict[str, Value] = {v.name: v for v in inputs}
        self.blocks: dict[str, Block] = {}
        self._numbers: dict[str, int] = {}

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        init: Init,
        span: Located,
        shard: Mapping[str, int] | None = None,
        matrices: Matrices = VECTOR,
        decays: bool | None = None,
    ) -> str:
        """Declares a parameter; returns its operand name. `shard` maps a mesh axis to the dim it cuts, `{"tp": 0}`:
        `tp` cuts heads, hidden widths and the vocabulary, as in Megatron-LM (Shoeybi et al. 2019, section 3).

        Norm weights and biases, which start as ones or zeros, get no weight decay, unless `decays` says so.
        """
        parameter = Parameter(
            name=name,
            shape=tuple(shape),
            dtype=dtype,
            init=init,
            decays=init.kind == "normal" if decays is None else decays,
            matrices=matrices,
            shard=tuple((shard or {}).items()),
            span=SourceLine.of(span) or self.span,
        )
        self.parameters.append(parameter)
        self.scope[f"@{name}"] = parameter
        return f"@{name}"

    def input(self, value: Value) -> str:
        """Declares one more input; returns its name."""
        self.inputs = (*self.inputs, value)
        self.scope[value.name] = value
        return value.name

    def producer(self, name: str) -> Op:
        """The op with the result `name`."""
        return next(op for op in self.ops if any(value.name == name for value in op.results))

    def setting(self, setting: Setting) -> str:
        """Declares a setting unless the block has it already; returns its operand name."""
        if setting not in self.settings:
            self.settings.append(setting)
        self.scope[f"${setting.name}"] = setting
        return f"${setting.name}"

    def state(self, name: str, shape: Sequence[int], span: Located) -> str:
        """Declares a state in fp32, initially zeros; returns its operand name."""
        placed = SourceLine.of(span) or self.span
        state = State(name=name, shape=tuple(shape), dtype="fp32", init=Init(kind="zeros"), span=placed)
        self.states.append(state)
        self.scope[f"^{name}"] = state
        return f"^{name}"

    def add(
        self,
        op: type[Op],
        *operands: str,
        to: str,
        span: Located = None,
        optional: Mapping[str, str] = _NONE,
        **attributes: Any,
    ) -> list[str]:
        """Appends an op. `to` lists names for its results; returns these names, made unique.

        `optional` maps the names of optional operands, as the op's class declares them, to operands.
        """
        names = [self._fresh(name) for name in to.split()]
        untyped = tuple(Value(name=name, shape=(), dtype="") for name in names)
        present = tuple(name for name in operand_names(op)[1] if name in optional)
        operands = (*operands, *(optional[name] for name in present))
        line = SourceLine.of(span) or self.span
        added = op(operands=operands, optional=present, results=untyped, span=line, **attributes)
        types = added.infer([self.scope[name] for name in operands], self.blocks)
        results = [
            Value(name=name, shape=t.shape, dtype=t.dtype, ragged=t.ragged)
            for name, t in zip(names, types, strict=True)
        ]
        self.scope.update({v.name: v for v in results})
        self.ops.append(added.with_results(results))
        return names

    def one(
        self,
        op: type[Op],
        *operands: str,
        to: str,
        span: Located = None,
        optional: Mapping[str, str] = _NONE,
        **attributes: Any,
    ) -> str:
        """`add` for an op with one result."""
        (name,) = self.add(op, *operands, to=to, span=span, optional=optional, **attributes)
        return name

    def biased(self, x: str, name: str, span: Located, shard: Mapping[str, int] | None = None) -> str:
        """Adds to x a new parameter `name`, initially zeros; returns the sum's name: the name of x, made unique."""
        value = self.scope[x]
        shape = [dim for dim in value.shape[2:] if isinstance(dim, int)]
        bias = self.parameter(name, shape, value.dtype, Init(kind="zeros"), span, shard)
        return self.one(AddBias, x, bias, to=x.split(".")[0], span=span)

    def scaled(self, x: str, factor: float, span: Located) -> str:
        """`x · factor`; returns its name, that of x made unique, or x itself where the factor is 1."""
        return x if factor == 1 else self.one(Scale, x, to=x.split(".")[0], span=span, factor=factor)

    def _fresh(self, name: str) -> str:
        if name not in self.scope:
            return name
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return f"{name}.{self._numbers[name]}"

    def block(self, outputs: Sequence[Output], final: bool = False) -> Block:
        """The finished block."""
        return Block(
            name=self.name,
            inputs=self.inputs,
            parameters=tuple(self.parameters),
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            settings=tuple(self.settings),
            states=tuple(self.states),
            final=final,
            span=self.span,
        )
