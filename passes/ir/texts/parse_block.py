"""Reads the blocks of a Program's text: their inputs, parameters and ops."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from moec.passes.ir import ops  # noqa: F401  (registers every op)
from moec.passes.ir.attributes import check_attributes, did_you_mean, op_class
from moec.passes.ir.ir_error import UnreadableLineError, at_most, quoted
from moec.passes.ir.limits import (
    LABEL,
    MAX_DIM,
    MAX_EXPANDED_OPS,
    MAX_LABEL,
    MAX_LAYER,
    MAX_OPERANDS,
    MAX_OPS,
    MAX_SETTING,
    MAX_SOURCE_LINE,
)
from moec.passes.ir.op import Op
from moec.passes.ir.ops.control_ops import Call
from moec.passes.ir.program import Block, Output, Recompute
from moec.passes.ir.roles import ROLES, Role
from moec.passes.ir.source_line import SourceLine
from moec.passes.ir.texts.lines import Lines
from moec.passes.ir.texts.parse_attributes import STRING, finite, read_attributes, short_string
from moec.passes.ir.texts.parse_scope import Scope
from moec.passes.ir.texts.parse_type import LAYOUT, TYPE, TypeReader, integer
from moec.passes.ir.value import Init, Matrices, Parameter, Setting, State, Table, Value

RECOMPUTED: Mapping[str, Recompute] = {"experts": "experts", "layer": "layer"}

_AT = rf"(?: at (?:({STRING}) )?+([0-9]++))?+"
_BLOCK = re.compile(
    rf'  block "({LABEL})"(?: on "({LABEL})")?(?: updated by "({LABEL})")?( final)?'
    rf"(?: recompute ({'|'.join(RECOMPUTED)}))? \((.*)\){_AT} \{{"
)
_INPUT = re.compile(rf"%([a-z0-9_.]++): ({TYPE}) as ([a-z_]++)(?:, (?=%)|\Z)")
_PARAMETER = re.compile(
    rf"    parameter @([a-z0-9_.]++): ({TYPE}) = (ones|zeros|normal\(([0-9.e+-]++)\))( decays)?( frozen)?"
    r"(?: shard\(([a-z_]++ = [0-9](?:, [a-z_]++ = [0-9])*+)\))?"
    r"(?: sum_over\(([a-z_, ]*+)\))?(?: guests\(([0-9]++)\))?"
    rf"(?: weight\(({LAYOUT})\))?(?: gradient\(({LAYOUT})\))?(?: optimizer\(({LAYOUT})\))?"
    rf"(?: matrices\(([0-9]), ([0-9])\)( hidden)?+)?+{_AT}"
)
_CUT = re.compile(r"([a-z_]++) = ([0-9])")
_SETTING = re.compile(rf"    setting \$([a-z]++): ({TYPE}) = ([0-9]++) in ([0-9]++)\.\.([0-9]++)")
_STATE = re.compile(rf"    state \^([a-z0-9_.]++): ({TYPE}) = (ones|zeros){_AT}")
_TABLE = re.compile(rf"    table %([a-z0-9_.]++): ({TYPE})")
_OP = re.compile(r"    (%[a-z0-9_.%, ]++)= ([a-z0-9_]++) ([%@$^][a-z0-9_.%@$^, =]*)(?= [{:])")
_RESULT_TYPE = re.compile(rf"({TYPE})(, )?+")
_END_OF_OP = re.compile(_AT)
_RETURN = re.compile(r"    return (.++)")
_OUTPUT = re.compile(r"([%@^][a-z0-9_.]++) as ([a-z_]++)(?:\((?:([0-9]++)|\^([a-z0-9_.]++))\))?+(?:, (?=[%@^])|\Z)")
_ROLES: Mapping[str, Role] = {role: role for role in ROLES}


class BlockReader:
    """Reads one block at a time. `expanded` maps a block to the number of ops that it runs, called blocks included.

    Raises `UnreadableLineError`.
    """

    def __init__(self, lines: Lines, types: TypeReader, meshes: Collection[str], main: str | None) -> None:
        self.lines, self.types, self.meshes, self.main = lines, types, meshes, main
        self.expanded: dict[str, int] = {}

    def block(self) -> Block:
        head = self.lines.take_match(_BLOCK, "a block")
        name, mesh, update, final, recompute, inputs_text, *at = head.groups()
        at_most(max(len(name), len(update or "")), MAX_LABEL, "characters in a name")
        if name in self.expanded:
            raise UnreadableLineError(f"the block {quoted(name)} stands twice")
        if mesh is not None and mesh not in self.meshes:
            raise UnreadableLineError(f"there is no mesh {quoted(mesh)}")
        span = self.span(*at)
        scope = Scope()
        inputs = self.inputs(inputs_text, scope)
        settings: list[Setting] = []
        while self.lines.next_starts_with("    setting "):
            settings.append(self.setting(scope))
            at_most(len(settings), MAX_OPERANDS, "settings")
        states: list[State] = []
        while self.lines.next_starts_with("    state "):
            states.append(self.state(scope))
            at_most(len(states), MAX_OPERANDS, "states")
        tables: list[Table] = []
        while self.lines.next_starts_with("    table "):
            tables.append(self.table(scope))
            at_most(len(tables), MAX_OPERANDS, "tables")
        parameters: list[Parameter] = []
        while self.lines.next_starts_with("    parameter "):
            parameters.append(self.parameter(scope))
            at_most(len(parameters), MAX_OPERANDS, "parameters")
        ops_read: list[Op] = []
        expanded = 0
        while not self.lines.next_starts_with("    return "):
            ops_read.append(op := self.op(scope))
            expanded += 1 + (self.callee(op) if isinstance(op, Call) else 0)
            at_most(len(ops_read), MAX_OPS, "ops in a block")
            at_most(expanded, MAX_EXPANDED_OPS, "ops, counted as often as they run,")
        outputs = self.outputs(self.lines.take_match(_RETURN, "what the block returns")[1], scope)
        self.lines.take_exactly("  }")
        self.expanded[name] = expanded
        return Block(
            name=name,
            inputs=inputs,
            parameters=tuple(parameters),
            ops=tuple(ops_read),
            outputs=outputs,
            settings=tuple(settings),
            states=tuple(states),
            tables=tuple(tables),
            experts=mesh,
            update=update,
            final=final is not None,
            recompute=RECOMPUTED.get(recompute, "none"),
            span=span,
        )

    def callee(self, call: Call) -> int:
        """Number of ops that `call` runs."""
        if call.block not in self.expanded:
            raise UnreadableLineError(f"there is no block {quoted(call.block)} before this one")
        return self.expanded[call.block]

    def inputs(self, text: str, scope: Scope) -> tuple[Value, ...]:
        inputs: list[Value] = []
        at = 0
        while at < len(text):
            match = _INPUT.match(text, at)
            if match is None:
                raise UnreadableLineError(f"an input and its type and role are wanted, not {quoted(text[at:])}")
            inputs.append(replace(self.value(match[1], match[2], scope), role=_role(match[3])))
            at_most(len(inputs), MAX_OPERANDS, "inputs")
            at = match.end()
        scope.require_counted(inputs)
        return tuple(inputs)

    def outputs(self, text: str, scope: Scope) -> tuple[Output, ...]:
        outputs: list[Output] = []
        at = 0
        while at < len(text):
            match = _OUTPUT.match(text, at)
            if match is None:
                raise UnreadableLineError(f"an output and its role are wanted, not {quoted(text[at:])}")
            (name,), layer = scope.used(match[1]), match[3]
            number = None if layer is None else integer(layer, "the number of a layer", 0, MAX_LAYER)
            if match[4] is not None:
                scope.used(f"^{match[4]}")
            outputs.append(Output(name, _role(match[2]), number, match[4]))
            at_most(len(outputs), MAX_OPERANDS, "outputs")
            at = match.end()
        return tuple(outputs)

    def value(self, name: str, type_: str, scope: Scope) -> Value:
        scope.define(name)
        typed = self.types.read(type_)
        return Value(name=name, shape=typed.shape, dtype=typed.dtype, layout=typed.layout, ragged=typed.ragged)

    def setting(self, scope: Scope) -> Setting:
        name, type_, *bounds = self.lines.take_match(_SETTING, "a setting").groups()
        scope.define(name, "$")
        typed = self.types.read(type_)
        default, low, high = (integer(text, "a setting", 0, MAX_SETTING) for text in bounds)
        if typed.shape or typed.dtype != "int64" or not low <= default <= high:
            raise UnreadableLineError(f"${name} is not a whole number that starts within its bounds")
        return Setting(name=name, shape=(), dtype="int64", layout=typed.layout, default=default, low=low, high=high)

    def state(self, scope: Scope) -> State:
        name, type_, init, *at = self.lines.take_match(_STATE, "a state").groups()
        scope.define(name, "^")
        typed = self.types.read(type_)
        if any(isinstance(dim, str) for dim in typed.shape):
            raise UnreadableLineError(f"^{name} has a dim that is no number")
        return State(
            name=name,
            shape=typed.shape,
            dtype=typed.dtype,
            layout=typed.layout,
            init=Init(kind=init),
            span=self.span(*at),
        )

    def table(self, scope: Scope) -> Table:
        name, type_ = self.lines.take_match(_TABLE, "a table").groups()
        scope.define(name)
        typed = self.types.read(type_)
        if any(isinstance(dim, str) for dim in typed.shape) or typed.dtype != "int64":
            raise UnreadableLineError(f"%{name} is no table of whole numbers")
        return Table(name=name, shape=typed.shape, dtype=typed.dtype, layout=typed.layout)

    def parameter(self, scope: Scope) -> Parameter:
        fields = self.lines.take_match(_PARAMETER, "a parameter").groups()
        name, type_, init, std, decays, frozen, cuts, sums, guests, *layouts, stack, rows, hidden, file, line = fields
        scope.define(name, "@")
        typed = self.types.read(type_)
        if any(isinstance(dim, str) for dim in typed.shape):
            raise UnreadableLineError(f"@{name} has a dim that is no number")
        weight, gradient, state = (self.types.layout(text) if text else None for text in layouts)
        axes = None if sums is None else tuple(sums.split(", ") if sums else ())
        return Parameter(
            name=name,
            shape=typed.shape,
            dtype=typed.dtype,
            layout=typed.layout,
            init=Init(kind="normal", std=_std(std)) if std else Init(kind=init),
            decays=decays is not None,
            frozen=frozen is not None,
            matrices=Matrices(int(stack or 0), int(rows or 0), hidden is not None),
            shard=tuple((axis, int(dim)) for axis, dim in _CUT.findall(cuts or "")),
            sum_over=axes,
            guests=0 if guests is None else integer(guests, "the guests of a parameter", 1, MAX_DIM),
            weight=weight or typed.layout,
            gradient=gradient or weight or typed.layout,
            optimizer_state=state or gradient or weight or typed.layout,
            span=self.span(file, line),
        )

    def op(self, scope: Scope) -> Op:
        line = self.lines.take()
        match = _OP.match(line)
        if match is None:
            raise UnreadableLineError(f"an op is wanted, not {quoted(line)}")
        class_ = op_class(match[2])
        operands, optional = _operands(match[3])
        stated, at = read_attributes(line, match.end() + 1) if line[match.end() + 1] == "{" else ({}, match.end())
        attributes = check_attributes(class_, stated)
        results: list[Value] = []
        if not line.startswith(" : ", at):
            raise UnreadableLineError(f"the types of the results are wanted, not {quoted(line[at:])}")
        at += 3
        for name in match[1][:-1].split(", "):
            if (type_ := _RESULT_TYPE.match(line, at)) is None or not name.startswith("%"):
                raise UnreadableLineError(f"a type for each result is wanted, not {quoted(line[at:])}")
            results.append(self.value(name[1:], type_[1], scope))
            at_most(len(results), MAX_OPERANDS, "results")
            at = type_.end()
        end = _END_OF_OP.fullmatch(line, at)
        if end is None:
            raise UnreadableLineError(f"the end of the op is wanted, not {quoted(line[at:])}")
        scope.require_counted(results)
        return class_(
            operands=scope.used(operands),
            optional=optional,
            results=tuple(results),
            span=self.span(*end.groups()),
            **attributes,
        )

    def span(self, file: str | None, line: str | None) -> SourceLine | None:
        if line is None:
            return None
        source = self.main if file is None else short_string(file)
        if source is None:
            raise UnreadableLineError("the head of the Program names no source")
        return SourceLine(source, integer(line, "a line of the source", 1, MAX_SOURCE_LINE))


def _operands(text: str) -> tuple[str, tuple[str, ...]]:
    """The operands as one text without names, and the names of the optional operands, which come last."""
    if " = " not in text:
        return text, ()
    required, optional, names = list[str](), list[str](), list[str]()
    for part in text.split(", "):
        name, equals, operand = part.partition(" = ")
        if not equals and optional:
            raise UnreadableLineError(f"{quoted(part)} stands after an operand with a name")
        if equals:
            optional.append(operand)
            names.append(name)
        else:
            required.append(part)
    return ", ".join([*required, *optional]), tuple(names)


def _role(text: str) -> Role:
    if text not in _ROLES:
        raise UnreadableLineError(f"there is no role {quoted(text)}{did_you_mean(text, _ROLES)}")
    return _ROLES[text]


def _std(text: str) -> float:
    std = finite(text)
    if std < 0:
        raise UnreadableLineError("a standard deviation is negative")
    return std
