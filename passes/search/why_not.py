"""What speaks against other values for some words of a plan: the best plan with them, and what is near."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Spec
from moec.grammar.stated import OF_LAYERS, GivenWords, blocks_without, with_words
from moec.passes.search.candidate import Candidate
from moec.passes.search.choose import best


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The best plan with the words `given`.

    `alone`: the plan with these, and all else as in the chosen plan; or the rule that it breaks. `nearest`: for each of
    several words the best plan with it and without the other ones.
    """

    given: Mapping[str, object]
    best: Candidate
    alone: Candidate | Diagnostic
    nearest: Mapping[str, Candidate]


def why_not(spec: Spec, chosen: Candidate, given: GivenWords) -> WhyNot:
    """What speaks against the words `given`, which replace those of the file `spec`, whose plan is `chosen`.

    Raises `DiagnosticError` where no plan has them, with places in the argument that gives them.
    """
    nearest = dict[str, Candidate]()
    for word in given.values if len(given.values) > 1 else ():
        try:
            nearest[word] = best(given.only(word).in_file(spec))
        except DiagnosticError:
            continue
    try:
        found = best(given.in_file(spec))
    except DiagnosticError as error:
        raise DiagnosticError(map(given.placed, error.diagnostics)) from None
    return WhyNot(given.values, found, _alone(chosen, given.values), nearest)


def _alone(chosen: Candidate, given: Mapping[str, object]) -> Candidate | Diagnostic:
    """`dp` follows from the other degrees, `virtual` from the schedule, and what some layers recompute from what all
    do."""
    parallel = chosen.spec.parallel
    following = {"dp": None, "virtual": None if given.keys() & {"schedule", "pp"} else parallel.virtual}
    follows: dict[str, object] = {word: value for word, value in following.items() if word in chosen.words}
    follows["layers"] = blocks_without(parallel.layers, [w for w in OF_LAYERS if w in given and w in chosen.words])
    try:
        return best(with_words(chosen.spec, {**follows, **given}))
    except DiagnosticError as error:
        return error.diagnostics[0]
