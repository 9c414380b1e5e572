"""lower: `Spec` → `Program` on one imaginary device. This is the reference semantics; it can be run."""

from __future__ import annotations

from collections.abc import Sequence

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Attention, Gqa, Layer, Mha, Model, RmsNorm, Spec, Subject, distinct_layers
from moec.grammar.supported import unsupported
from moec.passes.builder import Builder, normal, residual_init
from moec.passes.feed_forward import feed_forward
from moec.passes.ir import Block, Init, Program, Value
from moec.passes.ir import ops as o
from moec.passes.layers import layer_set_name
from moec.passes.losses import TOKENS, balance_blocks_of_tokens, loss_blocks
from moec.passes.lower_layer import layer_blocks
from moec.passes.mixture import mixture

REAL = "real"
"""Name of the value that marks tokens which are no padding, in models that have a padding id."""


def lower(spec: Spec) -> Program:
    """The unsharded Program of `spec`: a block per distinct layer, `forward` that calls them, and those of the loss.

    It depends on no degree of parallelism: on neither the ranks nor how they are factored.

    A `layer` file has no loss, and `forward` takes and gives `[batch, sequence, dim]` (`lower_layer`).

    Raises `DiagnosticError` for words that no pass compiles yet; no later pass meets one.
    """
    if refused := unsupported(spec):
        raise DiagnosticError(refused)
    blocks = _model_blocks(spec) if spec.has_model else layer_blocks(spec.layer)
    return Program(name=spec.subject.name, blocks=tuple(blocks))


def _model_blocks(spec: Spec) -> list[Block]:
    model = spec.model
    subject, layers = model.subject, distinct_layers(model.layers)
    blocks = [_layer_block(model, subject, layer, numbers) for layer, numbers in layers]
    calls = {number: block for block, (_, numbers) in zip(blocks, layers, strict=True) for number in numbers}
    forward = _forward_block(spec, [calls[number] for number in range(model.depth)])
    balance = balance_blocks_of_tokens(model) if "balance" in forward.outputs else []
    return [*blocks, forward, *loss_blocks(model), *balance]


def context_of(spec: Spec) -> int:
    """The longest sequence that the model takes."""
    context = spec.model.context or (spec.train.sequence if spec.train else None)
    assert context is not None, "the language requires a context or a train.sequence"
    return context


def _norm(b: Builder, model: Model, x: str, name: str, to: str) -> str:
    norm, span = model.norm, model.norm.span()
    operands = [x, b.parameter(f"{name}.weight", (model.dim,), model.dtype, Init(kind="ones"), span)]
    if isinstance(norm, RmsNorm):
        return b.one(o.RmsNorm, *operands, to=to, span=span, eps=norm.eps)
    if norm.bias:
        operands.append(b.parameter(f"{name}.bias", (model.dim,), model.dtype, Init(kind="zeros"), span))
    return b.one(o.LayerNorm, *operands, to=to, span=span, eps=norm.eps)


def _layer_block(model: Model, subject: Subject, layer: Layer, numbers: Sequence[int]) -> Block:
    x = Value(name="x", shape=(*TOKENS, model.dim), dtype=model.dtype)
    real = (REAL,) if layer.moe is not None and model.embedding.padding is not None else ()
    inputs = [x, *(Value(name=name, shape=TOKENS, dtype="int64") for name in real)]
    b = Builder(f"layers{layer_set_name(numbers)}", inputs, layer.span())
    attended = _attention(b, model, layer.attention, _norm(b, model, "x", "attention_norm", "h"))
    residual = b.one(o.Add, "x", attended, to="x")
    h = _norm(b, model, residual, "ffn_norm", "h")
    if layer.moe is None:
        assert layer.ffn is not None
        return b.block([b.one(o.Add, residual, feed_forward(b, subject, layer.ffn, "ffn", h), to="x")])
    mixed, balance, counts = mixture(b, subject, layer.moe, h, real)
    out = b.one(o.Add, residual, mixed, to="x")
    return b.block([out, counts, *balance])


def _attention(b: Builder, model: Model, attention: Attention, h: str) -> str:
    assert isinstance(attention, Gqa | Mha)
    heads = attention.heads
    kv_heads = attention.kv_heads if isinstance(attention, Gqa) else heads
    width = attention.head_dim or model.dim // heads
    span = attention.span()

    def project(name: str, count: int) -> str:
        shape = (count, width, model.dim)
        weight = b.parameter(f"attention.{name}.weight", shape, model.dtype, normal(), span)
        projected = b.one(o.Linear, h, weight, to=name, span=span)
        if attention.bias == "none":
            return projected
        return b.biased(projected, f"attention.{name}.bias", attention.span("bias"))

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    if attention.rope is not None:
        rope = attention.rope
        q = b.one(o.Rope, q, to="q", span=rope.span(), theta=rope.theta)
        k = b.one(o.Rope, k, to="k", span=rope.span(), theta=rope.theta)
    a = b.one(o.Attention, q, k, v, to="attended", span=span)
    out = b.parameter("attention.o.weight", (model.dim, heads, width), model.dtype, residual_init(model.depth), span)
    y = b.one(o.Linear, a, out, to="o", span=span, contract=2)
    return b.biased(y, "attention.o.bias", attention.span("bias")) if attention.bias == "all" else y


def _forward_block(spec: Spec, layers: Sequence[Block]) -> Block:
    model = spec.model
    tokens = Value(name="tokens", shape=TOKENS, dtype="int64")
    b = Builder("forward", [tokens], model.span())
    b.blocks.update({block.name: block for block in layers})
    span = model.embedding.span()
    table = b.parameter("embedding.weight", (model.vocab, model.dim), model.dtype, normal(), span)
    x = b.one(o.Embed, "tokens", table, to="x", span=span)
    if model.embedding.positions == "learned":
        shape = (context_of(spec), model.dim)
        learned = b.parameter("positions.weight", shape, model.dtype, normal(), model.embedding.span("positions"))
        added = b.one(o.EmbedPositions, "tokens", learned, to="positions", span=model.embedding.span("positions"))
        x = b.one(o.Add, x, added, to="x", span=span)
    if any(len(block.inputs) > 1 for block in layers):
        padding = model.embedding.span("padding")
        b.one(o.RealTokens, "tokens", to=REAL, span=padding, padding=model.embedding.padding)
    balances, counts = [], []
    for number, block in enumerate(layers):
        names = " ".join(["x", *(f"counts_{number}" if n == "counts" else f"{n}_{number}" for n in block.outputs[1:])])
        others = [value.name for value in block.inputs[1:]]
        x, *rest = b.add(o.Call, x, *others, to=names, span=block.span, block=block.name, layer=number)
        counts += rest[:1]
        balances += rest[1:]
    h = _norm(b, model, x, "norm", "h")
    head, head_span = table, model.embedding.span("tied")
    if not model.embedding.tied:
        head = b.parameter("head.weight", (model.vocab, model.dim), model.dtype, normal(), model.span())
        head_span = None
    logits = b.one(o.Linear, h, head, to="logits", span=head_span)
    outputs = [logits, *counts]
    if balances:
        outputs.insert(1, b.one(o.Add, *balances, to="balance"))
    return b.block(outputs)
