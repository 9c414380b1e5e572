"""The fastest way of a product by the model, if it is faster than the usual one by a margin."""

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
    """A way, and its predicted speed relative to the usual way."""

    way: Way
    gain: float


def best_way(
    kernel: Kernel,
    usual: Way,
    candidates: Iterable[Way],
    layer: ExpertLayer,
    load: Load,
    device: DeviceModel,
    *,
    bulk: bool = False,
    margin: float,
) -> BestWay:
    """The fastest of `candidates` if it is predicted `margin` times as fast as the usual way, else the usual way.

    Ties go to the earlier one. Ways that do not fit the device are never chosen, unless the usual one is such.
    """
    seconds = {way: predict(kernel, way, layer, load, device, bulk=bulk).seconds for way in (usual, *candidates)}
    best = min(seconds, key=seconds.__getitem__)
    gain = seconds[usual] / seconds[best]
    return BestWay(best, gain) if gain >= margin else BestWay(usual, 1.0)
