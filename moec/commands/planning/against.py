"""What a plan changes against another one of the same model: its degrees, and the seconds that these cost or save."""

from __future__ import annotations

from collections.abc import Iterator

from moec.commands.inspecting.summary import recomputing_layers
from moec.commands.planning.choices import NOTHING
from moec.commands.planning.plan_document import GIGABYTE, Against, Change
from moec.commands.planning.terms import difference_lines
from moec.grammar.amounts import amount_of_bytes
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.layer_numbers import numbered
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.search.candidate import Candidate

PLACES = frozenset({"dp", "cp", "tp", "ep", "etp", "pp", "virtual", "zero"})
"""The words that decide which rank has which part of a parameter or of an optimizer's state."""


def against(plan: Candidate, other: Candidate) -> Against:
    """The document of `plan` against `other`. Raises MOE0504 where they are of different models."""
    if plan.spec.model.replace(name="") != other.spec.model.replace(name=""):
        help = "give a plan of this model: its layers, sizes and dtype are those of the file"
        raise DiagnosticError([diagnose("MOE0504", None, f"`{other.spec.subject.name}` is another model", help=help)])
    return Against(
        ranks=other.spec.cluster.ranks,
        step_time_s=float(other.prediction.step.total),
        memory_gb=float(other.prediction.memory.peak.bytes.total) / GIGABYTE,
        changes=list(_changes(_words(other), _words(plan))),
    )


def against_lines(plan: Candidate, other: Candidate) -> Iterator[str]:
    """The changes, and the seconds that each line of the step takes more."""
    found, step, before = against(plan, other), plan.prediction.step, other.prediction.step
    memory = amount_of_bytes(found.memory_gb * GIGABYTE)
    ranks = f", on {found.ranks} ranks" if found.ranks != plan.spec.cluster.ranks else ""
    yield f"against a step of {before.total:.3g} s and {memory}{ranks}"
    for change in found.changes:
        values = " -> ".join(value for value in (change.before, change.after) if value is not None)
        yield f"  {change.kind} {change.word} = {values}{', reshards a checkpoint' if change.reshards else ''}"
    if not found.changes:
        yield "  the same words"
    yield from (line for _, _, line in difference_lines(before, step))


def _words(of: Candidate) -> dict[str, str]:
    """The words of `parallel` as a plan has them; what does nothing is left out."""
    degrees, recomputed = choose_degrees(of.spec), recomputing_layers(of.program)
    several = len(degrees.experts) > 1
    words: dict[str, object] = {"pp": degrees.pp, "virtual": degrees.virtual, "schedule": degrees.schedule}
    words |= {"dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp, "zero": degrees.zero}
    for experts in degrees.experts:
        where = f" of {numbered(experts.layers)}" if several else ""
        words |= {f"ep{where}": experts.ep, f"etp{where}": experts.etp}
    words["recompute"] = ", ".join(f"{part} in {numbered(layers)}" for part, layers in recomputed.items()) or None
    words["microbatches"] = of.program.microbatches
    return {word: str(value) for word, value in words.items() if value not in (None, NOTHING.get(word, 1))}


def _changes(before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    for word in dict.fromkeys((*after, *before)):
        old, new = before.get(word), after.get(word)
        if old != new:
            yield Change(
                kind="+" if old is None else "-" if new is None else "~",
                word=word,
                before=old,
                after=new,
                reshards=word.split()[0] in PLACES,
            )
