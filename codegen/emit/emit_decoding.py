"""Emits a model for generation: graphs that take new tokens, and keys and values of the tokens before them.

A graph has the ops of evaluation from which logits are computed. Three differ. Attention writes to its cache and reads
it (`cached_attention`); rotary positions take tables of cosines and sines, which all layers share; and where the head
has whole sequences, it computes the logits of one token of each. A text's number is the place where it begins.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from moec.codegen.emit.decodable import live_ops
from moec.codegen.emit.decoding import CachedHeads, Decoding, DecodingForward, DecodingLayer, Rotation
from moec.codegen.emit.emit_attention import pad_heads
from moec.codegen.emit.emitter import INFO, Emissions, Emitter, NodeInfo, info_of, target_name
from moec.codegen.emit.functions import EMISSIONS, NOTING
from moec.passes.ir import Block, Op, Program, Shard
from moec.passes.ir import ops as o
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.op import operand_names
from moec.passes.ir.operator_schema import given_attributes

aten = torch.ops.aten
moec = torch.ops.moec


def emit_decoding(program: Program, *, groups: str = "", float64: bool = False) -> Decoding:
    """The graphs of a model for which `refusal` returns None. Options are those of `emit_function`."""
    calls = tuple(layer.body for layer in program.layers)
    layers = {name: _layer(program, program.block(name), groups, float64) for name in dict.fromkeys(calls)}
    forward = program.block(FORWARD)
    separators = [op.separator for op in forward.ops if isinstance(op, o.Segments)]
    return Decoding(_forward(program, forward, groups, float64), layers, calls, next(iter(separators), None))


class _LayerEmitter(Emitter):
    """A layer's graph. Its tables and caches are inputs after those of the block."""

    def __init__(self, program: Program, block: Block, groups: str, float64: bool) -> None:
        super().__init__(program, block, groups, float64)
        live = live_ops(block)
        self.places, self.begin, self.end = (self._placeholder(n, NodeInfo(n)) for n in ("places", "begin", "end"))
        self.rotations = tuple(dict.fromkeys(self.rotation(op) for op in live if isinstance(op, o.Rope)))
        names = ((f"cos_{index}", f"sin_{index}") for index in range(len(self.rotations)))
        self.tables = [tuple(self._placeholder(n, NodeInfo(n)) for n in pair) for pair in names]
        self.cached = tuple(self._cached(op) for op in live if isinstance(op, o.Attention))
        names = ((f"keys_{index}", f"values_{index}") for index in range(len(self.cached)))
        self.caches = iter([tuple(self._placeholder(n, NodeInfo(n)) for n in pair) for pair in names])

    def rotation(self, op: o.Rope) -> Rotation:
        """The tables that an op reads."""
        head = self.value(op.operands[0]).shape[3]
        assert isinstance(head, int)
        width, in_text = op.width or head - op.start, len(op.operands) > 1
        halves = width == head and not op.interleaved
        return Rotation(op.theta, width, op.frequencies, op.factor, in_text, halves)

    def _cached(self, op: o.Attention) -> CachedHeads:
        heads = self.shape(op.operands[1])[2]
        assert isinstance(heads, int)
        return CachedHeads(heads, max(_widths(self, op)))


def _widths(e: Emitter, op: o.Attention) -> tuple[int, int]:
    """The widths of heads of keys and of values."""
    key_width, value_width = (e.value(op.operands[index]).shape[3] for index in (1, 2))
    assert isinstance(key_width, int)
    assert isinstance(value_width, int)
    return key_width, value_width


def _layer(program: Program, block: Block, groups: str, float64: bool) -> DecodingLayer:
    e = _LayerEmitter(program, block, groups, float64)
    graph = _emit(e, LAYER_EMISSIONS)
    module = fx.GraphModule(nn.Module(), graph, class_name="DecodingBlock")
    routers = (info_of(node).op for node in graph.nodes if target_name(node) in NOTING)
    return DecodingLayer(
        module,
        tuple(setting.name for setting in block.settings),
        block.states,
        block.tables,
        e.rotations,
        e.cached,
        tuple(op for op in routers if op is not None),
    )


class _ForwardEmitter(Emitter):
    """The graph that calls the layers."""

    def __init__(self, program: Program, block: Block, groups: str, float64: bool) -> None:
        super().__init__(program, block, groups, float64)
        names = ("places", "starts", "last", "rows", "weight", "run")
        self.places, self.starts, self.last, self.rows, self._weight, self._run = (
            self._placeholder(name, NodeInfo(name)) for name in names
        )
        self._numbers = {f"@{parameter.name}": index for index, parameter in enumerate(block.parameters)}
        for name in self._numbers:
            self.graph.erase_node(self._nodes.pop(name))

    def ref(self, operand: str) -> fx.Node:
        if operand in self._numbers and operand not in self._nodes:
            number = self._numbers[operand]
            self._nodes[operand] = self.graph.call_function(operator.call, (self._weight, number))
        return super().ref(operand)

    def refs(self, op: Op) -> list[fx.Node]:
        return [self.ref(name) for name in op.operands]

    def run_layer(self, op: o.Call) -> None:
        """The node that runs a layer."""
        self.set_first_result(op, self.call(op, operator.call, self._run, op.layer, *self.refs(op)))

    def inputs(self) -> tuple[str, ...]:
        """The inputs that the graph uses, as roles, settings and names. Removes the other inputs."""
        for node in [node for node in self.graph.nodes if node.op == "placeholder" and not node.users]:
            self.graph.erase_node(node)
        infos = [info_of(node) for node in self.graph.nodes if node.op == "placeholder"]
        return tuple(str(getattr(info.value, "role", None) or info.key) for info in infos)


def _forward(program: Program, block: Block, groups: str, float64: bool) -> DecodingForward:
    e = _ForwardEmitter(program, block, groups, float64)
    logits = block.outputs[0].name
    head = next(op for op in reversed(block.ops) if any(value.name == logits for value in op.results))
    layout = e.value(head.operands[0]).layout
    selects = isinstance(head, o.Linear) and (layout is None or Shard(1) not in dict(layout.placements).values())

    def linear(e: Emitter, op: Op) -> None:
        assert isinstance(e, _ForwardEmitter)
        if op is not head or not selects:
            EMISSIONS[o.Linear](e, op)
            return
        x, weight = e.refs(op)
        e.result(op, aten.linear.default, e.call(op, aten.index.Tensor, x, [e.rows, e.last]), weight)

    graph = _emit(e, {**FORWARD_EMISSIONS, o.Linear: linear})
    inputs, parameters = e.inputs(), tuple(parameter.name for parameter in block.parameters)
    return DecodingForward(
        fx.GraphModule(nn.Module(), graph, class_name="DecodingForward"), inputs, parameters, selects
    )


def _emit(e: Emitter, overrides: Emissions) -> fx.Graph:
    """The graph of the ops from which the block's first output is computed; `overrides` replaces emission functions."""
    for op in live_ops(e.block):
        overrides.get(type(op), EMISSIONS[type(op)])(e, op)
    output = e.graph.output(e.ref(e.block.outputs[0].name))
    output.meta[INFO] = NodeInfo("output")
    e.graph.eliminate_dead_code()
    return e.graph


def _attention(e: Emitter, op: Op) -> None:
    """Queries, keys and values get one width, narrow heads with zeros, as in training (`emit_attention.py`)."""
    assert isinstance(op, o.Attention)
    assert isinstance(e, _LayerEmitter)
    operands, (key_width, value_width) = op.named(e.refs(op)), _widths(e, op)
    widest = max(key_width, value_width)
    q, k, v = (
        pad_heads(e, op, operands[name], widest - width)
        for name, width in (("q", key_width), ("k", key_width), ("v", value_width))
    )
    keys, values = next(e.caches)
    optional = operands.get("segments"), operands.get("sinks"), e.begin, e.end, op.window, op.scale or key_width**-0.5
    attended = (op, moec.cached_attention.default, q, k, v, keys, values, e.places, *optional)
    if value_width == widest:
        e.result(*attended)
    else:
        e.result(op, aten.narrow.default, e.call(*attended), -1, 0, value_width)


def _rope(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.Rope)
    assert isinstance(e, _LayerEmitter)
    cos, sin = e.tables[e.rotations.index(e.rotation(op))]
    e.result(op, moec.turn.default, e.ref(op.operands[0]), cos, sin, op.start, op.interleaved)


def _mixture(e: Emitter, op: Op) -> None:
    assert isinstance(op, o.MixtureMlp)
    named = op.named(e.refs(op))
    required, optional = operand_names(o.MixtureMlp)
    operands = *(named[name] for name in required), *(named.get(name) for name in optional)
    mixed = e.call(
        op, moec.mixture_of_few.default, *operands, *(getattr(op, n) for n in given_attributes(o.MixtureMlp))
    )
    e.set_first_result(op, mixed)


LAYER_EMISSIONS: Emissions = {
    o.Attention: _attention,
    o.MixtureMlp: _mixture,
    o.Rope: _rope,
}


def _embed_positions(e: Emitter, op: Op) -> None:
    """Places of padding may be beyond the table."""
    assert isinstance(e, _ForwardEmitter)
    _, table, *positions = e.refs(op)
    rows = e.shape(op.operands[1])[0]
    assert isinstance(rows, int)
    places = e.call(op, aten.clamp.default, positions[0] if positions else e.places, 0, rows - 1)
    e.result(op, moec.embed.default, places, table)


def _texts(e: Emitter, op: Op) -> None:
    """Segments are numbered by the places where they begin; positions count from there."""
    assert isinstance(e, _ForwardEmitter)
    e.set_results(op, e.call(op, aten.alias.default, e.starts), e.call(op, aten.sub.Tensor, e.places, e.starts))


def _call(e: Emitter, op: Op) -> None:
    assert isinstance(e, _ForwardEmitter)
    assert isinstance(op, o.Call)
    e.run_layer(op)


FORWARD_EMISSIONS: Emissions = {
    o.Call: _call,
    o.EmbedPositions: _embed_positions,
    o.NumberSegments: _texts,
    o.Segments: _texts,
}
