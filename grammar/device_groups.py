"""The groups of experts of `device_loss`: those that it states, else one for each rank of the stated `ep`."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Label, labels_at
from moec.grammar.source import Span
from moec.grammar.spec import DeviceLoss, Layer, Moe, Spec
from moec.grammar.stated import stated_by_layer
from moec.grammar.suggest import divisor_near


def device_groups(spec: Spec) -> list[Diagnostic]:
    """Groups that nothing states, or that do not divide the experts; once for layers that share a mixture."""
    stated = stated_by_layer(spec, "ep")
    problems: list[Diagnostic] = []
    for number, moe in enumerate(_mixtures(spec)):
        problems += _problems_of(moe, *stated.get(number, (None, None))) if moe else ()
    return list(dict.fromkeys(problems))


def with_device_groups(spec: Spec) -> Spec:
    """The Spec with the groups of all terms, which depend on the stated `ep` alone and not on the ranks of a run."""
    stated = stated_by_layer(spec, "ep")
    if not any(_needs_groups(moe) for moe in _mixtures(spec)):
        return spec
    if not spec.has_model:
        subject = spec.layer
        return spec.replace(layers=(subject.replace(moe=_completed(subject.moe, stated[0].value)),))
    known: dict[tuple[int, object], Layer] = {}
    layers = []
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None and _needs_groups(layer.moe):
            ep = stated[number].value
            if (id(layer), ep) not in known:
                known[id(layer), ep] = layer.replace(moe=_completed(layer.moe, ep))
            layer = known[id(layer), ep]
        layers.append(layer)
    return spec.replace(model=spec.model.replace(layers=tuple(layers)))


def _problems_of(moe: Moe, ep: object, place: Span | None) -> Iterator[Diagnostic]:
    experts = moe.num_experts
    for term in moe.balance:
        if not isinstance(term, DeviceLoss):
            continue
        groups = ep if term.groups is None else term.groups
        if groups is None:
            help = "give their number, such as `groups = 8`, or state `ep` in `parallel`"
            yield diagnose("MOE0340", term.span(), "neither `groups` nor `ep` is stated", help=help)
        elif isinstance(groups, int) and experts % groups:
            first = moe.parts[0].span("count")
            labels = labels_at((first, f"there are {experts}"))
            labels += [Label(span=place, message="one group for each rank")] if place and term.groups is None else []
            message = f"{experts} experts do not make {groups} equal groups"
            help = f"set `groups = {divisor_near(experts, groups)}`"
            yield diagnose("MOE0341", term.span("groups") or term.span(), message, labels=labels, help=help)


def _completed(moe: Moe, ep: object) -> Moe:
    terms = (term.replace(groups=ep) if _lacks_groups(term) else term for term in moe.balance)
    return moe.replace(balance=tuple(terms))


def _needs_groups(moe: Moe | None) -> bool:
    return moe is not None and any(_lacks_groups(term) for term in moe.balance)


def _lacks_groups(term: object) -> bool:
    return isinstance(term, DeviceLoss) and term.groups is None


def _mixtures(spec: Spec) -> list[Moe | None]:
    return [layer.moe for layer in (spec.model.layers if spec.has_model else spec.layers)]
