"""What would make a step fit that does not: another value for one word of `parallel`, or more devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.grammar.stated import OPEN_WORDS, open_words, with_words
from moec.passes.search.candidate import Candidate
from moec.passes.search.choose import best

TIMES = (2, 4, 8, 16, 32)
"""How many times as many devices are tried."""


@dataclass(frozen=True, slots=True)
class WayOut:
    """The fastest plan that fits with another value for `word`; if that is empty, with other words or more devices."""

    word: str
    plan: Candidate


def ways_out(spec: Spec) -> Iterator[WayOut]:
    """Each word that a file states or leaves out and that would do by itself; else all of them. Then the least devices
    on which the file fits, else with other words."""
    stated = [word for word in OPEN_WORDS if word not in open_words(spec)]
    found = [WayOut(word, plan) for word in stated if (plan := _fitting(with_words(spec, {word: "auto"})))]
    files = [spec, with_words(spec, dict.fromkeys(OPEN_WORDS, "auto"))] if stated else [spec]
    if stated and not found and (plan := _fitting(files[1])):
        found.append(WayOut("", plan))
    yield from found
    for file in files if not found or found[0].word else ():
        if plan := next(filter(None, (_fitting(_of_more_devices(file, times)) for times in TIMES)), None):
            yield WayOut("", plan)
            return


def _of_more_devices(spec: Spec, times: int) -> Spec:
    *inside, outermost = spec.cluster.levels
    levels = (*inside, outermost.replace(size=times * outermost.size))
    spec = spec.replace(cluster=spec.cluster.replace(levels=levels))
    return with_words(spec, {"dp": None}) if isinstance(spec.parallel.dp, int) else spec


def _fitting(spec: Spec) -> Candidate | None:
    """The plan of a file, if it has one that fits."""
    try:
        plan = best(spec)
    except DiagnosticError:
        return None
    return plan if plan.prediction.fits else None
