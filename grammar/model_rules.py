"""Rules of `model { … }`: forms of a layer that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Label
from moec.grammar.spec import Model, Spec


def model_forms(spec: Spec) -> Iterator[Diagnostic]:
    """Every rule of the file's model, if it has one."""
    if spec.has_model:
        yield from _parallel_residual(spec.model)


def _parallel_residual(model: Model) -> Iterator[Diagnostic]:
    """Attention and feed-forward side by side share one sum: norms after a sublayer have no defined place."""
    if model.parallel_residual == "none" or model.norm_place == "pre":
        return
    at, place = model.span("parallel_residual"), model.span("norm_place")
    yield diagnose(
        "MOE0365",
        at,
        "attention and the feed-forward are added in one sum",
        labels=[Label(span=place, message="these norms come after each of them")] if place else (),
        help="set `norm_place = pre`, or leave `parallel_residual` out",
    )
