"""The memory of one rank over a training step: what takes it at each moment, and the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Buffers, Bytes, MemoryKind
from moec.passes.cost.liveness import Run, Step, last_uses, run_backward, run_forward, steps_of
from moec.passes.cost.optimizer_work import work_bytes
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.cost.weights import WeightBytes, weight_bytes
from moec.passes.ir import Program
from moec.passes.ir.interface import FORWARD, result_role
from moec.passes.ir.ops import Call
from moec.passes.ir.work.workload import Workload
from moec.passes.place.schedule import is_last_backward, order_of_step

DEVICE_BYTES = {"cuda": 3.9e9, "hip": 3.9e9}
"""What a device's context and its communicators' buffers take: 3.5 GB + 0.4 GB, measured on NVIDIA with NCCL."""


ALWAYS: tuple[MemoryKind, ...] = ("parameters", "optimizer", "device")
"""Kinds of memory that take the same bytes at every moment of a step."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes at the worst moment of one event of a step: `forward of layer 3`, `loss`, `optimizer step`."""

    event: str
    bytes: Bytes
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A distinct layer: its run, the bytes of its parameters, the names of its inputs, and the numbers of its layers.

    `largest_state`: the most bytes that the optimizer keeps for one parameter. `kept` are the bytes that one such layer
    keeps for backward: `run.kept`, and its residual input if that is saved. The layer's other inputs are those of
    the batch, which all layers share.
    """

    run: Run
    weights: WeightBytes
    largest_state: float
    inputs: tuple[str, ...]
    numbers: tuple[int, ...]
    kept: Bytes

    @classmethod
    def of(cls, cost: BlockCost, spec: Spec, microbatches: int, numbers: Iterable[int]) -> LayerMemory:
        """The layer whose ops have these costs."""
        by_parameter = weight_bytes(cost, spec, microbatches).values()
        largest_state = max((weights.optimizer_states for weights in by_parameter), default=0.0)
        run, inputs = Run.of(cost), cost.block.inputs
        residual = [v for v in inputs if v.role == "residual" and v.name in run.inputs]
        return cls(
            run=run,
            weights=sum(by_parameter, WeightBytes()),
            largest_state=largest_state,
            inputs=tuple(v.name for v in inputs),
            numbers=tuple(numbers),
            kept=run.kept + Bytes({"activations": cost.workload.bytes(*residual)}),
        )


@dataclass(frozen=True)
class Memory:
    """One rank over one training step, event by event; with micro-batches, the first one and the last.

    `layers` are the distinct layers by the names of their blocks.
    """

    moments: tuple[Moment, ...]
    layers: Mapping[str, LayerMemory]

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.bytes.total)


def memory_of(program: Program, spec: Spec, workload: Workload | None = None) -> Memory:
    """The memory of the rank with the most rows, for micro-batches of `workload`; by default those of the file."""
    workload = workload or Workload.of_microbatch(spec, program)
    costs, numbers = costs_of(program, workload), program.layers_by_block
    layers = {name: LayerMemory.of(costs[name], spec, program.microbatches, n) for name, n in numbers.items() if n}
    return Memory(tuple(_Timeline(program, spec, costs, layers).moments()), layers)


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """The place of a micro-batch in its step."""

    is_first: bool
    is_last: bool


class _Timeline:
    """Runs one step and notes the bytes at its events."""

    def __init__(
        self, program: Program, spec: Spec, costs: Mapping[str, BlockCost], layers: Mapping[str, LayerMemory]
    ) -> None:
        self.block, self.layers = costs[FORWARD].block, layers
        self.steps = [self._with_inputs(step) for step in steps_of(costs[FORWARD])]
        self.top_level = weight_bytes(costs[FORWARD], spec, program.microbatches)
        self.loss = steps_of(costs["loss"]) if result_role(program) == "logits" else ()
        self.loss_block = costs["loss"].block if self.loss else None
        self.order = order_of_step(program, min(program.microbatches, 2))
        self.last = last_uses(self.steps)
        self.first = {name: i for i in reversed(range(len(self.steps))) for name in self.steps[i].operands}
        self.calls = [i for i, step in enumerate(self.steps) if isinstance(step.op, Call)]
        called = [self._layer(op).weights for op in self.block.ops if isinstance(op, Call)]
        self.weights_of_units = [*self.top_level.values(), *called]
        totals = sum(self.weights_of_units, WeightBytes())
        largest = max(
            [weights.optimizer_states for weights in self.top_level.values()]
            + [layer.largest_state for layer in layers.values()]
        )
        called_blocks = [costs[op.block] for op in self.block.ops if isinstance(op, Call)]
        self.work = work_bytes([costs[FORWARD], *called_blocks], totals.optimizer_states, largest, spec.update)
        self.alive = Buffers()
        self.alive.add("masters", "parameters", totals.masters)
        self.alive.add("states", "optimizer", totals.optimizer_states)
        self.alive.add("device", "device", DEVICE_BYTES.get(spec.cluster.device.kind, 0.0))

    def _layer(self, op: Call) -> LayerMemory:
        return self.layers[op.block]

    def _with_inputs(self, step: Step) -> Step:
        """A call of a layer with the inputs that the layer saves; its run has everything else."""
        if not isinstance(step.op, Call):
            return step
        layer = self._layer(step.op)
        saved = {o: 0.0 for i, o in zip(layer.inputs, step.operands, strict=True) if i in layer.run.inputs}
        return replace(step, saved=saved)

    def moments(self) -> Iterator[Moment]:
        """Every event of the step in order; of a micro-batch, the worst moment of each."""
        moments = list[Moment]()
        for action in self.order:
            match action.kind:
                case "forward":
                    moments += self._forward()
                case "loss":
                    moments += self._loss()
                case "backward":
                    is_last = is_last_backward(self.order, action)
                    microbatch = _Microbatch(is_first=action.microbatch == 0, is_last=is_last)
                    yield from _merged([*moments, *self._backward(microbatch)])
                    moments.clear()
                case "sum":
                    yield self._sums_end()
                case "update":
                    yield self._update()

    # ---- forward -----------------------------------------------------------------------------------

    def _forward(self) -> Iterator[Moment]:
        kept = {output.name for output in self.block.outputs} | {value.name for value in self.block.inputs}
        for index, (step, moment) in enumerate(run_forward(self.steps, self.alive, kept)):
            if not isinstance(step.op, Call):
                yield Moment(self._place("forward", index), moment + self._copies(step, index))
                continue
            layer, number = self._layer(step.op), step.op.layer
            weights = layer.weights
            self.alive.add(f"step copy layer {number}", "compute copies", weights.step_copies)
            moment = self.alive.bytes() + Bytes({"compute copies": weights.compute_copies - weights.step_copies})
            moment += Bytes({"work": -sum(step.results.values())}) + layer.run.forward  # the run has the results
            yield Moment(f"forward of layer {number}", moment + self._gather_of(index + 1), number)
            self.alive.add_all(f"layer {number}", layer.run.kept + Bytes({"compute copies": weights.saved_copies}))
        # A micro-batch's logits live until the next one's loss is computed.
        self.alive.save(self.block.output_values()[0].name, self._result_bytes, "logits and loss")

    @property
    def _result_bytes(self) -> float:
        return self.steps[-1].results.get(self.block.output_values()[0].name, 0.0)

    def _copies(self, step: Step, index: int) -> Bytes:
        """The bytes of the compute copies that an op makes. Adds the copies that later ops use to `alive`."""
        more = 0.0
        for name in self._parameters(step):
            weights = self.top_level[name]
            if self.first[name] == index:
                more += weights.compute_copies
                self.alive.add(f"step copy {name}", "compute copies", weights.step_copies)
                self.alive.add(f"copy {name}", "compute copies", weights.compute_copies - weights.step_copies)
            if self.last[name] == index and not weights.saved_copies:
                self.alive.drop(f"copy {name}")
        return Bytes({"compute copies": more})

    def _gather_of(self, index: int) -> Bytes:
        """The gather of the next layer's weights, which runs beside this layer."""
        step = self.steps[index] if 0 <= index < len(self.steps) else None
        if step is None or not isinstance(step.op, Call):
            return Bytes()
        return Bytes({"communication": self._layer(step.op).weights.gather_buffers})

    def _parameters(self, step: Step) -> list[str]:
        return [name for name in step.operands if name in self.top_level]

    def _place(self, direction: str, index: int) -> str:
        """`forward of the embedding` before the first layer, `forward of the head` after the last."""
        if self.calls and index < self.calls[0]:
            return f"{direction} of the embedding"
        return f"{direction} of the head" if not self.calls or index > self.calls[-1] else f"{direction} between layers"

    # ---- loss and backward -------------------------------------------------------------------------

    def _loss(self) -> Iterator[Moment]:
        """The loss, forward and backward: backward begins with it."""
        assert self.loss_block is not None
        inside = Buffers()
        for _, moment in run_forward(self.loss, inside, {value.name for value in self.loss_block.inputs}):
            yield Moment("loss", self.alive.bytes() + moment.as_one("logits and loss"))
        self.alive.drop("previous logits")
        inside.add(f"d {self.loss_block.outputs[0].name}", "work", 0.0)
        for _, moment in run_backward(self.loss, inside):
            yield Moment("loss", self.alive.bytes() + moment.as_one("logits and loss"))

    def _backward(self, microbatch: _Microbatch) -> Iterator[Moment]:
        result = self.block.output_values()[0]
        self.alive.add(f"d {result.name}", "work", self._result_bytes)
        for value in self.block.output_values()[1:]:
            if value.dtype != "int64":
                self.alive.add(f"d {value.name}", "work", 0.0)
        yield from self._backward_of_all(microbatch)
        self.alive.alias("previous logits", result.name)
        for output in self.block.outputs:
            self.alive.drop(output.name)
            self.alive.drop(f"saved {output.name}")

    def _backward_of_all(self, microbatch: _Microbatch) -> Iterator[Moment]:
        for number, (step, moment) in enumerate(run_backward(self.steps, self.alive)):
            index = len(self.steps) - 1 - number
            if isinstance(step.op, Call):
                yield from self._backward_of(step, step.op, index, microbatch)
                continue
            yield Moment(self._place("backward", index), moment)
            for name in self._parameters(step):
                if self.first[name] == index:
                    sums = self._sums_begin(name, self.top_level[name], microbatch)
                    yield Moment(self._place("backward", index), sums)
                    self.alive.drop(f"copy {name}")

    def _backward_of(self, step: Step, op: Call, index: int, microbatch: _Microbatch) -> Iterator[Moment]:
        layer, event = self._layer(op), f"backward of layer {op.layer}"
        for name in step.results:
            self.alive.drop(f"d {name}")
        gradients = {name: size for name, size in step.differentiated.items() if f"d {name}" in self.alive}
        for name in gradients:  # the run has them
            self.alive.drop(f"d {name}")
        self.alive.drop_all(f"layer {op.layer}")
        ahead = self._gather_of(index - 1) if layer.weights.regathered else Bytes()
        copies = Bytes({"compute copies": layer.weights.saved_copies + layer.weights.regathered}) + ahead
        yield Moment(event, self.alive.bytes() + layer.run.backward + copies, op.layer)
        for name, size in gradients.items():
            self.alive.add(f"d {name}", "work", size)
        self.alive.add(f"d layer {op.layer}", "gradients", layer.weights.narrow_gradients)
        yield Moment(event, self._sums_begin(f"layer {op.layer}", layer.weights, microbatch) + ahead, op.layer)

    def _sums_begin(self, name: str, weights: WeightBytes, microbatch: _Microbatch) -> Bytes:
        """The bytes while the gradients of a layer are widened and their sums begin. Leaves only what sums need."""
        # Where each pass scatters (ZeRO 2, 3), gradients of earlier micro-batches are the parameters' already.
        scattered = weights.scatters_per_pass
        sends = microbatch.is_last or scattered
        # Earlier gradients of a narrow dtype are fp32 copies already: the next are added in place.
        added = weights.collected_gradients if not (microbatch.is_first or scattered or weights.wide_gradients) else 0.0
        self.alive.drop("sent")  # ZeRO waits for the layer before
        # The sum with earlier micro-batches needs new memory; both addends are freed before the sum is sent.
        buffers = weights.all_reduce_buffers + weights.reduce_scatter_buffers if sends else 0.0
        more: dict[MemoryKind, float] = {"gradients": weights.wide_gradients}
        if added > buffers:
            more["gradients"] += added
        else:
            more["communication"] = buffers
        moment = self.alive.bytes() + Bytes(more)
        self.alive.drop(f"d {name}")
        earlier = weights.collected_gradients if scattered and not microbatch.is_first else 0.0
        remaining = weights.pass_gradients if sends else weights.collected_gradients
        self.alive.add(f"sum {name}", "gradients", earlier + remaining)
        self.alive.add("sent", "communication", weights.reduce_scatter_buffers if sends else 0.0)
        return moment

    # ---- after the last backward -------------------------------------------------------------------

    def _sums_end(self) -> Moment:
        """Sums end layer by layer, each with a copy of its part."""
        self.alive.drop("sent")
        most = max(weights.sum_copies for weights in self.weights_of_units)
        moment = Moment("gradient sums", self.alive.bytes() + Bytes({"communication": most}))
        for name in (*self.top_level, *(f"layer {op.layer}" for op in self.block.ops if isinstance(op, Call))):
            self.alive.drop(f"sum {name}")
            self.alive.drop(f"step copy {name}")
        self.alive.drop("previous logits")
        return moment

    def _update(self) -> Moment:
        """The optimizer's step, which reads the summed gradients."""
        reduced = sum(weights.final_gradients for weights in self.weights_of_units)
        work = Bytes({"work": self.work} if self.work else {})
        return Moment("optimizer step", self.alive.bytes() + Bytes({"gradients": reduced}) + work)


def _merged(moments: Iterable[Moment]) -> list[Moment]:
    """The worst moment of each event."""
    worst: dict[str, Moment] = {}
    for moment in moments:
        if moment.event not in worst or moment.bytes.total > worst[moment.event].bytes.total:
            worst[moment.event] = moment
    return list(worst.values())


# ---- how uneven a load fits --------------------------------------------------------------------------------


STEEPEST = 8.0
"""The exponent of the most uneven load that is tried: nearly all rows go to the first expert."""


def largest_skew(program: Program, spec: Spec) -> float | None:
    """The largest ratio of the busiest rank's load to the mean at which a step still fits the device.

    0 if it does not fit under an even load either; None if no load exceeds the device.
    """
    even = Workload.of_microbatch(spec, program).even

    def fits(exponent: float) -> bool:
        peak = memory_of(program, spec, replace(even, exponent=exponent)).peak.bytes.total
        return peak <= spec.cluster.device.memory

    if fits(STEEPEST):
        return None
    if not fits(0.0):
        return 0.0
    low, high = 0.0, STEEPEST
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(cost.skew() for cost in costs_of(program, replace(even, exponent=low)).values())
