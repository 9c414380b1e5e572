"""The passes of one pipeline stage over one micro-batch on one rank: the bytes at each moment, and what they leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Buffers, Bytes, MemoryKind
from moec.passes.cost.liveness import Run, Step, last_uses, run_backward, run_deferred, run_forward, steps_of
from moec.passes.cost.pipeline_passes import PassPosition
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.weights import WeightBytes, weight_bytes
from moec.passes.ir import Program
from moec.passes.ir.interface import HANDED_ON, forwards, result_role
from moec.passes.ir.ops import Call
from moec.passes.ir.order import ActionKind


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes at the worst moment of one event of a step: `forward of layer 3`, `loss`, `optimizer step`."""

    event: str
    bytes: Bytes
    layer: int | None = None

    def of_layer(self, numbers: Mapping[int, int]) -> Moment:
        """The same moment of the layer whose number `numbers` gives for this one's."""
        if self.layer is None:
            return self
        event = self.event.removesuffix(str(self.layer))
        return replace(self, event=f"{event}{numbers[self.layer]}", layer=numbers[self.layer])


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
    def of(cls, cost: BlockCost, spec: Spec, program: Program, uneven: BlockCost) -> LayerMemory:
        """The layer whose ops have these costs; `uneven` are those while it runs, where its load is at its worst."""
        by_parameter = weight_bytes(cost, spec, program.microbatches, in_pipeline=len(program.stages) > 1).values()
        largest_state = max((weights.optimizer_states for weights in by_parameter), default=0.0)
        run, inputs = Run.of(cost, splits=program.splits_backward), cost.block.inputs
        if uneven is not cost:
            worst = Run.of(uneven, splits=program.splits_backward)
            run = replace(run, forward=worst.forward, backward=worst.backward, to_inputs=worst.to_inputs)
        residual = [v for v in inputs if v.role == "residual" and v.name in run.inputs]
        return cls(
            run=run,
            weights=sum(by_parameter, WeightBytes()),
            largest_state=largest_state,
            inputs=tuple(v.name for v in inputs),
            numbers=tuple(program.layers_by_block[cost.block.name]),
            kept=run.kept + Bytes({"activations": cost.workload.bytes(*residual)}),
        )


class StageMemory:
    """Runs the passes of a micro-batch. What lasts longer is in `step`, which the stages of a rank share.

    `left`: the bytes that a micro-batch keeps after its latest action of each kind; `after`: the buffers, of the stage
    and of its loss. Both are known once such a pass ran.
    """

    def __init__(
        self,
        program: Program,
        spec: Spec,
        costs: Mapping[str, BlockCost],
        layers: Mapping[str, LayerMemory],
        stage: int,
        step: Buffers,
    ) -> None:
        stages = forwards(program)
        self.block, self.layers, self.step = stages[stage], layers, step
        cost = costs[self.block.name]
        self.is_first_stage, self.is_last_stage = stage == 0, stage == len(stages) - 1
        self.steps = [self._with_inputs(step) for step in steps_of(cost)]
        self.top_level = weight_bytes(cost, spec, program.microbatches, in_pipeline=len(program.stages) > 1)
        has_loss = self.is_last_stage and result_role(program) == "logits"
        self.loss_steps = steps_of(costs["loss"]) if has_loss else ()
        self.loss_block = costs["loss"].block if has_loss else None
        self.last = last_uses(self.steps)
        self.first = {name: i for i in reversed(range(len(self.steps))) for name in self.steps[i].operands}
        self.calls = [i for i, step in enumerate(self.steps) if isinstance(step.op, Call)]
        handed_on = [v for v in self.block.inputs if not self.is_first_stage and v.role in HANDED_ON]
        self.inputs = {value.name: cost.workload.bytes(value) for value in handed_on}
        self.result, self.result_bytes = self.block.outputs[0].name, cost.workload.bytes(self.block.output_values()[0])
        outputs = zip(self.block.outputs, self.block.output_values(), strict=True)
        differentiable = [v for output, v in outputs if output.layer is None and v.dtype != "int64"]
        self.gradients = {value.name: cost.workload.bytes(value) for value in differentiable}
        self.left: dict[ActionKind, Bytes] = {"receive": Bytes({"activations": sum(self.inputs.values())})}
        self.after: dict[ActionKind, tuple[Buffers, Buffers]] = {}
        self.alive, self.inside_loss = Buffers(step), Buffers()

    def run(self, kind: ActionKind, position: PassPosition) -> list[Moment]:
        """The moments of a pass, or of a loss. Each begins with a copy of the buffers that the pass before it left, for
        an equal micro-batch; a forward pass begins with none."""
        if kind == "forward":
            self.alive, self.inside_loss = Buffers(self.step), Buffers()
        else:
            follows: dict[ActionKind, ActionKind] = {"loss": "forward", "weights": "inputs"}
            alive, inside_loss = self.after[follows.get(kind, "loss" if self.loss_steps else "forward")]
            self.alive, self.inside_loss = alive.copy(), inside_loss.copy()
        match kind:
            case "forward":
                moments = list(self._forward())
            case "loss":
                moments = list(self._loss())
            case "weights":
                moments = list(self._weights(position))
            case _:
                moments = list(self._backward(kind, position))
        self.after[kind] = self.alive, self.inside_loss
        inside = self.inside_loss.alone()
        self.left[kind] = self.alive.alone()
        if inside.of:
            self.left[kind] += inside.as_one("logits and loss")
        if kind == "forward" and not self.is_last_stage:
            self.left["receive_gradients"] = self.left[kind] + Bytes({"work": sum(self.gradients.values())})
        return moments

    def layer_calls(self) -> list[Call]:
        """The calls of the stage's layers, in order."""
        return [op for op in self.block.ops if isinstance(op, Call)]

    def _layer(self, op: Call) -> LayerMemory:
        return self.layers[op.block]

    def _with_inputs(self, step: Step) -> Step:
        """A call of a layer with the inputs that the layer saves; its run has everything else."""
        if not isinstance(step.op, Call):
            return step
        layer = self._layer(step.op)
        saved = {o: 0.0 for i, o in zip(layer.inputs, step.operands, strict=True) if i in layer.run.inputs}
        return replace(step, saved=saved)

    # ---- forward -----------------------------------------------------------------------------------

    def _forward(self) -> Iterator[Moment]:
        for name, size in self.inputs.items():
            self.alive.add(name, "activations", size)
        kept = {output.name for output in self.block.outputs} | {value.name for value in self.block.inputs}
        for index, (step, moment) in enumerate(run_forward(self.steps, self.alive, kept)):
            if not isinstance(step.op, Call):
                yield Moment(self._part_in_words("forward", index), moment + self._copies(step, index))
                continue
            layer, number = self._layer(step.op), step.op.layer
            weights = layer.weights
            self.step.add(f"step copy layer {number}", "compute copies", weights.step_copies)
            moment = self.alive.bytes() + Bytes({"compute copies": weights.compute_copies - weights.step_copies})
            moment += Bytes({"work": -sum(step.results.values())}) + layer.run.forward  # the run has the results
            yield Moment(f"forward of layer {number}", moment + self._gather_of(index + 1), number)
            self.alive.add_all(f"layer {number}", layer.run.kept + Bytes({"compute copies": weights.saved_copies}))
        if self.is_last_stage:
            self.alive.save(self.result, self.result_bytes, "logits and loss")
        else:
            for output in self.block.outputs:
                if output.role in HANDED_ON:
                    self.alive.drop(output.name)

    def _copies(self, step: Step, index: int) -> Bytes:
        """The bytes of the compute copies that an op makes. Adds the copies that later ops use."""
        more = 0.0
        for name in self._parameters(step):
            weights = self.top_level[name]
            if self.first[name] == index:
                more += weights.compute_copies
                self.step.add(f"step copy {name}", "compute copies", weights.step_copies)
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

    def _part_in_words(self, direction: str, index: int) -> str:
        """`forward of the embedding` before the first layer of the model, `forward of the head` after the last."""
        if self.is_first_stage and self.calls and index < self.calls[0]:
            return f"{direction} of the embedding"
        if self.is_last_stage and (not self.calls or index > self.calls[-1]):
            return f"{direction} of the head"
        return f"{direction} between layers"

    # ---- loss and backward -------------------------------------------------------------------------

    def _loss(self) -> Iterator[Moment]:
        if self.loss_block is None:
            return
        for _, moment in run_forward(self.loss_steps, self.inside_loss, {v.name for v in self.loss_block.inputs}):
            yield Moment("loss", self.alive.bytes() + moment.as_one("logits and loss"))
        self.alive.drop(self.result)
        self.alive.drop(f"saved {self.result}")

    def _backward_of_loss(self) -> Iterator[Moment]:
        if self.loss_block is not None:
            self.inside_loss.add(f"d {self.loss_block.outputs[0].name}", "work", 0.0)
        for _, moment in run_backward(self.loss_steps, self.inside_loss):
            yield Moment("loss", self.alive.bytes() + moment.as_one("logits and loss"))
        self.inside_loss = Buffers()  # what is left, the gradient of the logits, goes on as that of the stage's result

    def _backward(self, kind: ActionKind, position: PassPosition) -> Iterator[Moment]:
        """A backward pass: `inputs` leaves the queue of products that `weights` takes."""
        yield from self._backward_of_loss()
        defers = kind == "inputs"
        direction = "backward to inputs" if defers else "backward"
        for name, size in self.gradients.items():
            self.alive.add(f"d {name}", "work", size)
        for number, (step, moment) in enumerate(run_backward(self.steps, self.alive, defers=defers)):
            index = len(self.steps) - 1 - number
            if isinstance(step.op, Call):
                yield from self._backward_of_layer(step, step.op, index, direction, None if defers else position)
                continue
            yield Moment(self._part_in_words(direction, index), moment)
            if defers:
                for name in self._parameters(step):
                    if self.first[name] == index:
                        self.alive.drop(f"copy {name}")
            else:
                yield from self._sums_of_top_level(step, index, direction, position)
        for output in self.block.outputs:
            self.alive.drop(output.name)
            self.alive.drop(f"saved {output.name}")
        for name in self.inputs:
            self.alive.drop(name)
            self.alive.drop(f"d {name}")

    def _backward_of_layer(
        self, step: Step, op: Call, index: int, direction: str, position: PassPosition | None
    ) -> Iterator[Moment]:
        """The backward pass of a layer; to its inputs only if `position` is None."""
        layer, event = self._layer(op), f"{direction} of layer {op.layer}"
        for name in step.results:
            self.alive.drop(f"d {name}")
        gradients = {name: size for name, size in step.differentiated.items() if f"d {name}" in self.alive}
        for name in gradients:  # the run has them
            self.alive.drop(f"d {name}")
        self.alive.drop_all(f"layer {op.layer}")
        ahead = self._gather_of(index - 1) if layer.weights.regathered else Bytes()
        copies = Bytes({"compute copies": layer.weights.saved_copies + layer.weights.regathered}) + ahead
        run = layer.run.backward if position is not None else layer.run.to_inputs
        yield Moment(event, self.alive.bytes() + run + copies, op.layer)
        for name, size in gradients.items():
            self.alive.add(f"d {name}", "work", size)
        if position is None:
            self.alive.add_all(f"queue of layer {op.layer}", layer.run.queued)
        else:
            self.alive.add(f"d layer {op.layer}", "gradients", layer.weights.narrow_gradients)
            yield Moment(event, self._sums_begin(f"layer {op.layer}", layer.weights, position) + ahead, op.layer)

    def _weights(self, position: PassPosition) -> Iterator[Moment]:
        """The products that `inputs` left, and the sums of all gradients."""
        direction = "backward to weights"
        for index in reversed(range(len(self.steps))):
            step = self.steps[index]
            if isinstance(step.op, Call):
                layer, number = self._layer(step.op), step.op.layer
                event = f"{direction} of layer {number}"
                left = layer.weights.narrow_gradients - layer.run.queued.of.get("gradients", 0.0)
                yield Moment(event, self.alive.bytes() + Bytes({"gradients": left}), number)
                self.alive.drop_all(f"queue of layer {number}")
                self.alive.add(f"d layer {number}", "gradients", layer.weights.narrow_gradients)
                yield Moment(event, self._sums_begin(f"layer {number}", layer.weights, position), number)
                continue
            if step.defers:
                yield Moment(self._part_in_words(direction, index), run_deferred(step, self.alive))
            yield from self._sums_of_top_level(step, index, direction, position)

    def _sums_of_top_level(self, step: Step, index: int, direction: str, position: PassPosition) -> Iterator[Moment]:
        """The sums of the parameters beside layers whose backward is complete with that of `step`."""
        for name in self._parameters(step):
            if self.first[name] == index:
                sums = self._sums_begin(name, self.top_level[name], position)
                yield Moment(self._part_in_words(direction, index), sums)
                self.alive.drop(f"copy {name}")

    def _sums_begin(self, name: str, weights: WeightBytes, position: PassPosition) -> Bytes:
        """The bytes while the gradients of a layer are widened and their sums begin. Leaves only what sums need."""
        # Where each pass scatters (ZeRO 2, 3), gradients of earlier micro-batches are the parameters' already.
        scattered = weights.scatters_per_pass
        sends = position.is_last or scattered
        # Earlier gradients of a narrow dtype are fp32 copies already: the next are added in place.
        added = weights.collected_gradients if not (position.is_first or scattered or weights.wide_gradients) else 0.0
        self.step.drop("sent")  # ZeRO waits for the layer before
        # The sum with earlier micro-batches needs new memory; both addends are freed before the sum is sent.
        buffers = weights.all_reduce_buffers + weights.reduce_scatter_buffers if sends else 0.0
        more: dict[MemoryKind, float] = {"gradients": weights.wide_gradients}
        if added > buffers:
            more["gradients"] += added
        else:
            more["communication"] = buffers
        moment = self.alive.bytes() + Bytes(more)
        self.alive.drop(f"d {name}")
        earlier = weights.collected_gradients if scattered and not position.is_first else 0.0
        remaining = weights.pass_gradients if sends else weights.collected_gradients
        self.step.add(f"sum {name}", "gradients", earlier + remaining)
        self.step.add("sent", "communication", weights.reduce_scatter_buffers if sends else 0.0)
        return moment
