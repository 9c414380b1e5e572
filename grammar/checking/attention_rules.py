"""Rules of attention's options against each other and against the sizes around them."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.source import Span
from moec.grammar.spec import Llama3, LongRope, Mla, Rope, Spec, Yarn


def windows(spec: Spec) -> Iterator[Diagnostic]:
    """No window is longer than the longest sequence or an image's patches, once for layers with the same attention."""
    if not spec.has_model:
        return
    model, train = spec.model, spec.train
    if model.length is not None:
        longest, place = model.length, model.span("embedding")
    elif model.context is not None:
        longest, place = model.context, model.span("context")
    elif train is not None and train.sequence is not None:
        longest, place = train.sequence, train.span("sequence")
    else:
        return
    for attention in {id(layer.attention): layer.attention for layer in model.layers}.values():
        if attention.window is not None and attention.window > longest:
            yield diagnose(
                "MOE0362",
                attention.span("window"),
                f"a window of {attention.window} tokens",
                labels=labels_at((place, f"sequences of at most {longest}")),
                help="leave `window` out: every token sees all before it",
            )


def latent(node: Mla) -> Iterator[Diagnostic]:
    """What `mla` cannot have: its latent vectors are normed, and its queries and keys have a part that turns,
    for which it needs `rope`."""
    normed, rope = "latent vectors have a norm already", node.rope
    if rope is None:
        message = f"nothing turns these {node.rope_dim} dimensions"
        help = "give `rope = rope()`"
        yield diagnose("MOE0374", node.span("rope_dim"), message, help=help, severity=Severity.WARNING)
    options = [
        ("qk_norm", node.qk_norm != "none", node.span("qk_norm"), normed),
        ("clip", node.clip is not None, node.span("clip"), normed),
    ]
    if rope is not None:
        options.append(("fraction", rope.fraction != 1, rope.span("fraction"), "`rope_dim` says how many dims turn"))
    for name, is_given, span, instead in options:
        if is_given:
            yield diagnose("MOE0363", span, f"`{name}` in `mla`: {instead}", help=f"leave `{name}` out")


def rotary(rope: Rope, width: int, declared: Span | None) -> Iterator[Diagnostic]:
    """Rules of rotary positions for heads `width` wide; `declared` is the place of that width."""
    turning = rope.turning(width)
    if rope.fraction < 1 and (turning == 0 or turning % 2):
        whole = f"{turning} of {width} dimensions" if turning else f"no dimension of {width}"
        better = max(2, turning + turning % 2)
        fits = better <= width
        yield diagnose(
            "MOE0360",
            rope.span("fraction"),
            f"{whole} would turn",
            labels=labels_at((declared, f"heads are {width} wide")),
            help=f"set `fraction = {better / width:.6g}`, which turns {better}" if fits else "",
        )
    if isinstance(rope.scaling, LongRope):
        yield from _factors_of_pairs(rope.scaling, turning // 2, declared)
    yield from _computable(rope)


def _factors_of_pairs(scaling: LongRope, pairs: int, declared: Span | None) -> Iterator[Diagnostic]:
    """`longrope` has a factor for each pair that turns."""
    for name, factors in (("short", scaling.short), ("long", scaling.long)):
        if len(factors) != pairs:
            message = f"{len(factors)} factors for {pairs} pairs"
            labels = labels_at((declared, "the width is given here"))
            help = f"give {pairs} factors, one for each pair that turns"
            yield diagnose("MOE0361", scaling.span(name), message, labels=labels, help=help)


def _computable(rope: Rope) -> Iterator[Diagnostic]:
    """The formulas of scalings divide by the differences of their limits, and by logarithms."""
    scaling = rope.scaling
    match scaling:
        case Yarn() if scaling.beta_slow > scaling.beta_fast:  # Kimi K2 has 1 and 1: a step in place of a ramp
            fast = labels_at((scaling.span("beta_fast"), f"kept above {scaling.beta_fast:g} turns"))
            message = f"`beta_slow = {scaling.beta_slow:g}` is above `beta_fast = {scaling.beta_fast:g}`"
            help = "set `beta_slow` at most to `beta_fast`, such as 1 and 32"
            yield diagnose("MOE0364", scaling.span("beta_slow"), message, labels=fast, help=help)
        case Yarn() if rope.theta <= 1:
            message = "`yarn` wants wavelengths that grow: a `theta` above 1"
            labels = labels_at((scaling.span(), "`yarn` is here"))
            yield diagnose(
                "MOE0364", rope.span("theta"), message, labels=labels, help="set `theta = 10_000`, as is usual"
            )
        case Llama3() if scaling.low >= scaling.high:
            high = labels_at((scaling.span("high"), f"kept above {scaling.high:g} turns"))
            message = f"`low = {scaling.low:g}` is not below `high = {scaling.high:g}`"
            help = "set `low` below `high`, such as 1 and 4"
            yield diagnose("MOE0364", scaling.span("low"), message, labels=high, help=help)
        case LongRope() if scaling.original == 1:
            message = "a context of one token has no logarithm to divide by"
            help = "give the context that the model was trained with"
            yield diagnose("MOE0364", scaling.span("original"), message, help=help)
