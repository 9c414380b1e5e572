"""The kernels of a rank of a plan, compiled for its device: resources, work, and the model's prediction of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moec.codegen.kernels.around_shape import AroundShape
from moec.codegen.kernels.model.model import Prediction, predict, predict_pass
from moec.codegen.kernels.model.model_calibration import device_model
from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_libraries import finds_rows_at_hand
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.plan_kernels import PlanKernel, kernels_of
from moec.codegen.kernels.plan_ways import Experts, rows_per_rank, tokens_per_rank, ways_of
from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.resources import Resources
from moec.codegen.kernels.stored_tiles import Choice
from moec.codegen.kernels.tiles import KERNELS, Kernel, Way
from moec.codegen.kernels.work import KernelWork, work_of
from moec.codegen.plan import Plan
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Op
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.work.cost import Work
from moec.passes.ir.work.workload import Workload

TARGETS: Mapping[str, str] = {
    "a100": "sm_80",
    "h100": "sm_90",
    "h200": "sm_90",
    "b200": "sm_100",
    "b300": "sm_100",
    "gb200": "sm_100",
    "gb300": "sm_100",
    "mi300x": "gfx942",
    "rtx_4090": "sm_80",
    "cuda": "sm_90",
    "hip": "gfx942",
}
"""The compile target by a device's name, else by its kind."""

Direction = Literal["forward", "backward"]

BACKWARD = ("add_parts", "mark", "through", "scatter")
"""Kernels of backward whose names do not end in `_backward`, `_weights` or `_bias`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedKernel:
    """One kernel. `resources` is None for a library's product, `work` for small kernels, `prediction` without a model.

    The prediction of a library's product includes the passes around it, which have no predictions of their own.
    """

    kernel: str
    direction: Direction
    way: Way | None
    resources: Resources | None
    work: KernelWork | None
    prediction: Prediction | None
    line: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBlock:
    """The kernels of a block; if it has experts, the tiles and libraries of their products, their layer, their rows."""

    block: str
    kernels: tuple[ListedKernel, ...]
    choice: Choice | None
    layer: ExpertLayer | None
    rows: int

    def predicted(self, direction: Direction) -> float | None:
        """Seconds of all kernels one after another; None without a model."""
        predictions = [prediction.prediction for prediction in self.kernels if prediction.direction == direction]
        return sum(prediction.seconds for prediction in predictions if prediction) if any(predictions) else None

    def flops(self, direction: Direction) -> float:
        """By convention: 6 · rows · dim · hidden forward if gated (4 if not), twice as much backward."""
        if self.layer is None:
            return 0.0
        forward = 2.0 * (self.layer.parts + 1) * self.rows * self.layer.dim * self.layer.hidden
        return forward if direction == "forward" else 2 * forward


class KernelListing:
    """The kernels of one rank, block by block. Compiles them on the first use of `blocks`, which takes some seconds."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = plan.spec.cluster.device
        self.tokens = tokens_per_rank(plan)

    @cached_property
    def target(self) -> str:
        """The compile target of the plan's device, which is not a CPU."""
        return TARGETS.get(self.device.name) or TARGETS[self.device.kind]

    @cached_property
    def model(self) -> DeviceModel | None:
        """The model of the plan's device."""
        return device_model(self.device.name)

    @cached_property
    def blocks(self) -> tuple[ListedBlock, ...]:
        """The blocks that launch kernels, with their kernels."""
        by_block: dict[str, list[PlanKernel]] = {}
        for kernel in kernels_of(self.plan):
            by_block.setdefault(kernel.block, []).append(kernel)
        return tuple(self._block(block, kernels) for block, kernels in by_block.items())

    def _block(self, name: str, kernels: list[PlanKernel]) -> ListedBlock:
        block, workload = self.plan.program.block(name), Workload.of_microbatch(self.plan.spec, self.plan.program).even
        costs = [(op, cost.work) for op, cost in BlockCost.of(self.plan.program, block, workload).costs]
        products = next((kernel for kernel in kernels if isinstance(kernel.shape, ProductShape)), None)
        layer = _layer(products) if products is not None else None
        choice = self._choice(products) if products is not None else None
        listed = [
            self._compiled(kernel, resources, work, choice)
            for kernel in kernels
            for op, work in costs
            if op is kernel.op
            for resources in self._compile(kernel)
        ]
        if products is not None and choice is not None:
            op_work = next(work for op, work in costs if op is products.op)
            listed += self._library_kernels(products, op_work, choice)
        rows = rows_per_rank(self.plan, products.k) if products is not None else 0
        return ListedBlock(block=name, kernels=tuple(listed), choice=choice, layer=layer, rows=rows)

    def _compile(self, kernel: PlanKernel) -> Iterator[Resources]:
        from moec.runtime.backends.triton.triton_compile import compile_kernels

        return compile_kernels(kernel.shape, self.target, kernel.launched)

    def _choice(self, kernel: PlanKernel) -> Choice:
        assert isinstance(kernel.op, Experts)
        return ways_of(self.plan, self.plan.program.block(kernel.block), kernel.op)

    def _compiled(self, kernel: PlanKernel, resources: Resources, op_work: Work, choice: Choice | None) -> ListedKernel:
        rows = rows_per_rank(self.plan, kernel.k)
        work = work_of(kernel.shape, resources.kernel, op_work, self.tokens, rows)
        product = next((name for name in KERNELS if name == resources.kernel), None)
        way = choice.ways.of(product) if choice is not None and product is not None else None
        return ListedKernel(
            kernel=resources.kernel,
            direction=direction_of(kernel.op, resources.kernel),
            way=way,
            resources=resources,
            work=work,
            prediction=self._predicted(kernel, product, choice, resources.blocks, work),
            line=kernel.span,
        )

    def _predicted(
        self,
        kernel: PlanKernel,
        product: Kernel | None,
        choice: Choice | None,
        blocks: int | None,
        work: KernelWork | None,
    ) -> Prediction | None:
        if self.model is None or isinstance(kernel.shape, AroundShape):
            return None
        if product is None or choice is None:
            return predict_pass(work.moved if work else 0, self.model)
        bulk = isinstance(kernel.shape, ProductShape) and kernel.shape.persistent(product)
        return predict(
            product,
            choice.ways.of(product),
            _layer(kernel),
            self._load(kernel),
            self.model,
            bulk=bulk,
            blocks=blocks,
            rows_at_hand=finds_rows_at_hand(product, choice.ways),
        )

    def _load(self, kernel: PlanKernel) -> Load:
        """The load if all experts of all ranks are chosen with equal probability."""
        shape = kernel.shape
        assert isinstance(shape, ProductShape)
        mesh = self.plan.meshes[self.plan.program.block(kernel.block).experts or "dense"]
        return Load.uniform_over_ranks(self.tokens, shape.experts, kernel.k, dict(mesh.axes).get("ep", 1))

    def _library_kernels(self, kernel: PlanKernel, op_work: Work, choice: Choice) -> Iterator[ListedKernel]:
        """The products that a library computes; they are not compiled."""
        rows = rows_per_rank(self.plan, kernel.k)
        for product in KERNELS:
            way = choice.ways.of(product)
            if isinstance(way, str):
                yield ListedKernel(
                    kernel=product,
                    direction=direction_of(kernel.op, product),
                    way=way,
                    resources=None,
                    work=work_of(kernel.shape, product, op_work, self.tokens, rows),
                    prediction=self._predicted(kernel, product, choice, None, None),
                    line=kernel.span,
                )


def _layer(kernel: PlanKernel) -> ExpertLayer:
    shape = kernel.shape
    assert isinstance(shape, ProductShape)
    return ExpertLayer(
        experts=shape.experts,
        dim=shape.dim,
        hidden=shape.hidden,
        gated=ACTIVATIONS[shape.activation].gated,
        dtype=shape.dtype,
        k=shape.k,
    )


def direction_of(op: Op, kernel: str) -> Direction:
    """Whether a kernel runs in an op's forward or backward."""
    if kernel.endswith(("_backward", "_weights", "_bias")) or kernel in BACKWARD:
        return "backward"
    moved_back = "fill" if isinstance(op, o.SumRows) else "add_rows"
    return "backward" if kernel == moved_back else "forward"
