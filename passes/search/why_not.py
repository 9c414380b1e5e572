"""What speaks against other values for some words of a plan: the best plan with them, and what is near."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.spec import Spec
from moec.grammar.stated import OF_LAYERS, GivenWords, blocks_without, is_open, with_words
from moec.passes.degrees.stated_degrees import divisors
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


def why_not(
    spec: Spec, chosen: Candidate, given: GivenWords, at: Callable[[Sequence[str]], None] = lambda words: None
) -> WhyNot:
    """What speaks against the words `given`, which replace those of the file `spec`, whose plan is `chosen`.

    `at`: is called before each search, with the words that are fixed. Raises `DiagnosticError` where no plan has the
    words, with places in the argument that gives them.
    """
    if _is_of(chosen, given.values):
        return WhyNot(given.values, chosen, chosen, {})
    at(list(given.values))
    try:
        found = best(_file(spec, given))
    except DiagnosticError as error:
        raise DiagnosticError(map(given.placed, error.diagnostics)) from None
    nearest = dict[str, Candidate]()
    for word in given.values if len(given.values) > 1 else ():
        one = given.only(word)
        if _is_of(chosen, one.values):  # the best plan of all is also the best with its own words
            nearest[word] = chosen
            continue
        at([word])
        try:
            nearest[word] = best(_file(spec, one))
        except DiagnosticError:
            continue
    return WhyNot(given.values, found, _alone(chosen, given.values), nearest)


def _file(spec: Spec, given: GivenWords) -> Spec:
    """The file with the words; with a schedule, which plans of one stage do not have, without these."""
    stated = spec.parallel.pp
    if "schedule" in given.values and "pp" not in given.values and is_open(stated):
        values = stated if isinstance(stated, tuple) else divisors(spec.cluster.ranks)
        several = tuple(pp for pp in values if 1 < pp <= spec.subject.depth)
        if not several:
            message, help = (
                "no plan of the file has a pipeline, and so none a `schedule`",
                "leave it out, or allow more `pp`",
            )
            raise DiagnosticError([diagnose("MOE0505", given.whole, message, help=help)])
        spec = with_words(spec, {"pp": several})
    return given.in_file(spec)


def _is_of(plan: Candidate, words: Mapping[str, object]) -> bool:
    """Whether a search chose these values for the plan."""
    return all(plan.words.get(word) == value for word, value in words.items())


def _alone(chosen: Candidate, given: Mapping[str, object]) -> Candidate | Diagnostic:
    """The chosen plan with these words instead of its own: `dp`, `virtual` and words of some layers follow anew."""
    parallel = chosen.spec.parallel
    following = {"dp": None, "virtual": None if given.keys() & {"schedule", "pp"} else parallel.virtual}
    follows: dict[str, object] = {word: value for word, value in following.items() if word in chosen.words}
    follows["layers"] = blocks_without(parallel.layers, [w for w in OF_LAYERS if w in given and w in chosen.words])
    try:
        return best(with_words(chosen.spec, {**follows, **given}))
    except DiagnosticError as error:
        return error.diagnostics[0]
