"""Rules of gates that choose among all tokens of a routing group: options that they replace, leaks of later tokens."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.spec import Moe, Smear, Soft, Spec, Topology

ONE_TEXT = (
    "give every sequence one text: leave `segments` or `separator` out of `tokens(…)`, and pad with `padding = …`"
)
"""The way out for a gate whose only group is a whole sequence."""


def group_gates(spec: Spec) -> list[Diagnostic]:
    """Every diagnostic of these gates in the file's model or layer, once for all layers with the same mixture.

    A `layer` file has no causality warning: only its host knows whether the model is causal.
    """
    causal = spec.has_model and all(getattr(layer.attention, "causal", True) for layer in spec.model.layers)
    mixtures = [layer.moe for layer in (spec.model.layers if spec.has_model else spec.layers)]
    packs = spec.has_model and spec.model.embedding.packs
    problems: list[Diagnostic] = []
    for moe in {id(moe): moe for moe in mixtures if moe}.values():
        problems += _decided(moe, packs)
        problems += _leaks(moe) if causal else ()
    return list(dict.fromkeys(problems))


def _decided(moe: Moe, packs: bool) -> Iterator[Diagnostic]:
    """Refuses a capacity or an overflow where the gate decides how many rows an expert takes; `packs`: texts."""
    gate = moe.gate
    if not gate.decides_rows:
        return
    label = labels_at((gate.span(), "this gate decides how many rows an expert takes"))
    if moe.capacity.word != "dropless":
        message = f"`{moe.capacity.word}` is another number of rows"
        yield diagnose("MOE0354", moe.span("capacity"), message, labels=label, help="leave `capacity` out")
    if moe.overflow != "drop":
        yield diagnose("MOE0354", moe.span("overflow"), "no expert is ever full", labels=label, help="leave it out")
    if moe.group != "sequence" and isinstance(gate, Soft | Smear):
        what = "slots are means over" if isinstance(gate, Soft) else "experts are merged for"
        label = labels_at((gate.span(), f"its {what} a sequence"))
        help = f"leave `group` out; {ONE_TEXT}" if packs else "leave `group` out"
        yield diagnose("MOE0354", moe.span("group"), f"`group = {moe.group}`", labels=label, help=help)


def _leaks(moe: Moe) -> Iterator[Diagnostic]:
    """Warns of a gate whose choices for a token depend on later tokens."""
    gate = moe.gate
    bounded = isinstance(gate, Topology) and gate.share is not None
    if leaks := "training" if bounded else gate.leaks:
        message = f"in {leaks}, what a token gets depends on later tokens of its group"
        help = "say `causal = false` in attention, such as `mha(…, causal = false)`, or use `topk`"
        yield diagnose("MOE0352", gate.span(), message, help=help, severity=Severity.WARNING)
