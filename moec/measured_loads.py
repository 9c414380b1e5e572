"""Files whose loads are a trace: what a plan keeps of it is read before anything is planned. numpy only for these."""

from __future__ import annotations

from pathlib import Path

from moec.grammar.spec import Spec, Trace
from moec.subject import is_text


def folder_of(source: object) -> Path:
    """The folder to which the paths of a source are relative: a file's own; of a text or Spec, the working folder."""
    is_path = isinstance(source, Path) or (isinstance(source, str) and not is_text(source))
    return Path(str(source)).parent if is_path else Path()


def with_loads(spec: Spec, source: object) -> Spec:
    """`spec` with what a plan keeps of its trace. Raises `DiagnosticError` where that cannot be read, or is of another
    model."""
    if spec.train is None or not isinstance(spec.train.routing, Trace):
        return spec
    from moec.passes.loads.placed_loads import Placement, placed_loads

    found = placed_loads(spec, folder_of(source), Placement())
    return spec if found is None else found[0]
