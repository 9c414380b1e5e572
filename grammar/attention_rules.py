"""Rules of attention's options against each other and against the sizes around them."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Label
from moec.grammar.source import Span
from moec.grammar.spec import Rope


def rotary(rope: Rope, width: int, declared: Span | None) -> Iterator[Diagnostic]:
    """Rotary positions of heads `width` wide, a width that `declared` gives."""
    turning = rope.turning(width)
    if rope.fraction < 1 and (turning == 0 or turning % 2):
        whole = f"{turning} of {width} dimensions" if turning else f"no dimension of {width}"
        better = max(2, turning + turning % 2)
        fits = better <= width
        yield diagnose(
            "MOE0360",
            rope.span("fraction"),
            f"{whole} would turn",
            labels=_label(declared, f"heads are {width} wide"),
            help=f"set `fraction = {better / width:.6g}`, which turns {better}" if fits else "",
        )


def _label(span: Span | None, message: str) -> tuple[Label, ...]:
    return (Label(span=span, message=message),) if span else ()
