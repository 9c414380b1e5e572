"""What a plan changes against another one of the same model: its degrees, and the seconds that these cost or save."""

from __future__ import annotations

from collections.abc import Iterator

from moec.codegen.search_report import GIGABYTE
from moec.commands.inspecting.summary import recomputing_layers
from moec.commands.planning.choices import NOTHING
from moec.commands.planning.plan_document import Against, Change
from moec.commands.planning.terms import difference_lines
from moec.grammar.amounts import amount_of_bytes
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.layer_numbers import numbered
from moec.grammar.printer import set_lines
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.search.candidate import Candidate

RESHARDING = frozenset({"dp", "cp", "tp", "ep", "etp", "pp", "virtual", "schedule", "stages", "zero"})
"""The words that may decide which rank has which part of a parameter or of an optimizer's state."""

LONGEST = 60
"""The characters of a value that are shown."""


def require_same_model(plan: Candidate, other: Candidate) -> None:
    """Raises MOE0504 where two plans are of different models."""
    if plan.spec.model.replace(name="") != other.spec.model.replace(name=""):
        help = "give a plan of this model: its layers, sizes and dtype are those of the file"
        raise DiagnosticError([diagnose("MOE0504", None, f"`{other.spec.subject.name}` is another model", help=help)])


def against(plan: Candidate, other: Candidate) -> Against:
    """The document of `plan` against `other`, of the same model."""
    return Against(
        ranks=other.spec.cluster.ranks,
        step_time_s=float(other.prediction.step.total),
        memory_gb=float(other.prediction.memory.peak.bytes.total) / GIGABYTE,
        changes=list(_changes(other, plan)),
    )


def against_lines(plan: Candidate, other: Candidate) -> Iterator[str]:
    """The changes, and the seconds that each line of the step takes more."""
    before, changes = other.prediction, list(_changes(other, plan))
    yield f"against a step of {before.step.total:.3g} s and {amount_of_bytes(before.memory.peak.bytes.total)}"
    for change in changes:
        values = " -> ".join(_short(value) for value in (change.before, change.after) if value is not None)
        yield f"  {change.kind} {change.word} = {values}{', reshards a checkpoint' if change.reshards else ''}"
    if not changes:
        yield "  the same words"
    yield from (line for _, _, line in difference_lines(before.step, plan.prediction.step))


def _short(value: str) -> str:
    """A value on one line: the numbers that a plan keeps of a trace are many."""
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}…"


def _words(of: Candidate) -> dict[str, str]:
    """The words of `parallel` as a plan has them, without what does nothing, and those of `train` and the cluster."""
    degrees, recomputed = choose_degrees(of.spec), recomputing_layers(of.program)
    several = len(degrees.experts) > 1
    words: dict[str, object] = {"pp": degrees.pp, "virtual": degrees.virtual, "schedule": degrees.schedule}
    words |= {"dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp, "zero": degrees.zero}
    for experts in degrees.experts:
        where = f" of {numbered(experts.layers)}" if several else ""
        words |= {f"ep{where}": experts.ep, f"etp{where}": experts.etp}
    words["recompute"] = ", ".join(f"{part} in {numbered(layers)}" for part, layers in recomputed.items()) or None
    words["microbatches"] = of.program.microbatches
    found = {word: str(value) for word, value in words.items() if value not in (None, NOTHING.get(word, 1))}
    parallel = [line for line in set_lines(of.spec.parallel) if line.startswith(("stages", "sequence_parallel"))]
    assert of.spec.train is not None
    for line in (*parallel, *set_lines(of.spec.train), *(set_lines(of.spec.adapt) if of.spec.adapt else ())):
        word, _, value = line.partition(" = ")
        found |= {word: value} if value else {}
    return found | {"ranks": str(of.spec.cluster.ranks), "device": of.spec.cluster.device.name}


def _places(program: Program) -> object:
    """What decides which rank has which part of a parameter or of an optimizer's state."""
    stages = tuple(tuple(call.layer for call in layer_calls(program, of_rank)) for of_rank in program.stages_by_rank)
    parameters = []
    for block in program.blocks:
        meshes = program.meshes_of(block)
        for p in block.parameters:
            layouts = [layout for layout in (p.layout, p.weight, p.gradient, p.optimizer_state) if layout is not None]
            axes = {axis: meshes.size(axis) for layout in layouts for axis in layout.axes}
            parameters.append((tuple(program.layers_by_block.get(block.name, ())), p.name, tuple(layouts), axes))
    return stages, parameters


def _changes(other: Candidate, plan: Candidate) -> Iterator[Change]:
    before, after = _words(other), _words(plan)
    reshards = _places(other.program) != _places(plan.program)
    cuts_states = "zero" in before or "zero" in after
    for word in dict.fromkeys((*after, *before)):
        old, new = before.get(word), after.get(word)
        if old != new:
            yield Change(
                kind="+" if old is None else "-" if new is None else "~",
                word=word,
                before=old,
                after=new,
                reshards=reshards and word.split()[0] in RESHARDING and (cuts_states or word not in ("dp", "cp")),
            )
