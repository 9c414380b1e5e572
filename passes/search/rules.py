"""What a file that leaves words of `parallel` open must have, and what it may not have."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.spec import DeviceLoss, Moa, Parallel, Spec, Topology
from moec.grammar.spec.base import Node
from moec.grammar.stated import number_of, open_words, searched_words, with_words
from moec.passes.degrees.degrees import choose_degrees


def require_choosable(spec: Spec) -> None:
    """Raises `DiagnosticError` unless some plan keeps all rules, and no choice changes what the model computes."""
    if problems := list(_problems(spec)):
        raise DiagnosticError(problems)
    from moec.passes.search.space import Space

    if next(Space(spec).plans(), None) is None:
        if not any(getattr(spec.parallel, word) == "auto" for word in open_words(spec)):
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
    return diagnose("MOE0505", spec.parallel.span(words[0]), message, help=help)


def unused_values(spec: Spec, chosen: Spec) -> Iterator[tuple[str, int | str, Diagnostic | None]]:
    """The values of lists that no plan of the file has, each with the rule that it breaks in the `chosen` plan: other
    words that follow from it have their defaults. None where it breaks none there."""
    from moec.passes.search.space import Space

    for word in open_words(spec):
        values = getattr(spec.parallel, word)
        for value in values if isinstance(values, tuple) else ():
            if next(Space(with_words(spec, {word: value})).plans(), None) is None:
                following = dict.fromkeys({"dp", "ep", "microbatches", "virtual"}.intersection(searched_words(spec)))
                try:
                    choose_degrees(with_words(chosen, {**following, word: value}))
                except DiagnosticError as error:
                    yield word, value, error.diagnostics[0]
                else:
                    yield word, value, None


def with_first_values(spec: Spec) -> Spec:
    """The file with the first value of each list, and the default of each other open word."""
    defaults, stated = Parallel(), {word: getattr(spec.parallel, word) for word in open_words(spec)}
    words = {word: value[0] if isinstance(value, tuple) else getattr(defaults, word) for word, value in stated.items()}
    return with_words(spec, words)


def _problems(spec: Spec) -> Iterator[Diagnostic]:
    words = open_words(spec)
    span = spec.parallel.span(words[0])
    if spec.train is None or not spec.has_model:
        has, gives = ("a file without `train`", "") if spec.has_model else ("the file of one `layer`", "a `model` and ")
        message = f"`{words[0]}` is left open for the fastest step, and {has} has no step"
        yield diagnose("MOE0502", span, message, help=f"state `{words[0]}`, or give {gives}`train`")
        return
    for word in words:
        if getattr(spec.parallel, word) == ():
            help = f"name the values that it may have, or `{word} = auto`"
            yield diagnose("MOE0505", spec.parallel.span(word), f"`{word}` may have no value", help=help)
    for block in spec.parallel.layers:
        message = f"`{words[0]}` is left open, and these layers have words of their own"
        yield diagnose("MOE0503", block.span(), message, help="state every word, or leave out the words of layers")
    for word, (node, why) in _kept(spec).items():
        if word in words or (getattr(spec.parallel, word) is None and _followed_by(spec)[word].intersection(words)):
            message = f"`{words[0]}` is left open, and with it `{word}`, on which results depend: {why}"
            yield diagnose("MOE0503", node.span(), message, help=f"state `{word}` as a number")


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
