"""What a file that leaves words of `parallel` open must have, and what it may not have."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec import DeviceLoss, Moa, Parallel, Spec, Topology
from moec.grammar.spec.base import Node
from moec.grammar.stated import number_of, open_words, with_words
from moec.passes.degrees.degrees import choose_degrees


def require_choosable(spec: Spec) -> None:
    """Raises `DiagnosticError` unless some plan keeps all rules, and no choice changes what the model computes."""
    if problems := list(_problems(spec)):
        raise DiagnosticError(problems)
    from moec.passes.search.space import Space

    if next(Space(spec).plans(), None) is None:
        choose_degrees(with_first_values(spec))
        raise InternalError("the first values keep the rules of degrees, and a search has no candidate")


def with_first_values(spec: Spec) -> Spec:
    """The file with the first value of each list, and the default of each other open word: a rule refuses them as it
    refuses all others."""
    defaults, stated = Parallel(), {word: getattr(spec.parallel, word) for word in open_words(spec)}
    words = {word: value[0] if isinstance(value, tuple) else getattr(defaults, word) for word, value in stated.items()}
    return with_words(spec, words)


def _problems(spec: Spec) -> Iterator[Diagnostic]:
    words = open_words(spec)
    span = spec.parallel.span(words[0])
    if spec.train is None or not spec.has_model:
        help = "state a number, or " + ("give `train { batch = …; sequence = … }`" if spec.has_model else "a `model`")
        yield diagnose("MOE0502", span, f"`{words[0]}` is left open for the fastest step", help=help)
        return
    for block in spec.parallel.layers:
        message = f"`{words[0]}` is left open, and these layers have words of their own"
        yield diagnose("MOE0503", block.span(), message, help="state every word, or leave out the words of layers")
    for word, (node, why) in _kept(spec).items():
        if number_of(getattr(spec.parallel, word)) is None:
            message = f"`{words[0]}` is left open, and with it `{word}`, on which results depend: {why}"
            yield diagnose("MOE0503", node.span(), message, help=f"state `{word}` as a number")


def _kept(spec: Spec) -> dict[str, tuple[Node, str]]:
    """The words that a choice would change results by, each with the part of the model that depends on it."""
    kept: dict[str, tuple[Node, str]] = {}
    for layer in spec.model.layers:
        moe = layer.moe
        if moe is not None and isinstance(moe.gate, Topology):
            kept |= dict.fromkeys(("dp", "ep", "etp", "microbatches"), (moe.gate, "`topology` prefers near experts"))
        if moe is not None and (moe.drops or moe.balance):
            kept |= _kept_by_group(moe, moe.group)
        if isinstance(layer.attention, Moa) and layer.attention.balance:
            kept |= _kept_by_group(layer.attention, layer.attention.group)
        for term in moe.balance if moe is not None else ():
            if isinstance(term, DeviceLoss) and term.groups is None:
                kept["ep"] = term, "`device_loss` without `groups` counts by rank"
    return kept


def _kept_by_group(node: Node, group: str) -> dict[str, tuple[Node, str]]:
    words = {"sequence": (), "batch": ("microbatches",), "rank": ("dp", "microbatches")}[group]
    return dict.fromkeys(words, (node, f"`group = {group}`"))
