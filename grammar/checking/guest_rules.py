"""Words of `adapt` without effect, and mixtures and degrees beside which experts cannot be placed yet."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.checking.marks import elsewhere, refused
from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity
from moec.grammar.spec import Dropless, Greedy, Replicate, Shadow, Smear, Soft, Spec
from moec.grammar.stated import open_words, stated_of_layers

NEEDS = {
    "split": (Replicate, Shadow),
    "horizon": (Greedy,),
    "clock": (Greedy,),
}
"""The words of `placement` without one of which another word of `adapt` has no effect."""

CHOICES = "use a gate that chooses experts"


def placed_words(spec: Spec) -> tuple[Greedy | Replicate | Shadow, ...]:
    """The words of `placement`."""
    stated = spec.adapt.placement if spec.adapt is not None else None
    return stated if isinstance(stated, tuple) else (stated,) if stated is not None else ()


def without_effect(spec: Spec) -> Iterator[Diagnostic]:
    """A warning for each word of `adapt` that needs another one, or a smaller number."""
    if spec.adapt is None:
        return
    words = placed_words(spec)
    for name, kinds in NEEDS.items():
        if spec.adapt.given(name) and not any(isinstance(word, kinds) for word in words):
            needed = " or ".join(f"`{kind.word}(…)`" for kind in kinds)
            message, help = f"`{name}` without {needed} in `placement`", f"leave `{name}` out"
            yield diagnose("MOE0374", spec.adapt.span(name), message, help=help, severity=Severity.WARNING)
    ep = max((stated.value for _, stated in stated_of_layers(spec, "ep") if isinstance(stated.value, int)), default=0)
    for word in words:
        if isinstance(word, Greedy) and 1 < ep <= word.threshold:
            message = f"no rank of {ep} has more than {ep} times the mean rows, so that experts never move"
            help = f"set `threshold` between 1 and {ep}, such as `1.1`"
            yield diagnose("MOE0374", word.span("threshold"), message, help=help, severity=Severity.WARNING)


def unsupported_guests(spec: Spec) -> Iterator[Diagnostic]:
    """One diagnostic for each part of the file that `placement` does not go with yet."""
    if spec.adapt is None or spec.adapt.placement is None:
        return
    span = spec.adapt.span("placement")
    if not spec.has_model:
        help = "experts are placed between steps of a job, which a layer does not have; use it in a `model`"
        yield elsewhere(span, "`placement` in the file of one `layer`", help)
        return
    if words := open_words(spec):
        what = f"`placement` where `{next(iter(words))}` is left open"
        yield refused(span, what, "let `moec plan` choose without `adapt`, and state what it chose", numbers=False)
    words_of_placement = [word.word for word in placed_words(spec)]
    if twice := [word for word in words_of_placement if words_of_placement.count(word) > 1]:
        yield refused(span, f"two `{twice[0]}` in `placement`", "write one for all", numbers=False)
    parallel = spec.parallel
    if isinstance(parallel.pp, int) and parallel.pp > 1:
        yield refused(span, f"`placement` beside `pp = {parallel.pp}`", "leave `pp` out", numbers=False)
    for _, etp in stated_of_layers(spec, "etp"):
        if etp.value > 1:
            what = f"`placement` beside `etp = {etp.value}`"
            yield refused(etp.span or span, what, "use `ep` alone", numbers=False)
    for moe in {id(layer.moe): layer.moe for layer in spec.model.layers if layer.moe}.values():
        if isinstance(moe.gate, Soft | Smear):
            yield refused(span, f"`placement` of experts of `{moe.gate.word}`", CHOICES, numbers=False)
        elif not isinstance(moe.capacity, Dropless):
            what = "`placement` of experts with a capacity"
            yield refused(moe.capacity.span() or moe.span("capacity"), what, "use `dropless`", numbers=False)
        elif len(moe.parts) > 1:
            yield refused(moe.span("experts"), "`placement` of a list of experts", "use one size", numbers=False)
