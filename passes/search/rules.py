"""What a file that leaves words of `parallel` open must have, and what it may not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.spec import DeviceLoss, Moa, Spec, Topology
from moec.grammar.spec.base import Node
from moec.grammar.stated import (
    OF_LAYERS,
    OPEN_WORDS,
    is_open,
    number_of,
    open_span,
    open_words,
    searched_words,
    values_of,
    with_words,
)
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.search.kinds import EXPERT_WORDS, kinds_of

NodeT = TypeVar("NodeT", bound=Node)


def require_choosable(spec: Spec) -> None:
    """Raises `DiagnosticError` unless some plan keeps all rules, and no choice changes what the model computes."""
    if problems := list(_problems(spec)):
        raise DiagnosticError(problems)
    from moec.passes.search.space import Space

    if next(Space(spec).plans(), None) is None:
        if not any("auto" in values_of(spec, word) for word in open_words(spec)):
            choose_degrees(with_first_values(spec))
        raise DiagnosticError([_nothing_keeps_the_rules(spec)])


def _nothing_keeps_the_rules(spec: Spec) -> Diagnostic:
    """With the rule that the first ones break, if these do."""
    words, rule = open_words(spec), ""
    try:
        choose_degrees(with_first_values(spec))
    except DiagnosticError as error:
        rule = f"; with the first ones {error.diagnostics[0].code}, {error.diagnostics[0].message}"
    message = f"no values of {', '.join(f'`{word}`' for word in words)} keep all rules{rule}"
    help = "allow more values, or leave more words open"
    return diagnose("MOE0505", open_span(spec, words[0]), message, help=help)


def unused_values(spec: Spec, chosen: Spec) -> Iterator[tuple[str, int | str, Diagnostic | None]]:
    """The values of lists that no plan of the file has, each with the rule that it breaks in the `chosen` plan: other
    words that follow from it have their defaults. None where it breaks none there."""
    for word in open_words(spec):
        lists = (stated for stated in values_of(spec, word) if isinstance(stated, tuple))
        for value in dict.fromkeys(itertools.chain(*lists)):
            if not _has_plan(spec, word, value):
                following = dict.fromkeys({"dp", "ep", "microbatches", "virtual"}.intersection(searched_words(spec)))
                try:
                    choose_degrees(with_words(chosen, {**following, word: value}))
                except DiagnosticError as error:
                    yield word, value, error.diagnostics[0]
                else:
                    yield word, value, None


def _has_plan(spec: Spec, word: str, value: object) -> bool:
    """Whether some plan has a value of a word; of `ep` and `etp`, for some kind of mixtures."""
    from moec.passes.search.space import Space

    if word in EXPERT_WORDS:
        place = EXPERT_WORDS.index(word)
        return any(pair[place] == value for _, kinds in Space(spec).bases() for pairs in kinds for pair in pairs)
    return next(Space(with_words(spec, {word: value})).plans(), None) is not None


def with_first_values(spec: Spec) -> Spec:
    """The file with the first value of each list, and the default of each other open word."""
    parallel = _first_values(spec.parallel, OPEN_WORDS)
    return spec.replace(parallel=parallel.replace(layers=tuple(_first_values(b, OF_LAYERS) for b in parallel.layers)))


def _first_values(node: NodeT, words: Iterable[str]) -> NodeT:
    stated = ((word, getattr(node, word)) for word in words)
    open_ = {word: value for word, value in stated if is_open(value)}
    defaults = type(node)()
    return node.replace(**{w: v[0] if isinstance(v, tuple) else getattr(defaults, w) for w, v in open_.items()})


def _problems(spec: Spec) -> Iterator[Diagnostic]:
    words = open_words(spec)
    span = open_span(spec, words[0])
    if spec.train is None or not spec.has_model:
        has, gives = ("a file without `train`", "") if spec.has_model else ("the file of one `layer`", "a `model` and ")
        message = f"`{words[0]}` is left open for the fastest step, and {has} has no step"
        yield diagnose("MOE0502", span, message, help=f"state `{words[0]}`, or give {gives}`train`")
        return
    for word in words:
        if () in values_of(spec, word):
            help = f"name the values that it may have, or `{word} = auto`"
            yield diagnose("MOE0505", open_span(spec, word), f"`{word}` may have no value", help=help)
    yield from _problems_of_layers(spec, words[0])
    for word, (node, why) in _kept(spec).items():
        if word in words or (getattr(spec.parallel, word) is None and _followed_by(spec)[word].intersection(words)):
            message = f"`{words[0]}` is left open, and with it `{word}`, on which results depend: {why}"
            yield diagnose("MOE0503", node.span(), message, help=f"state `{word}` as a number")


def _problems_of_layers(spec: Spec, word: str) -> Iterator[Diagnostic]:
    """What a search does not choose beside words of some layers."""
    by_default = [kind for kind in kinds_of(spec) if kind.ep is None]
    for block in spec.parallel.layers:
        if block.recompute is not None:
            message = f"`{word}` is left open, and these layers have a `recompute` of their own"
            help = "state every word, or leave `recompute` to all layers: with `auto` some may compute less again"
            yield diagnose("MOE0503", block.span("recompute"), message, help=help)
        elif block.etp is not None and len(by_default) > 1 and any(is_open(kind.etp) for kind in by_default):
            message = "`etp` is left open, and these layers have one of their own, but no `ep`"
            yield diagnose("MOE0503", block.span("etp"), message, help="state `ep`, or `ep = auto`")


def _followed_by(spec: Spec) -> dict[str, set[str]]:
    """The words on which the default of a word depends."""
    of_pipeline = {"schedule", "dp", "cp", "tp"} if (number_of(spec.parallel.pp) or 1) > 1 else set[str]()
    return {"dp": {"pp", "cp", "tp"}, "ep": {"pp", "etp"}, "etp": set(), "microbatches": {"pp"} | of_pipeline}


def _kept(spec: Spec) -> dict[str, tuple[Node, str]]:
    """The words that a choice would change results by, each with the part of the model that depends on it."""
    kept: dict[str, tuple[Node, str]] = {}
    for layer in spec.model.layers:
        moe = layer.moe
        if moe is not None and isinstance(moe.gate, Topology):
            kept |= dict.fromkeys(("dp", "ep", "etp", "microbatches"), (moe.gate, "`topology` prefers near experts"))
        if moe is not None:
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
