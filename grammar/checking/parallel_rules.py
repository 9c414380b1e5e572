"""Rules about micro-batches and recomputation that need no degrees; the `place` pass checks the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.source import Span
from moec.grammar.spec import Moe, Spec
from moec.grammar.stated import stated_of_layers


def microbatches_and_recomputation(spec: Spec) -> Iterator[Diagnostic]:
    """`microbatches` in the file of one layer, and `recompute = experts` for layers without experts."""
    parallel = spec.parallel
    if not spec.has_model:
        if parallel.microbatches is not None:
            subject = spec.layers[0].span()
            yield diagnose(
                "MOE0332",
                parallel.span("microbatches"),
                "a `layer` takes what its host gives it in one call",
                labels=labels_at((subject, "the file's subject")),
                help="leave `microbatches` out, and call the layer once for each micro-batch",
            )
        return
    mixtures = [layer.moe for layer in spec.model.layers]
    for layers, (word, span) in stated_of_layers(spec, "recompute"):
        if word == "experts":
            yield from _without_experts(spec, mixtures, [n for n in layers if n < len(mixtures)], span)


def _without_experts(
    spec: Spec, mixtures: Sequence[Moe | None], layers: Sequence[int], span: Span | None
) -> Iterator[Diagnostic]:
    if not layers or any(mixtures[number] for number in layers):
        return
    layer = spec.model.layers[layers[0]]
    declared = layer.span("ffn") or layer.span()
    yield diagnose(
        "MOE0331",
        span,
        "nothing is computed again",
        labels=labels_at((declared, f"layer {layers[0]} has this instead of experts")),
        help="`recompute = layer` saves the activations of any layer",
        severity=Severity.WARNING,
    )
