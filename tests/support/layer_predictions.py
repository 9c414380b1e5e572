"""A whole expert layer by the model: the kernels of its forward and backward, their times, and their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.model.model import Prediction, predict, predict_pass, predict_schedule
from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_libraries import finds_rows_at_hand
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer, Schedule
from moec.codegen.kernels.row_shapes import PlacesShape, QueuesShape
from moec.codegen.kernels.shapes import RouteShape
from moec.codegen.kernels.tiles import KERNELS, Kernel, Ways
from moec.codegen.kernels.work import work_of_rows

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """One kernel of a layer, its direction and its prediction."""

    name: str
    direction: Direction
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """The kernels of a layer over `rows` rows, in order. Times are seconds."""

    kernels: tuple[LayerKernel, ...]
    layer: ExpertLayer
    rows: float
    host_launch: float

    def seconds(self, direction: Direction, graph: bool = True) -> float:
        """All kernels one after another; without a graph, no faster than the host launches them."""
        predictions = [kernel.prediction for kernel in self.kernels if kernel.direction == direction]
        device = sum(kernel.seconds for kernel in predictions)
        return device if graph else max(device, self.host_launch * sum(kernel.launches for kernel in predictions))

    def flops(self, direction: Direction) -> float:
        """By convention: 6 · T · k · D · F forward if gated (4 if not), and twice as much backward."""
        forward = 2 * (self.layer.parts + 1) * self.rows * self.layer.dim * self.layer.hidden
        return forward if direction == "forward" else 2 * forward

    def tflops(self, direction: Direction, graph: bool = True) -> float:
        """10¹² floating-point operations per second, by that convention."""
        return self.flops(direction) / self.seconds(direction, graph) / 1e12


def predict_layer(
    ways: Ways, layer: ExpertLayer, load: Load, device: DeviceModel, *, bulk: bool = False
) -> LayerPrediction:
    """A local layer with a softmax router: routing, counting, the six products, and the sums of rows."""
    products = {kernel: _product(kernel, ways, layer, load, device, bulk) for kernel in KERNELS}
    return _layer(products, layer, load, device)


def predict_schedules(
    schedules: dict[Kernel, Schedule], layer: ExpertLayer, load: Load, device: DeviceModel
) -> LayerPrediction:
    """A local layer with a softmax router and a schedule for each product."""
    products = {
        kernel: predict_schedule(kernel, schedule, layer, load, device) for kernel, schedule in schedules.items()
    }
    return _layer(products, layer, load, device)


def _product(kernel: Kernel, ways: Ways, layer: ExpertLayer, load: Load, device: DeviceModel, bulk: bool) -> Prediction:
    at_hand = finds_rows_at_hand(kernel, ways)
    return predict(kernel, ways.of(kernel), layer, load, device, bulk=bulk, rows_at_hand=at_hand)


def _layer(products: dict[Kernel, Prediction], layer: ExpertLayer, load: Load, device: DeviceModel) -> LayerPrediction:
    kernels = tuple(_kernels(products, layer, load, device))
    return LayerPrediction(kernels, layer, load.rows, device.host_launch)


def _kernels(
    products: dict[Kernel, Prediction], layer: ExpertLayer, load: Load, device: DeviceModel
) -> Iterator[LayerKernel]:
    k, experts = max(1, layer.k), layer.experts
    tokens = round(load.rows / k)
    route = RouteShape(experts=experts, k=k, score="softmax", after=True, normalize=True, dtype="fp32")
    queues = QueuesShape(experts=experts, k=1)
    places = PlacesShape(k=k, dim=layer.dim, dtype=layer.dtype, weights="fp32")

    def small(shape: KernelShape, *names: str, direction: Direction = "forward") -> Iterator[LayerKernel]:
        for name in names:
            moved = work_of_rows(shape, name, tokens, tokens * k)
            yield LayerKernel(name, direction, predict_pass(moved.moved if moved else 0, device))

    def product(kernel: Kernel) -> LayerKernel:
        return LayerKernel(kernel, "forward" if kernel in ("up", "down") else "backward", products[kernel])

    yield from small(route, "route")
    yield from small(queues, "count", "scan", "rank")
    yield from small(places, "invert")
    yield LayerKernel("table", "forward", predict_pass(0, device))
    yield product("up")
    yield product("down")
    yield from small(places, "combine")
    yield product("down_backward")
    yield from small(places, "add_parts", direction="backward")
    yield product("down_weights")
    yield product("up_backward")
    yield product("up_weights")
    yield from small(places, "add_rows", direction="backward")
    yield from small(route, "route_backward", direction="backward")
