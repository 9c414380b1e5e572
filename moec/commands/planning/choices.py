"""What a search has chosen, and the next plans with what they would gain and lose, in lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moec.codegen.search_report import GIGABYTE, OtherPlan, PlannedCandidates, SearchReport
from moec.commands.console.progress import progress
from moec.commands.planning.terms import AXES, detail, difference_lines, differences, signed
from moec.grammar.amounts import amount_of_bytes
from moec.grammar.printer import written_value
from moec.grammar.schema import fields
from moec.grammar.spec import Parallel, Spec
from moec.grammar.stated import OPEN_WORDS, open_words
from moec.open_words import choice_of
from moec.passes.cost.seconds import Seconds
from moec.passes.search.candidate import Candidate, Choice

if TYPE_CHECKING:
    from moec.passes.search.ways_out import WayOut
    from moec.passes.search.why_not import WhyNot

SHOWN = 3
"""The next plans that are shown."""

NEAR = 0.1
"""The part of the plan's seconds up to which a difference is given in per cent."""

SMALL = 0.1
"""The part of all differences below which one is not named."""

ORDER = (*OPEN_WORDS, "virtual")
"""The words that a search states, as they are shown."""

NOTHING: Mapping[str, object] = {"zero": 0, "recompute": "none"}
"""The values by which words do nothing; for others it is 1."""


def searched(spec: Spec) -> Choice | None:
    """`choice_of`, with a line on a terminal while it searches."""
    if not open_words(spec):
        return None
    with progress("searching plans"):
        return choice_of(spec)


def in_words(words: Mapping[str, object]) -> str:
    """`ep = 8, pp = 4`."""
    known = fields(Parallel)
    texts = {w: value if isinstance(value, str) else written_value(known[w], value) for w, value in words.items()}
    return ", ".join(f"{word} = {text}" for word, text in texts.items())


def chosen_lines(report: SearchReport | None) -> list[str]:
    """What was chosen of how many plans, the next one, and the first value that no plan has; none where nothing was
    open."""
    if report is None:
        return []
    chosen = in_words(_effective(report.chosen.words)) or in_words(report.chosen.words)
    lines = [f"{chosen}: the fastest of {_numbers(report.candidates)}"]
    for other in _next_plans(report)[:1]:
        slower = other.step_time_s / report.chosen.step_time_s - 1
        lines.append(f"next {_changed(report.chosen, other)}{f' ({slower:.1%} slower)' if slower >= 0.0005 else ''}")
    return [*lines, *_unused(report)[:1]]


def runner_up_lines(report: SearchReport) -> Iterator[str]:
    """A table of the next plans: seconds, memory, and what differs."""
    others = _next_plans(report)
    if others:
        yield f"  next     {'step':<10} {'memory':<9} against the plan"
    for number, other in enumerate(others, 1):
        seconds, memory = f"{other.step_time_s:.3g} s", amount_of_bytes(other.memory_gb * GIGABYTE)
        yield f"    {number:<5}  {seconds:<10} {memory:<9} {_changed(report.chosen, other)}"
    yield f"  {_numbers(report.candidates)}"
    yield from (f"  {line}" for line in _unused(report))


def _next_plans(report: SearchReport) -> list[OtherPlan]:
    """The next plans that are shown, the fastest first: of each other degrees and recomputation the fastest, then the
    rest."""
    kinds, first, rest = {_kind(report.chosen)}, list[OtherPlan](), list[OtherPlan]()
    for other in report.runners_up:
        (rest if _kind(other) in kinds else first).append(other)
        kinds.add(_kind(other))
    return sorted((first + rest)[:SHOWN], key=lambda other: other.step_time_s)


def _kind(plan: OtherPlan) -> tuple[object, ...]:
    recompute = str(plan.words.get("recompute")).split(" in ")[0]
    return *(plan.words.get(word) for word in ("pp", "cp", "tp", "ep", "etp")), recompute


def way_out_lines(ways: Sequence[WayOut], plan: Candidate) -> Iterator[str]:
    """What would make a step fit: another value for one word, or more devices."""
    for number, way in enumerate(ways):
        changed = {w: value for w, value in way.plan.words.items() if plan.words.get(w) != value}
        words = in_words({**{w: of for w, of in changed.items() if w == way.word}, **_effective(changed)})
        ranks = way.plan.spec.cluster.ranks
        devices = f"on {ranks:,} devices" if ranks != plan.spec.cluster.ranks else ""
        yield (
            f"  {'' if number else 'fits':<8} {', '.join(filter(None, (devices, words)))}: "
            f"{way.plan.prediction.step.total:.3g} s, {amount_of_bytes(_peak(way.plan))}"
        )


def why_not_lines(found: WhyNot, chosen: Candidate) -> Iterator[str]:
    """What the best plan with the given words takes, and what they would gain and lose."""
    best, total = found.best, chosen.prediction.step.total
    stated = chosen.spec.parallel
    if all(chosen.words.get(word, getattr(stated, word)) == value for word, value in found.given.items()):
        yield f"the plan has `{in_words(found.given)}`"
        return
    times = best.prediction.step.total / total
    others = _effective({word: value for word, value in best.words.items() if word not in found.given})
    end = f": {in_words(others)}" if others else ""
    in_percent = f"{abs(times - 1):.1%} {'longer' if times >= 1 else 'shorter'} than the plan"
    compared = in_percent if abs(times - 1) < NEAR else f"{times:.3g} times the plan"
    yield f"`{in_words(found.given)}` takes {best.prediction.step.total:.3g} s at best, {compared}{end}"
    if not best.prediction.fits:
        yield f"  it does not fit: {_memory(best)}"
    elif not isinstance(found.alone, Candidate):
        yield f"  with all else as in the plan, {found.alone.code}: {found.alone.message}"
    elif not found.alone.prediction.fits:
        yield f"  with all else as in the plan it does not fit: {_memory(found.alone)}"
    for name, seconds, line in difference_lines(chosen.prediction.step, best.prediction.step):
        yield f"{line}{_groups(name, best if seconds > 0 else chosen)}"
    for word, near in found.nearest.items():
        known = {**found.best.words, **found.given}
        rest = _effective({w: value for w, value in near.words.items() if known.get(w) != value and w != word})
        fits = "" if near.prediction.fits else ", which does not fit"
        alone = in_words({word: found.given[word]})
        yield f"  with {alone} only: {near.prediction.step.total:.3g} s{fits}{', ' if rest else ''}{in_words(rest)}"


def _unused(report: SearchReport) -> list[str]:
    """`no plan has tp = 3 (MOE0312, …: 4 / 3 is not whole)`, for each such value."""
    return [
        f"no plan has {in_words({of.word: of.value})}{f' ({of.broken_rule})' if of.broken_rule else ''}"
        for of in report.unused
    ]


def _effective(words: Mapping[str, object]) -> dict[str, object]:
    """Without the words that do nothing, in one order: a plan's report has them by their names."""
    return {word: words[word] for word in ORDER if word in words and words[word] != NOTHING.get(word, 1)}


def _numbers(of: PlannedCandidates) -> str:
    """`1,204 plans, of which an estimated 301 fit`."""
    plans = f"{of.number:,} plan{'s' * (of.number != 1)}"
    fitting = f"an estimated {of.fit:,} fit" if of.fit else "none fits"
    return f"{plans}, of which {fitting}" if of.fit < of.number else plans


def _changed(chosen: OtherPlan, other: OtherPlan) -> str:
    """`tp = 2, zero = 2: tensor parallel + 0.7, bubble - 0.6`."""
    total = chosen.step_time_s
    found = differences(Seconds(chosen.terms), Seconds(other.terms))
    every = sum(map(abs, found.values()))
    terms = [f"{name} {signed(of, total)}" for name, of in found.items() if of and abs(of) >= SMALL * every]
    return f"{in_words(_differing(chosen, other))}: {', '.join(terms) or 'as long'}"


def _differing(chosen: OtherPlan, other: OtherPlan) -> dict[str, int | str]:
    """The words of `other` that differ from those of `chosen`; `dp` follows from others, and counts only by itself."""
    words = {word: other.words[word] for word in ORDER if word in other.words}
    found = {word: value for word, value in words.items() if chosen.words.get(word) != value}
    return {word: value for word, value in found.items() if word != "dp" or len(found) == 1}


def _groups(name: str, of: Candidate) -> str:
    text = detail(name, of.prediction.step, of.program, of.spec) if name in AXES else ""
    return f": {text}" if text else ""


def _memory(of: Candidate) -> str:
    parts = sorted(of.prediction.memory.peak.bytes.of.items(), key=lambda part: -part[1])[:3]
    tenants = ", ".join(f"{kind} {amount_of_bytes(size)}" for kind, size in parts)
    return f"{amount_of_bytes(_peak(of))} of {amount_of_bytes(of.prediction.capacity)}, {tenants}"


def _peak(of: Candidate) -> float:
    return of.prediction.memory.peak.bytes.total
