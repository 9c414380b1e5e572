"""The bytes alive during one run of a block, forward and backward, op by op.

A value lives from its op to its last use, and until backward if an op saves it. The gradient of a value lives from the
first op that adds to it to the op that made the value. `Cost.scratch` is what an op takes beside these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moec.passes.cost.buffers import Buffers, Bytes, largest
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Recompute
from moec.passes.ir.op import Op
from moec.passes.ir.value import State, Value
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Cost


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a block, with the bytes of its tensors by name.

    `saved` has values, and tensors inside the op with `:` in the name, but no parameters. `differentiated` are the
    operands that get a gradient; empty if no result gets one. `scratch` is that of `cost`, the op's own. `defers`: its
    gradients of weights are products of their own, which a backward pass to inputs only leaves for later.
    """

    op: Op
    operands: tuple[str, ...]
    results: Mapping[str, float]
    saved: Mapping[str, float]
    differentiated: Mapping[str, float]
    scratch: tuple[float, float]
    cost: Cost
    defers: bool = False

    @property
    def key(self) -> str:
        """The name of its first result."""
        return next(iter(self.results), "")

    def without_saving(self) -> Step:
        """This op where backward computes everything again, except a router's choices and the counts of their rows."""
        is_kept = self.op.scores or self.op.chooses or self.op.copies_to_host
        return replace(self, saved=dict(self.results) if is_kept else {})

    def without_inner(self) -> Step:
        """An op of experts that saves its operands, and whose backward runs its forward again."""
        if not self.cost.of_experts:
            return self
        inner = sum(size for name, size in self.saved.items() if ":" in name)
        ahead, behind = self.scratch
        again = inner + sum(self.results.values()) + larger(ahead, behind)
        saved = {name: size for name, size in self.saved.items() if ":" not in name and name not in self.results}
        return replace(self, saved=saved, scratch=(ahead + inner, again))


def steps_of(cost: BlockCost) -> tuple[Step, ...]:
    """The ops of a block in order."""
    scope, bytes_of = cost.block.scope, dict[str, float]()

    def size_of(name: str, value: Value) -> float:
        if name not in bytes_of:
            bytes_of[name] = cost.workload.bytes(value)
        return bytes_of[name]

    graded = {v.name for v in cost.block.inputs if v.dtype != "int64"} | {f"@{p.name}" for p in cost.block.parameters}
    steps = []
    for op, of_op in cost.costs:
        names = op.named(op.operands)
        wanted = {operand for name, operand in names.items() if name not in op.constants and operand in graded}
        floating = [v for v in op.results if v.dtype != "int64"]
        if wanted:
            graded.update(v.name for v in floating)
        wanted = {name for name in wanted if floating and not isinstance(scope[name], State)}
        steps.append(
            Step(
                op,
                op.operands,
                {v.name: size_of(v.name, v) for v in op.results},
                {s.name: s.bytes for s in of_op.saved if not s.is_parameter},
                {name: size_of(name, scope[name]) for name in sorted(wanted)},
                of_op.scratch,
                of_op,
                defers=bool(of_op.work.backward.of_weights.products),
            )
        )
    return tuple(steps)


def last_uses(steps: Sequence[Step]) -> Mapping[str, int]:
    """The number of the last op that uses each value."""
    return {name: index for index, step in enumerate(steps) for name in step.operands}


def savers(steps: Sequence[Step]) -> Mapping[int, list[str]]:
    """For each op, the tensors whose first saver it is: its backward is the last to read them."""
    saved_first: dict[int, list[str]] = {}
    seen: set[str] = set()
    for index, step in enumerate(steps):
        new = [name for name in step.saved if name not in seen]
        seen.update(new)
        saved_first[index] = new
    return saved_first


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a layer: the worst moments, and what remains for backward.

    The caller has the inputs and the parameters. `backward` includes the gradients of outputs, of inputs, and of
    parameters so far. `inputs` are the inputs that are saved. `to_inputs` is the worst moment of a backward pass that
    leaves the products for gradients of weights to later, `queued` what it leaves: the operands and the results'
    gradients of these products, and the gradients of other parameters.
    """

    forward: Bytes
    kept: Bytes
    backward: Bytes
    inputs: frozenset[str]
    to_inputs: Bytes = field(default_factory=Bytes)
    queued: Bytes = field(default_factory=Bytes)

    @classmethod
    def of(cls, cost: BlockCost, *, splits: bool = False) -> Run:
        """The run of a block whose ops have these costs, with what its `recompute` leaves. `splits`: it also has a
        backward pass to its inputs only."""
        return cls.of_steps(steps_of(cost), cost, cost.block.recompute, splits=splits)

    @classmethod
    def of_steps(cls, steps: Sequence[Step], cost: BlockCost, recompute: Recompute, *, splits: bool) -> Run:
        """The run of a block with these steps and any `recompute`."""
        inputs = {value.name for value in cost.block.inputs}
        if recompute == "experts":
            steps = tuple(step.without_inner() for step in steps)
        forward, alive = _forward(cost, steps)
        first, kept = forward, alive.bytes()
        backward, to_inputs, queued = _backward(cost, steps, alive), Bytes(), Bytes()
        if splits:
            _, alive = _forward(cost, steps)
            to_inputs = _backward(cost, steps, alive, defers=True)
            for name in inputs:
                alive.drop(f"d {name}")
            queued = alive.bytes()
        saved = {name for step in steps for name in step.saved}
        if recompute == "layer":
            first, alive = _forward(cost, [step.without_saving() for step in steps])
            kept, backward, saved = alive.bytes(), largest(forward, backward), inputs
            to_inputs = largest(forward, to_inputs)
        return cls(first, kept, backward, frozenset(inputs & saved), to_inputs, queued)


def _forward(cost: BlockCost, steps: Sequence[Step]) -> tuple[Bytes, Buffers]:
    """The worst moment of forward, and what is saved after it."""
    alive, outputs = Buffers(), [output.name for output in cost.block.outputs]
    kept = {*outputs, *(value.name for value in cost.block.inputs)}
    worst = largest(*(moment for _, moment in run_forward(steps, alive, kept)))
    for name in outputs:
        alive.drop(name)
    return worst, alive


def _backward(cost: BlockCost, steps: Sequence[Step], alive: Buffers, *, defers: bool = False) -> Bytes:
    """The worst moment of backward, from what is saved."""
    for value in cost.block.output_values():
        if value.dtype != "int64":
            alive.add(f"d {value.name}", "work", cost.workload.bytes(value))
    return largest(*(moment for _, moment in run_backward(steps, alive, defers=defers)))


def run_forward(steps: Sequence[Step], alive: Buffers, kept: Iterable[str]) -> Iterator[tuple[Step, Bytes]]:
    """Runs ops forward on `alive`; gives the bytes during each. `kept` names are not dropped, and inputs not saved."""
    outside, last = frozenset(kept), last_uses(steps)
    for index, step in enumerate(steps):
        for name, size in step.results.items():
            if not step.cost.is_view:  # views are of a block's inputs, which are not in `alive`
                alive.add(name, "communication" if step.cost.sent else "work", size)
        for name, size in step.saved.items():
            if name not in outside or name in alive:
                alive.save(name, size)
        yield step, alive.bytes(step.scratch[0])
        for name in {*step.operands, *step.results}:
            if last.get(name, index) == index and name not in outside:
                alive.drop(name)


def run_backward(steps: Sequence[Step], alive: Buffers, *, defers: bool = False) -> Iterator[tuple[Step, Bytes]]:
    """Runs ops backward on `alive`, which has what is saved and the outputs' gradients; gives the bytes during each.

    `defers`: products for gradients of weights wait in a queue, for `run_deferred`.
    """
    freed = savers(steps)
    for index in reversed(range(len(steps))):
        step = steps[index]
        if defers and step.defers:
            step = _with_queue(step, alive)
        extra = add_gradients(alive, step)
        yield steps[index], alive.bytes(extra + step.scratch[1])
        for name in step.results:
            alive.drop(f"d {name}")
        for name in freed[index]:
            alive.drop(f"saved {name}")


def _with_queue(step: Step, alive: Buffers) -> Step:
    """The op without gradients of parameters. Keeps its saved tensors and its results' gradients in the queue."""
    for name in step.results:
        if f"d {name}" in alive:
            alive.alias(f"queue d {name}", f"d {name}")
    for name, size in step.saved.items():
        if f"saved {name}" in alive:
            alive.alias(f"queue {name} of {step.key}", f"saved {name}")
        else:  # an input of the block, which its caller keeps until this backward pass only
            alive.add(f"queue {name} of {step.key}", "activations", size)
    return replace(step, differentiated={n: size for n, size in step.differentiated.items() if not n.startswith("@")})


def run_deferred(step: Step, alive: Buffers) -> Bytes:
    """Computes an op's gradients of parameters, and frees its part of the queue; gives the bytes before that."""
    for name, size in step.differentiated.items():
        if name.startswith("@") and f"d {name}" not in alive:
            alive.add(f"d {name}", "gradients", size)
    moment = alive.bytes()
    for name in step.results:
        alive.drop(f"queue d {name}")
    for name in step.saved:
        alive.drop(f"queue {name} of {step.key}")
    return moment


def add_gradients(alive: Buffers, step: Step) -> float:
    """Adds the gradients of an op's operands; returns the bytes of those that are added to others and then freed."""
    result = next((name for name in step.results if f"d {name}" in alive), None)
    extra = 0.0
    for name, size in step.differentiated.items() if result is not None else ():
        gradient, is_parameter = f"d {name}", name.startswith("@")
        if gradient in alive:
            extra += 0.0 if step.cost.passes_gradient else size
            if alive.is_shared(gradient):
                alive.add(gradient, "work", size)
        elif step.cost.passes_gradient and not is_parameter:
            alive.alias(gradient, f"d {result}")
        else:
            alive.add(gradient, "gradients" if is_parameter else "work", size)
    return extra
