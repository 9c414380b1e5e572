"""budget: refuses a plan whose training step does not fit the device, and names the change that makes it fit."""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Label, diagnose
from moec.grammar.spec import Spec, Train
from moec.passes.cost.memory import Moment, memory_of
from moec.passes.degrees.degrees import Degrees
from moec.passes.ir import Program
from moec.passes.remedies import ROOM, Change, Placing, first_that_fits, has_room, what_could_help

LARGEST_KINDS = 3
"""Tenants that the message names."""

NOTHING_FITS = "none of the changes tried fits: use a device with more memory, {helps}or a smaller model"


@dataclass(frozen=True, slots=True)
class Budget:
    """Compares the peak of a step of `spec.train` with the memory of `spec.cluster.device`. Changes nothing.

    `place` compiles other Specs and degrees without this check, for the search of a remedy. A file without `train`, or
    of a `layer`, does not say what a step is, and is not checked.
    """

    spec: Spec
    degrees: Degrees
    place: Placing

    def apply(self, program: Program) -> Program:
        """Returns `program`. Raises `DiagnosticError` (MOE0501) if its step does not fit the device."""
        train = self.spec.train
        if train is not None and self.spec.has_model:
            peak = memory_of(program, self.spec).peak
            if peak.bytes.total > self.spec.cluster.device.memory:
                raise DiagnosticError([self._refused(peak, train)])
        return program

    def _refused(self, peak: Moment, train: Train) -> Diagnostic:
        device, place = self.spec.cluster.device, self.spec.parallel.span() or self.spec.cluster.span()
        largest = sorted(peak.bytes.of.items(), key=lambda kind: -kind[1])[:LARGEST_KINDS]
        listed = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in largest)
        labels = (
            (device.span("memory"), f"{device.name} has {gigabytes(device.memory)}"),
            (train.span("batch"), f"{train.batch} sequences over all ranks"),
        )
        found = first_that_fits(self.spec, self.degrees, self.place)
        return diagnose(
            "MOE0501",
            place,
            f"a step takes {gigabytes(peak.bytes.total, device.memory)}, most in the {peak.event}: {listed}",
            labels=[Label(span=span, message=message) for span, message in labels if span is not None],
            help=_advice(found, device.memory) if found else self._other_advice(),
        )

    def _other_advice(self) -> str:
        """What to do where no change that was tried fits."""
        helps = "".join(f"{change}, " for change in what_could_help(self.spec, self.degrees, self.place))
        return NOTHING_FITS.format(helps=helps)


def _advice(change: Change, memory: float) -> str:
    """`set … : it fits (61.3 of 80 GB)`."""
    fits = "it fits" if change.num_words == 1 else "they fit"
    tight = "" if has_room(change.peak, memory) else f"; less than {ROOM:.0%} stay free, which a prediction may miss by"
    return f"{change.text}: {fits} ({gigabytes(change.peak, memory)}){tight}"


def gigabytes(size: float, of: float | None = None) -> str:
    """`61.3 GB`, `61.3 of 80 GB` or `535 TB of 80 GB`, in the units that each size needs."""
    units = ("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)
    unit, scale = next(((u, s) for u, s in units if (of or size) >= 0.9995 * s), ("kB", 1e3))
    if of is None:
        return f"{size / scale:.3g} {unit}"
    if size >= 1000 * scale:
        return f"{gigabytes(size)} of {of / scale:.4g} {unit}"
    return f"{size / scale:.4g} of {of / scale:.4g} {unit}"
