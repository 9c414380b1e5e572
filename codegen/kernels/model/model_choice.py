"""The fastest way of a product by the model, and whether it is worth leaving the usual one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.kernels.model.model import predict
from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.tiles import Kernel, Way


@dataclass(frozen=True, slots=True)
class BestWay:
    """A way, and how many times as fast as the usual way it is predicted to be."""

    way: Way
    gain: float


def best_way(
    kernel: Kernel,
    usual: Way,
    others: Iterable[Way],
    layer: ExpertLayer,
    load: Load,
    device: DeviceModel,
    *,
    bulk: bool = False,
    margin: float,
) -> BestWay:
    """The fastest of `others` if it is predicted `margin` times as fast as the usual way, else the usual way.

    Ties go to the earlier one. Ways that do not fit the device are never chosen, unless the usual one is such.
    """
    seconds = {way: predict(kernel, way, layer, load, device, bulk=bulk).seconds for way in (usual, *others)}
    best = min(seconds, key=seconds.__getitem__)
    gain = seconds[usual] / seconds[best]
    return BestWay(best, gain) if gain >= margin else BestWay(usual, 1.0)
