"""Rules of a balance term over the tokens of all layers: the layers that have it agree on what they add up."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, labels_at
from moec.grammar.spec import Moe, Spec, SwitchLoss
from moec.grammar.units import written


def balance_over_layers(spec: Spec) -> Iterator[Diagnostic]:
    """One such term in a layer, of one weight, and over as many experts and the same groups in every layer."""
    if not spec.has_model:
        return
    first: Moe | None = None
    for moe in {id(layer.moe): layer.moe for layer in spec.model.layers if layer.moe}.values():
        terms = [term for term in moe.balance if isinstance(term, SwitchLoss) and term.over == "model"]
        for other in terms[1:]:
            labels = labels_at((terms[0].span(), "the first one"))
            yield diagnose("MOE0372", other.span(), "a second one in the same layer", labels=labels, help="keep one")
        if terms and first is not None:
            yield from _compared(first, moe)
        first = first or (moe if terms else None)


def _compared(first: Moe, other: Moe) -> Iterator[Diagnostic]:
    one, term = first.pooled, other.pooled
    assert one is not None
    assert term is not None
    help = "give the layers that share the term the same, or use `over = layer` there"
    if one.weight != term.weight:
        here, there = (written(loss.weight, "") for loss in (term, one))
        labels = labels_at((one.span("weight"), f"{there} in other layers"))
        yield diagnose("MOE0372", term.span("weight"), f"its weight is {here} here", labels=labels, help=help)
    if first.num_experts != other.num_experts:
        labels = labels_at((first.span("experts"), f"{first.num_experts} in other layers"))
        yield diagnose(
            "MOE0372", other.span("experts"), f"there are {other.num_experts} experts here", labels=labels, help=help
        )
    if first.group != other.group:
        labels = labels_at((first.span("group") or one.span(), f"`group = {first.group}` in other layers"))
        at = other.span("group") or term.span()
        yield diagnose("MOE0372", at, f"`group = {other.group}` here", labels=labels, help=help)
