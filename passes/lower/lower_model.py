"""lower: `Spec` → `Program` on one imaginary device: the reference semantics, which can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.grammar.checking.supported import require_supported
from moec.grammar.device_groups import with_device_groups
from moec.grammar.spec import Conv, Layer, Moa, Model, Patches, Spec, Subject, distinct_layers
from moec.passes.ir import SEED, STEP, Block, Output, Program, Role, Value
from moec.passes.ir import ops as o
from moec.passes.layer_names import layer_set_name
from moec.passes.lower.block_builder import TABLE, Builder, normal
from moec.passes.lower.gates.placed_topology import with_places
from moec.passes.lower.layer_calls import call_layer, called_layers, forward_outputs, with_one_balance
from moec.passes.lower.lower_attention import attend
from moec.passes.lower.lower_feed_forward import feed_forward
from moec.passes.lower.lower_frozen import freeze
from moec.passes.lower.lower_head_mixture import attend_by_groups
from moec.passes.lower.lower_images import class_logits, patch_numbers, patch_vectors
from moec.passes.lower.lower_layer import layer_blocks
from moec.passes.lower.lower_losses import TOKENS, balance_blocks_of_tokens, input_of, loss_blocks, token_input
from moec.passes.lower.lower_mixture import mixture
from moec.passes.lower.lower_norms import added, before, norm
from moec.passes.lower.lower_pooled import Pooled
from moec.passes.lower.lower_replay import choices_of_layers, routes_input
from moec.passes.lower.lower_states import with_update

if TYPE_CHECKING:
    from moec.passes.degrees.degrees import Degrees


def lower(spec: Spec, degrees: Degrees | None = None) -> Program:
    """The unsharded Program of `spec`: a block per distinct layer, `forward`, which calls them, and the blocks of the
    loss, of the balance terms and of the updates of states.

    It depends neither on the number of ranks nor on any degree of parallelism, but for a `device_loss` that leaves its
    groups to the stated `ep`, and for the gate `topology`, whose formula has the number of ranks that share
    a sequence and the `ep` and `etp` of its layer: those of `degrees`, or 1.

    A `layer` file has no loss, and `forward` takes and gives `[batch, sequence, dim]` (`lower_layer`).

    Raises `DiagnosticError` for words that no pass compiles yet, so later passes never see them.
    """
    require_supported(spec)
    spec = with_places(with_device_groups(spec), degrees)
    blocks = _model_blocks(spec) if spec.has_model else layer_blocks(spec.layer, spec.subject)
    blocks = freeze(blocks, spec.train.frozen if spec.train else ())
    return Program(name=spec.subject.name, blocks=tuple(blocks), layers=called_layers(blocks))


def _model_blocks(spec: Spec) -> list[Block]:
    model = spec.model
    subject, layers = spec.subject, distinct_layers(model.layers)
    lowered = [
        with_update(_layer_block(spec, subject, layer, numbers), layer.moe.gate if layer.moe else None, numbers)
        for layer, numbers in layers
    ]
    blocks = [block for block, *_ in lowered]
    updates = [update for _, *updates_of_layer in lowered for update in updates_of_layer]
    calls = {number: block for block, (_, numbers) in zip(blocks, layers, strict=True) for number in numbers}
    forward = _forward_block(spec, [calls[number] for number in range(model.depth)])
    balance = balance_blocks_of_tokens(model) if forward.output("balance") is not None else []
    return [*blocks, forward, *loss_blocks(model), *balance, *updates]


def context_of(spec: Spec) -> int:
    """The longest sequence that the model takes."""
    context = _stated_context(spec)
    assert context is not None, "the language requires a context or a train.sequence"
    return context


def _stated_context(spec: Spec) -> int | None:
    return spec.model.length or spec.model.context or (spec.train.sequence if spec.train else None)


def _layer_block(spec: Spec, subject: Subject, layer: Layer, numbers: Sequence[int]) -> Block:
    model, replay = spec.model, spec.train is not None and spec.train.replay
    x = Value(name="x", shape=(*TOKENS, model.dim), dtype=model.dtype, role="residual")
    inputs = {role: token_input(role) for role in _beside_residual(model, layer)}
    marks: dict[str, str] = {role: role for role in ("segments", "positions") if role in inputs}
    if "real" in inputs and not layer.attention.causal:
        marks["real"] = "real"
    b = Builder(f"layers{layer_set_name(numbers)}", [x, *inputs.values()], layer.span())
    by_role = {role: value.name for role, value in inputs.items()}
    parallel, outputs, head_outputs = model.parallel_residual, list[Output](), list[Output]()
    h = before(b, model, "x", "attention")
    if isinstance(layer.attention, Moa):
        context = _stated_context(spec)
        attended, head_outputs = attend_by_groups(b, model, layer.attention, h, by_role, marks, context)
    else:
        attended = attend(b, model, layer.attention, h, marks, _stated_context(spec))
    residual = "x" if parallel != "none" else added(b, model, "x", attended, "attention")
    h = h if parallel == "one_norm" else before(b, model, residual, "ffn")
    if layer.moe is None:
        assert layer.ffn is not None
        fed = feed_forward(b, subject, layer.ffn, "ffn", h)
    else:
        fed, outputs = mixture(b, subject, layer.moe, h, by_role, replay=replay)
    if parallel != "none":  # under tp two partial sums are one, and reduced once (PaLM, arXiv 2204.02311, section 2)
        fed = b.one(o.Add, attended, fed, to="both", span=model.span("parallel_residual"))
    y = added(b, model, residual, fed, "ffn")
    return b.block([Output(y, "residual"), *with_one_balance(b, [*outputs, *head_outputs])])


def _beside_residual(model: Model, layer: Layer) -> tuple[Role, ...]:
    """The roles of a layer's inputs beside the residual stream, which its attention and its mixture use."""
    packing: tuple[Role, ...] = ()
    if model.embedding.packs:
        packing = ("segments", "positions") if layer.attention.rope is not None else ("segments",)
    by_heads = isinstance(layer.attention, Moa)
    gates = (*(layer.moe.inputs() if layer.moe else ()), *layer.attention.inputs())
    gate: tuple[Role, ...] = tuple(dict.fromkeys(gates))
    needs_real = layer.moe is not None or by_heads or isinstance(layer.ffn, Conv) or not layer.attention.causal
    return (*packing, *gate, *(("real",) if needs_real and model.embedding.padding is not None else ()))


def _forward_block(spec: Spec, layers: Sequence[Block]) -> Block:
    model = spec.model
    draws = any(block.input("keys") is not None for block in layers)
    sequences = [Value(name="sequences", shape=TOKENS[:1], dtype="int64", role="sequences")] if draws else []
    embedding = model.embedding
    marks = [token_input("segments")] if embedding.segments else []
    marks += [token_input("real")] if embedding.padding == "given" else []
    b = Builder("forward", [input_of(model), *routes_input(layers), *marks, *sequences], model.span())
    ids = "tokens"
    if isinstance(embedding, Patches) and (draws or embedding.positions == "learned"):
        ids = patch_numbers(b, model, embedding)
    names_by_role, choices = _numbers_of_tokens(b, model, layers, ids), choices_of_layers(b, layers)
    x, table = _vectors(b, model)
    if embedding.positions == "learned":
        line = embedding.span("positions")
        shape = (context_of(spec), model.dim)
        table_of_positions = b.parameter("positions.weight", shape, model.dtype, normal(), line, matrices=TABLE)
        optional = {"positions": names_by_role["positions"]} if "positions" in names_by_role else {}
        positions = b.one(o.EmbedPositions, ids, table_of_positions, optional=optional, to="positions", span=line)
        x = b.one(o.Add, x, positions, to="x", span=embedding.span())
    layer_outputs, pooled = list[Output](), Pooled(b)
    for number, block in enumerate(layers):
        names_by_role["choices"] = choices[number]
        stream, *outputs = call_layer(b, block, number, [x, *(names_by_role[value.role] for value in block.inputs[1:])])
        x = stream.name
        layer_outputs += outputs
        pooled.add(model.layers[number].moe, outputs)
    layer_outputs += pooled.balance(names_by_role.get("real"))
    return b.block(forward_outputs(b, Output(_logits(b, model, x, table), "logits"), layer_outputs))


def _vectors(b: Builder, model: Model) -> tuple[str, str]:
    """The vectors of tokens without positions, and the table of ids, or nothing for images."""
    embedding, span = model.embedding, model.embedding.span()
    if isinstance(embedding, Patches):
        return patch_vectors(b, model, embedding), ""
    table = b.parameter("embedding.weight", (model.outputs, model.dim), model.dtype, normal(), span, {"tp": 0}, TABLE)
    x = b.one(o.Embed, "tokens", table, to="x", span=span)
    return b.scaled(x, embedding.multiplier, embedding.span("multiplier")), table


def _logits(b: Builder, model: Model, x: str, table: str) -> str:
    """The logits of ids for each token, or of classes for each image, after the last layer's x."""
    embedding = model.embedding
    # In the form `post` the last layer ends with a norm.
    h = x if model.norm_place == "post" else norm(b, model, x, "norm")
    if isinstance(embedding, Patches):
        assert model.head is not None, "the language requires a head of images"
        return class_logits(b, model, model.head, h, embedding.tokens)
    # The head is linear: a factor on its input costs less than one on every logit.
    h = b.scaled(h, embedding.logits_multiplier, embedding.span("logits_multiplier"))
    head, head_span = table, embedding.span("tied")
    if not embedding.tied:
        shape = (model.outputs, model.dim)
        head = b.parameter("head.weight", shape, model.dtype, normal(), model.span(), {"tp": 0}, TABLE)
        head_span = None
    logits = b.one(o.Linear, h, head, to="logits", span=head_span)
    if embedding.logits_bias:
        logits = b.biased(logits, "head.bias", embedding.span("logits_bias"), {"tp": 0})
    return logits


def _numbers_of_tokens(b: Builder, model: Model, layers: Sequence[Block], ids: str) -> dict[Role | None, str]:
    """The whole numbers of each token that `forward` has or computes for layers, by role. `ids` has one per token."""
    embedding = model.embedding
    numbers: dict[Role | None, str] = {"tokens": ids}
    roles = {value.role for block in layers for value in block.inputs}
    if embedding.padding == "given":
        numbers["real"] = "real"
    elif "real" in roles:
        padding = embedding.span("padding")
        numbers["real"] = b.one(o.RealTokens, "tokens", to="real", span=padding, padding=embedding.padding)
    if embedding.separator is not None:
        line = embedding.span("separator")
        names = b.add(o.Segments, "tokens", to="segments positions", span=line, separator=embedding.separator)
        numbers["segments"], numbers["positions"] = names
    elif embedding.segments:
        line = embedding.span("segments")
        names = b.add(o.NumberSegments, "segments", to="segments positions", span=line)
        numbers["segments"], numbers["positions"] = names
    if "keys" in roles:
        settings = b.setting(SEED), b.setting(STEP)
        numbers["keys"] = b.one(o.TokenKeys, ids, "sequences", *settings, to="keys", span=model.span())
    return numbers
