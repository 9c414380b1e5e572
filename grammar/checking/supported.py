"""Finds the parts of a Spec that moec cannot compile yet: marked words, and words that do not go together yet.

Every word of the language parses and validates. These are refused with MOE0202 when a Spec is lowered to a Program.
"""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.checking.group_gate_rules import ONE_TEXT
from moec.grammar.checking.guest_rules import unsupported_guests
from moec.grammar.checking.marks import elsewhere, marked, refused
from moec.grammar.diagnostics.diagnostic import Diagnostic, DiagnosticError
from moec.grammar.spec import (
    Activated,
    Base,
    BatchPriority,
    Conv,
    Dropless,
    ExpertChoice,
    GShardLoss,
    Lora,
    Mixture,
    Moa,
    Moe,
    Patches,
    SequenceLoss,
    Smear,
    Soft,
    Spec,
    Switch,
    SwitchLoss,
    TopK,
    Trace,
    ZLoss,
)
from moec.grammar.spec.base import Node, field_names
from moec.grammar.spec.gates import Online


def unsupported(spec: Spec) -> list[Diagnostic]:
    """One diagnostic for each unsupported part of `spec`, once for all layers that share it."""
    every = (*marked(spec, None, set()), *_unsupported_layers(spec), *_unsupported_images(spec))
    every += (
        *_unsupported_experts(spec),
        *_unsupported_heads(spec),
        *_unsupported_devices(spec),
        *_unsupported_loads(spec),
        *unsupported_guests(spec),
    )
    return list(dict.fromkeys(every)) or list(dict.fromkeys(_unsupported_packing(spec)))


def require_supported(spec: Spec) -> None:
    """Raises `DiagnosticError` for unsupported parts."""
    if problems := unsupported(spec):
        raise DiagnosticError(problems)


def _unsupported_devices(spec: Spec) -> Iterator[Diagnostic]:
    """Options that moec does not support on accelerators yet."""
    parallel, kind = spec.parallel, spec.cluster.device.kind
    if kind != "cpu" and parallel.offload != "none":
        span = parallel.span("offload")
        yield refused(
            span,
            f"`offload = {parallel.offload}` on {kind} devices",
            "use more ranks, or a higher `zero`",
            numbers=False,
        )


def _unsupported_loads(spec: Spec) -> Iterator[Diagnostic]:
    """Experts whose parts have loads of their own, which a trace does not tell apart."""
    train = spec.train
    if train is None or not isinstance(train.routing, Trace):
        return
    for moe in spec.subject.mixtures:
        if moe is not None and (len(moe.parts) > 1 or isinstance(moe.parts[0].body, Mixture)):
            what = "a trace for experts of several sizes, or for mixtures inside mixtures"
            yield refused(train.span("routing"), what, "today: uniform, zipf, bound", numbers=False)
            return


def _unsupported_images(spec: Spec) -> Iterator[Diagnostic]:
    """Options that a model of images may not have yet."""
    if spec.has_model and isinstance(spec.model.embedding, Patches) and spec.train is not None and spec.train.replay:
        yield refused(spec.train.span("replay"), "`replay` in a model of images", "", numbers=None)


def _unsupported_packing(spec: Spec) -> Iterator[Diagnostic]:
    """Options over whole sequences where texts are packed: with `group = sequence` a text is the routing group."""
    if not (spec.has_model and spec.model.embedding.packs):
        return
    for moa in {id(layer.attention): layer.attention for layer in spec.model.layers}.values():
        if isinstance(moa, Moa):
            yield from _terms_of_packed(moa)
    for moe in {id(layer.moe): layer.moe for layer in spec.model.layers if layer.moe}.values():
        yield from _terms_of_packed(moe)
        if moe.group != "sequence":
            continue
        if isinstance(moe.gate, Smear | Soft):  # which know no other group
            yield refused(moe.gate.span(), f"`{moe.gate.word}` within each of several packed texts", ONE_TEXT)
        words = [(moe.gate.span(), moe.gate.word)] if isinstance(moe.gate, _GROUPED_GATES) else []
        words += [(moe.span("overflow"), f"overflow = {moe.overflow}")] if moe.overflow != "drop" else []
        order = getattr(moe.capacity, "order", "sequence")
        words += [(moe.capacity.span("order"), f"order = {order}")] if order != "sequence" else []
        for span, word in words:
            yield refused(span, f"`{word}` within each of several packed texts", "use `group = batch`")
        limits = [getattr(moe.capacity, name, None) for name in ("factor", "eval", "max")]
        numbers = [n for f in limits if f is not None for n in (f.numerator, f.denominator)]
        if any(n >= _LARGEST_PART for n in numbers):
            help = "write a factor with fewer digits"
            yield refused(moe.span("capacity"), "so exact a capacity of each of several packed texts", help)


def _terms_of_packed(mixture: Moe | Moa) -> Iterator[Diagnostic]:
    """Balance terms that cannot have one text of several as a routing group."""
    for term in mixture.balance:
        if mixture.group == "sequence" and isinstance(term, SwitchLoss) and term.over == "model":
            what = "`over = model` within each of several packed texts"
            yield refused(term.span("over"), what, "use `group = batch`")
        elif mixture.group == "sequence" and not isinstance(term, _BY_SEGMENT):
            yield refused(term.span(), f"`{term.word}` within each of several packed texts", "use `group = batch`")
        elif mixture.group != "sequence" and isinstance(term, SequenceLoss):
            what = f"`{term.word}` of packed texts beside `group = {mixture.group}`"
            yield refused(term.span(), what, "use `group = sequence`")


_GROUPED_GATES = (Base, BatchPriority, ExpertChoice)
"""Gates whose choices depend on other tokens of the routing group, which may be the batch."""
_BY_SEGMENT = (GShardLoss, SequenceLoss, SwitchLoss, ZLoss)
"""Balance terms that have one text of several as a routing group, or no group."""
_LARGEST_PART = 2**32
"""Numerators times choices times tokens must fit 64 bits."""


def _unsupported_experts(spec: Spec) -> Iterator[Diagnostic]:
    """Kinds and lists of experts that a gate or an overflow does not serve yet."""
    mixtures = [layer.moe for layer in (spec.model.layers if spec.has_model else spec.layers)]
    for moe in {id(moe): moe for moe in mixtures if moe}.values():
        kinds = [part.body for part in moe.parts if not isinstance(part.body, Activated)]
        if isinstance(moe.gate, Smear) and kinds:
            yield refused(kinds[0].span(), f"`{kinds[0].word}` experts with `smear`", "use experts with an activation")
        if isinstance(moe.gate, Soft) and isinstance(kind := moe.parts[0].body, Conv):
            yield refused(kind.span(), "`conv` experts with `soft`", "a slot is a mean of tokens, which has no window")
        if len(moe.parts) > 1 and isinstance(moe.gate, Soft | Smear):
            yield refused(moe.span("experts"), f"a list of experts with `{moe.gate.word}`", "use one size")
        if len(moe.parts) > 1 and moe.overflow == "pad":
            yield refused(moe.span("experts"), "a list of experts with `overflow = pad`", "use one size, or `drop`")


def _unsupported_heads(spec: Spec) -> Iterator[Diagnostic]:
    """Options that a mixture of attention heads cannot have yet."""
    layers = spec.model.layers if spec.has_model else ()
    for moa in {id(layer.attention): layer.attention for layer in layers}.values():
        if not isinstance(moa, Moa):
            continue
        if moa.output_gate != "none":
            yield refused(moa.span("output_gate"), "`output_gate` of `moa`", "leave `output_gate` out")
        if moa.sinks:
            yield refused(moa.span("sinks"), "`sinks` of `moa`", "leave `sinks` out")
        if moa.qk_norm == "projection":
            yield refused(moa.span("qk_norm"), "`qk_norm = projection` of `moa`", "use `qk_norm = head`")
        if isinstance(bias := getattr(moa.gate, "bias", None), Online):
            what, help = f"`bias = {bias.word}` of a gate of `moa`", "balance its groups by `switch_loss`"
            yield refused(moa.gate.span("bias"), what, help)
        for term in moa.balance:
            if isinstance(term, SwitchLoss) and term.over == "model":
                yield refused(term.span("over"), "`over = model` of a gate of `moa`", "leave `over` out")
        if spec.train is not None and spec.train.replay:
            help = "a rollout gives no choices of heads: leave `replay` out"
            yield refused(moa.span(), "`moa` in a model with `replay`", help, numbers=None)


def _unsupported_layers(spec: Spec) -> Iterator[Diagnostic]:
    """`layer` blocks beside a model, and options that the file of one layer may not have."""
    yield from nested(spec)
    used = {part.body.name for moe in _all_mixtures(spec) for part in moe.parts if isinstance(part.body, Mixture)}
    if spec.has_model:
        for layer in spec.layers:
            if layer.name not in used:
                yield refused(layer.span(), "a `layer` beside a `model` that no expert is", "", numbers=None)
    else:
        yield from _degrees_of_layer(spec)
    if not spec.has_model and spec.train is not None and spec.train.replay:
        help = "a layer by itself sees one mixture of its host's; use it in a `model`"
        yield elsewhere(spec.train.span("replay"), "`replay` in the file of one `layer`", help)
    for layer in () if spec.has_model else (spec.layer,):
        gate = layer.moe.gate
        if needed := gate.inputs():
            drawn = () if gate.draws or "tokens" in needed else gate.random()
            what, span = f"`{drawn[0] if drawn else gate.word}`", gate.span(drawn[0] if drawn else "")
            help = "a layer is given vectors, without ids or numbers of tokens; use this gate in a `model`"
            yield elsewhere(span, f"{what} in the file of one `layer`", help)
        if isinstance(gate, Smear):
            help = "a layer's experts are left out of what its host sums, and every rank has these; use it in a `model`"
            yield elsewhere(gate.span(), f"`{gate.word}` in the file of one `layer`", help)
        if (pooled := layer.moe.pooled) is not None:
            help = "a layer by itself sees no other layers' tokens; leave `over` out, or use it in a `model`"
            yield elsewhere(pooled.span("over"), "`over = model` in the file of one `layer`", help)
        if layer.moe.order == "random":
            help = "a layer is given vectors, without numbers of tokens; use it in a `model`"
            yield elsewhere(layer.moe.capacity.span("order"), "`order = random` in the file of one `layer`", help)


def _degrees_of_layer(spec: Spec) -> Iterator[Diagnostic]:
    """Degrees above 1 that the file of one layer may not have yet."""
    parallel = spec.parallel
    if isinstance(parallel.pp, int) and parallel.pp > 1:
        what, help = f"`pp = {parallel.pp}` in the file of one `layer`", "it is one stage: leave `pp` out"
        yield refused(parallel.span("pp"), what, help, numbers=False)
    stated = [(parallel, "tp"), (parallel, "cp"), *((block, "etp") for block in (parallel, *parallel.layers))]
    for block, word in stated:
        degree = getattr(block, word)
        if isinstance(degree, int) and degree > 1:
            yield refused(block.span(word), f"`{word} = {degree}` in the file of one `layer`", "", numbers=False)


def _all_mixtures(spec: Spec) -> Iterator[Moe]:
    """The mixtures of the subject, each once, and those that are declared by name."""
    own = {id(moe): moe for moe in spec.subject.mixtures if moe is not None}
    yield from own.values()
    yield from (layer.moe for layer in spec.layers if id(layer.moe) not in own)


def nested(spec: Spec) -> Iterator[Diagnostic]:
    """Options that mixtures of mixtures cannot have yet: they compile to one mixture of all pairs of experts."""
    inner = spec.subject.inner
    for moe in _all_mixtures(spec):
        for part in moe.parts:
            within = inner.get(part.body.name) if isinstance(part.body, Mixture) else None
            if within is None:
                continue
            if len(moe.parts) > 1:
                yield refused(part.span(), "`mixture` in a list of experts", "")
            if spec.train is not None and spec.train.replay:
                yield refused(spec.train.span("replay"), "`replay` of a mixture of mixtures", "", numbers=None)
            yield from _plain_gate(moe.gate, "a mixture of mixtures")
            yield from _plain_gate(within.gate, "an inner mixture")
            if not isinstance(moe.capacity, Dropless):
                yield refused(moe.span("capacity"), "a capacity of a mixture of mixtures", "")
            for term in moe.balance:
                if not isinstance(term, SwitchLoss):
                    yield refused(term.span(), f"`{term.word}` of a mixture of mixtures", "")
                elif term.fractions == "scores":
                    yield refused(term.span("fractions"), "`fractions = scores` of a mixture of mixtures", "")
            for name in ("shared", "residual", "capacity", "balance"):
                value = getattr(within, name)
                if value is not None and value != () and not isinstance(value, Dropless):
                    yield refused(within.span(name), f"`{name}` of an inner mixture", "")
            if len(within.parts) > 1 or isinstance(within.parts[0].body, Mixture | Lora | Conv):
                yield refused(within.span("experts"), "these experts of an inner mixture", "")


def _plain_gate(gate: Node, of: str) -> Iterator[Diagnostic]:
    """Only `topk` and `switch`, without what a second gate would need of its own."""
    if not isinstance(gate, TopK | Switch):
        yield refused(gate.span(), f"`{gate.word}` in {of}", "today: switch, topk")
        return
    plain = type(gate)(k=gate.k) if isinstance(gate, TopK) else Switch()
    for name in field_names(type(gate)):
        if name not in ("k", "score", "order", "normalize") and getattr(gate, name) != getattr(plain, name):
            yield refused(gate.span(name), f"`{name}` of a gate in {of}", "")
