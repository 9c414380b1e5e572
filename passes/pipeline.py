"""The compiler as one list of passes. Each maps a Program to a new one; `compile_program` times and verifies each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moec.grammar.checking.supported import require_supported
from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec import Spec
from moec.grammar.stated import open_words
from moec.passes.budget import Budget, OverBudgetError
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.fuse import Fuse
from moec.passes.guests.place_guests import PlaceGuests
from moec.passes.ir import Program
from moec.passes.ir.interface import has_interface
from moec.passes.ir.order_rules import scheduled
from moec.passes.ir.verifier import Invariant, called_once, connected, evenly_cut, laid_out, placed, staged, well_typed
from moec.passes.join_counts import JoinCounts
from moec.passes.lower.lower_model import lower
from moec.passes.partition import Partition
from moec.passes.place.communicate import Communicate
from moec.passes.place.place import Place
from moec.passes.place.schedule import Schedule
from moec.passes.place.shard import ShardLayouts
from moec.passes.place.tensor_parallel import TensorParallel
from moec.passes.remedies import advice


class Pass(Protocol):
    """A frozen dataclass whose fields are its options."""

    def apply(self, program: Program) -> Program:
        """The Program after the pass."""
        ...


@dataclass(frozen=True, slots=True)
class PassStep:
    """A pass, its name, and the invariants that hold from this pass on."""

    name: str
    run: Callable[[Program], Program]
    establishes: tuple[Invariant, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The run of one pass: its seconds, and the Program before and after."""

    name: str
    seconds: float
    before: Program | None
    after: Program


@dataclass(slots=True)
class Compilation:
    """The compiled Program, and the record of every pass."""

    program: Program
    records: list[Record] = field(default_factory=list)


PASS_NAMES = (
    "lower",
    "place",
    "tensor_parallel",
    "shard",
    "communicate",
    "fuse",
    "join_counts",
    "guests",
    "partition",
    "schedule",
    "budget",
)


def pipeline(spec: Spec, degrees: Degrees) -> Sequence[PassStep]:
    """The passes after `lower`, in order."""
    return (
        PassStep("place", Place(degrees).apply, (placed,)),
        PassStep("tensor_parallel", TensorParallel().apply, ()),
        PassStep("shard", ShardLayouts(degrees.zero).apply, (laid_out, evenly_cut)),
        PassStep("communicate", Communicate().apply, (connected,)),
        PassStep("fuse", Fuse().apply, ()),
        PassStep("join_counts", JoinCounts().apply, ()),
        PassStep("guests", PlaceGuests(degrees).apply, ()),
        PassStep("partition", Partition(spec, degrees).apply, (staged, has_interface)),
        PassStep("schedule", Schedule().apply, (scheduled,)),
        PassStep("budget", Budget(spec).apply, ()),
    )


def compile_program(spec: Spec, stop_after: str | None = None, degrees: Degrees | None = None) -> Compilation:
    """Runs the passes on `spec`, up to and including `stop_after`, and verifies the Program after each.

    `degrees` replaces the degrees that `spec` states, and keeps the rules of degrees.
    Raises `DiagnosticError` for a user's mistake, `InternalError` for a bug in moec.
    """
    if degrees is None:
        require_supported(spec)
        if words := open_words(spec):
            raise InternalError(f"a search has not chosen {', '.join(words)}")
        degrees = choose_degrees(spec)
    try:
        return _run_passes(spec, degrees, stop_after)
    except OverBudgetError as refused:
        raise refused.with_help(advice(spec, degrees, _placed)) from None


def _placed(spec: Spec, degrees: Degrees) -> Program:
    """The Program before the budget, to weigh advice by: what is compiled is verified."""
    return unverified(spec, degrees, lower(spec, degrees), "budget")


def unverified(spec: Spec, degrees: Degrees, program: Program, stop_before: str) -> Program:
    """A lowered Program after the passes before `stop_before`; nothing is verified."""
    for step in pipeline(spec, degrees):
        if step.name == stop_before:
            break
        program = step.run(program)
    return program


def _run_passes(spec: Spec, degrees: Degrees, stop_after: str | None) -> Compilation:
    started = time.perf_counter()
    program = lower(spec, degrees)
    records = [Record("lower", time.perf_counter() - started, None, program)]
    invariants: list[Invariant] = [well_typed, called_once]
    _verify(program, invariants)
    for step in pipeline(spec, degrees):
        if records[-1].name == stop_after:
            break
        started = time.perf_counter()
        result = step.run(program)
        records.append(Record(step.name, time.perf_counter() - started, program, result))
        invariants += step.establishes
        if result is not program or step.establishes:
            _verify(result, invariants)
        program = result
    return Compilation(program, records)


def _verify(program: Program, invariants: Sequence[Invariant]) -> None:
    for invariant in invariants:
        invariant(program)
