"""Finds weights that a host has narrowed before they reach a layer, and steps without `moec.end_step`."""

from __future__ import annotations

from moec.runtime.guards.guard import Guard, LayerBegins
from moec.runtime.ranks.checks import Complaint


def narrowed(layer: LayerBegins) -> Complaint | None:
    """The complaint about a weight that the file keeps in fp32, and the host does not."""
    if not (name := layer.rounded()):
        return None
    return Complaint(
        "MOE0711",
        f"{name} has been rounded before it reaches the layer, whose file keeps it in fp32",
        "a layer narrows its weights itself: convert the rest of the model before the layer is put in; or call "
        "`layer.float()` and load its weights again; `fully_shard(layer)` without "
        "`MixedPrecisionPolicy(param_dtype=…)`; or leave out `keep_in_fp32`",
    )


def untold(layer: LayerBegins) -> Complaint:
    """The complaint about a pass in training after a step without `moec.end_step`."""
    return Complaint(
        "MOE0713",
        "an optimizer has stepped, and nothing said that the step ended: the biases of `online` have not moved",
        "call `moec.end_step(model)` once after each `optimizer.step()`, on every rank",
    )


UNTOLD = Guard(event=LayerBegins, look=untold, when=lambda layer: layer.stepped, code="MOE0713", agreed=True)
NARROWED = Guard(event=LayerBegins, look=narrowed, when=lambda layer: layer.reads_values, code="MOE0711", agreed=True)
