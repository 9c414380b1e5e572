"""budget: refuses a plan whose training step does not fit the device."""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Label, diagnose
from moec.grammar.spec import Spec, Train
from moec.passes.cost.memory import Memory, memory_of, ranks_in_words
from moec.passes.ir import Program

LARGEST_KINDS = 3
"""The number of kinds of memory that the message names."""


class OverBudgetError(DiagnosticError):
    """MOE0501 without its help: the change with which a step fits is searched for outside of the passes."""

    def with_help(self, help: str) -> DiagnosticError:
        """The error as a user sees it."""
        return DiagnosticError(diagnostic._replace(help=help) for diagnostic in self.diagnostics)


@dataclass(frozen=True, slots=True)
class Budget:
    """Compares the peak of a step of `spec.train` with the memory of `spec.cluster.device`. Changes nothing.

    In a pipeline the rank with the highest peak counts. A file without `train`, or of a `layer`, does not define a
    step, and is not checked.
    """

    spec: Spec

    def apply(self, program: Program) -> Program:
        """Returns `program`. Raises `OverBudgetError` if its step does not fit the device."""
        train = self.spec.train
        if train is not None and self.spec.has_model:
            memory = memory_of(program, self.spec)
            if memory.peak.bytes.total > self.spec.cluster.device.memory:
                raise OverBudgetError([_refused(self.spec, train, memory, program)])
        return program


def _refused(spec: Spec, train: Train, memory: Memory, program: Program) -> Diagnostic:
    device, peak = spec.cluster.device, memory.peak
    where = f" on {ranks_in_words(program, memory.stages)}" if len(program.stages) > 1 else ""
    largest = sorted(peak.bytes.of.items(), key=lambda kind: -kind[1])[:LARGEST_KINDS]
    listed = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in largest)
    labels = (
        (device.span("memory"), f"{device.name} has {gigabytes(device.memory)}"),
        (train.span("batch"), f"{train.batch} sequences over all ranks"),
    )
    return diagnose(
        "MOE0501",
        spec.parallel.span() or spec.cluster.span(),
        f"a step takes {gigabytes(peak.bytes.total, device.memory)}{where}, most in the {peak.event}: {listed}",
        labels=[Label(span=span, message=message) for span, message in labels if span is not None],
    )


def gigabytes(size: float, of: float | None = None) -> str:
    """`61.3 GB`, `61.3 of 80 GB` or `535 TB of 80 GB`, in the units that each size needs."""
    units = ("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)
    unit, scale = next(((u, s) for u, s in units if (of or size) >= 0.9995 * s), ("kB", 1e3))
    if of is None:
        return f"{size / scale:.3g} {unit}"
    if size >= 1000 * scale:
        return f"{gigabytes(size)} of {of / scale:.4g} {unit}"
    return f"{size / scale:.4g} of {of / scale:.4g} {unit}"
