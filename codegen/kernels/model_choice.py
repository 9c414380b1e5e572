"""The fastest way of a product by the model, and whether it is worth leaving the usual one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.kernels.model import Prediction, predict
from moec.codegen.kernels.model_device import DeviceModel
from moec.codegen.kernels.model_loads import Load
from moec.codegen.kernels.model_tiles import ExpertLayer
from moec.codegen.kernels.tiles import Kernel, Way

MARGIN = 1.1
"""A way replaces the usual one only if it is predicted to be so many times as fast: nothing here was calibrated."""


@dataclass(frozen=True, slots=True)
class BestWay:
    """A way, its prediction, that of the usual way, and the reason in a few words."""

    way: Way
    prediction: Prediction
    usual: Prediction
    why: str


def best_way(
    kernel: Kernel,
    usual: Way,
    others: Iterable[Way],
    layer: ExpertLayer,
    load: Load,
    device: DeviceModel,
    *,
    bulk: bool = False,
    margin: float = MARGIN,
) -> BestWay:
    """The fastest of `others` if it is predicted `margin` times as fast as the usual way, else the usual way.

    Ties go to the earlier one. Ways that do not fit the device are never chosen, unless the usual one is such.
    """
    at_first = predict(kernel, usual, layer, load, device, bulk=bulk)
    found = [(way, predict(kernel, way, layer, load, device, bulk=bulk)) for way in others]
    best, prediction = min([(usual, at_first), *found], key=lambda pair: pair[1].seconds)
    gain = at_first.seconds / prediction.seconds
    if best == usual or gain < margin:
        return BestWay(usual, at_first, at_first, f"bound by {at_first.bound}; no other way is {margin:.2g} × as fast")
    return BestWay(
        best, prediction, at_first, f"predicted {gain:.2f} × as fast as {usual}, which {at_first.bound} bounds"
    )
