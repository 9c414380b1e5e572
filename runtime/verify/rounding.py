"""Compares the rounding errors of a plan, in its dtype, with those of the unsharded model in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, median

import torch
from torch import Tensor, nn

from moec.codegen.emit import DTYPES
from moec.codegen.plan import Plan
from moec.grammar.spec import AdamW as AdamWSpec
from moec.grammar.spec import Spec
from moec.passes.ir import Op, Program, local_slices
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.ops import Activation, ExpertMlp, ExpertMlpPadded, MixtureMlp
from moec.runtime.backends import plain_torch
from moec.runtime.job.optimizer import make_optimizer
from moec.runtime.job.reference import reference_program
from moec.runtime.verify.inputs import Inputs
from moec.runtime.verify.lockstep import FAILURES, BackwardError, Graphs, Lockstep, StepError
from moec.runtime.verify.routes import Routes, shared_out
from moec.runtime.verify.unsharded import Unsharded, outcome, result_name, unsharded
from moec.runtime.verify.virtual import VirtualCluster

FACTORS = {"fp32": 16.0}
FACTOR = 4.0
"""How many times the unsharded model's error a plan's may be, by tensor; docs/verify.md says how both were found. A
value of fp32 that is rounded to bf16 is 65,536 times as far off: there is room for gradients that almost cancel."""

MEANS = {"fp32": 4.0}
MEAN = 1.3
"""The same for the geometric mean over all gradients. Sums of many ranks in bf16 make every gradient a little worse,
and none 4 times."""

FLOOR = 0.2
"""An error below this many eps of the dtype, relative to the tensor, counts as this: rounding each element makes it."""

LOSS_EPS = torch.finfo(torch.float32).eps
"""A loss is a sum in fp32 over all tokens and ranks, and may always be off by this part of it."""

NOISE = 1e-6
"""A gradient whose elements are below this part of the largest gradient's is measured as if they were as large."""

CHANCE = 1.5
"""Few errors are large or small by chance: n numbers may be off by `1 + CHANCE / sqrt(n)` times as much."""

STEP_BOUND = 0.1
"""The largest error of an optimizer's step, relative to the step."""

CLEAR = 64
"""An element of a gradient is clear if it is this many times its rounding error. AdamW's first step is about the
gradient's sign, so that where it is not clear, rounding alone turns the step around."""

MARGIN = 10.0
"""How far a label's logit is above the others' when the loss is run alone, as in a model that has learned. There
`softmax - onehot` cancels, and a loss that rounds before it subtracts is far off; at a random start it is not."""

Part = tuple[tuple[slice, ...], Tensor]
"""An index, and a rank's values of what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Errors against float64, over those of the unsharded model in the same dtype; the largest over all tensors.

    `output`: logits and loss, or y and `aux_loss`. `gradient`: gradients, and of a model that of the loss alone.
    `mean`: the geometric mean over the gradients of parameters and x. `step`: the error of one step of the
    file's optimizer relative to the step, where gradients are clear of rounding.
    """

    ok: bool
    dtype: str
    output: float
    gradient: float
    mean: float
    step: float
    worst: str
    bound: float = FACTOR
    mean_bound: float = MEAN
    gradients: Mapping[str, float] = field(default_factory=dict, repr=False)
    """`gradient` by the tensor's name."""

    def to_json(self) -> dict[str, object]:
        """What `moec verify --json` prints."""
        names = ("ok", "dtype", "output", "gradient", "mean", "step", "worst", "bound", "mean_bound")
        return {name: getattr(self, name) for name in names} | {"step_bound": STEP_BOUND}


def measure_rounding(plan: Plan, model: Unsharded, inputs: Inputs, *, recompute: bool = False) -> Rounding:
    """Runs plan and unsharded model in the plan's dtype, from the parameters of `model`, and both against float64.

    All runs start from the same parameters, rounded once, send every token to the same experts, and run gelu where the
    model has relu.
    """
    program, plan = _smooth(reference_program(plan.spec)), replace(plan, program=_smooth(plan.program))
    narrow = {name: p.detach().to(DTYPES[plan.parameters[name].dtype]) for name, p in model.named_parameters()}
    dtype = DTYPES[plan.spec.subject.dtype]
    inputs = inputs.to(dtype)
    doubled = Graphs(program, float64=True)
    exact = _Unsharded(doubled, {name: p.double() for name, p in narrow.items()}, Routes())
    exact.run(inputs.to(torch.float64))
    choices = {path: experts[0] for path, experts in exact.routes.experts.items()}
    nudged = _Unsharded(doubled, {name: _rounded_again(p, name) for name, p in narrow.items()}, Routes(_alone(choices)))
    nudged.run(inputs.to(torch.float64))
    same = _Unsharded(Graphs(program, float64=False), narrow, Routes(_alone(choices)))
    same.run(inputs.to(dtype))
    routes = Routes(shared_out(plan, choices))
    cluster = VirtualCluster(plan, narrow, recompute=recompute, routes=routes)
    name = str(plan.spec.subject.dtype)
    confident = _confident_logits(inputs, plan.spec.model.vocab, dtype) if plan.spec.has_model else None
    try:
        results, losses = cluster.lockstep.run(inputs.rank_given, inputs.rank_targets)
        summed = cluster.backward(losses)
        of_logits = None if confident is None else _loss_alone(plan, cluster.lockstep, inputs, confident)
    except (StepError, BackwardError) as failure:
        off = math.inf
        return Rounding(ok=False, dtype=name, worst=str(failure), output=off, gradient=off, mean=off, step=off)
    found = _Comparison(plan, exact, same, nudged)
    found.outputs(results, cluster.lockstep.scalars)
    found.routers(routes)
    found.gradients(summed)
    if confident is None:
        found.gradient_of_x(inputs)
    else:
        assert of_logits is not None
        found.loss_alone(of_logits, *(run.loss_alone(inputs, confident) for run in (exact, same)))
    found.step(narrow, summed)
    return found.report(name)


def gradient_noise(spec: Spec, model: Unsharded, inputs: Inputs, part: float) -> dict[str, float]:
    """The largest difference that float32 makes in each gradient of `model`, which is in float64; `part` of it."""
    single = unsharded(spec, dtype=torch.float32).train(model.training)
    narrow = inputs.to(torch.float32)
    with torch.no_grad():
        for name, p in single.named_parameters():
            p.copy_(model.get_parameter(name))
    with plain_torch():
        outcome(single, narrow).differentiated.backward()  # type: ignore[no-untyped-call]
    pairs = {name: (p.grad, model.get_parameter(name).grad) for name, p in single.named_parameters()}
    if inputs.given.requires_grad:
        pairs["x"] = narrow.given.grad, inputs.given.grad
    noise = {}
    for name, (rounded, whole) in pairs.items():
        assert rounded is not None
        assert whole is not None
        noise[name] = part * float((rounded.double() - whole).abs().max())
    return noise


class _Unsharded:
    """One run of the unsharded model, forward and backward."""

    def __init__(self, graphs: Graphs, parameters: Mapping[str, Tensor], routes: Routes) -> None:
        self.routes = routes
        self._dtype = next(iter(parameters.values())).dtype
        self._leaves = {name: [p.clone().requires_grad_()] for name, p in parameters.items()}
        float64 = self._dtype == torch.float64
        self._lockstep = Lockstep(graphs.program, 1, {}, self._leaves, float64=float64, routes=routes, graphs=graphs)

    def run(self, inputs: Inputs) -> None:
        """Over the global batch."""
        with plain_torch():
            (result,), (loss,) = self._lockstep.run([inputs.given], [inputs.targets])
            loss.backward()
        self.result = result.detach().double()
        self.scalars = {name: float(scalar.detach()) for name, (scalar,) in self._lockstep.scalars.items()}
        self.gradients = {
            name: torch.zeros_like(p).double() if p.grad is None else p.grad.double()
            for name, (p,) in self._leaves.items()
        }
        if inputs.given.grad is not None:
            self.gradients["x"] = inputs.given.grad.double()

    def loss_alone(self, inputs: Inputs, logits: Tensor) -> Tensor:
        """The gradient of the loss with respect to given logits."""
        leaf = logits.to(self._dtype).requires_grad_()
        self._lockstep.loss([leaf], [inputs.targets])[0].backward()
        assert leaf.grad is not None
        return leaf.grad.double()


def _loss_alone(plan: Plan, lockstep: Lockstep, inputs: Inputs, logits: Tensor) -> list[Part]:
    """The same on every rank of a plan, of its part of the logits."""
    layout, dense = plan.result_layout, plan.meshes["dense"]
    indices = [local_slices(logits.shape, layout, dense, rank) for rank in range(plan.world_size)]
    leaves = [logits[index].clone().requires_grad_() for index in indices]
    losses = lockstep.loss(leaves, inputs.rank_targets)
    try:
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    except FAILURES as error:
        raise BackwardError(f"the backward pass of the loss alone, which stopped: {error}") from error
    return [(i, torch.zeros_like(x) if x.grad is None else x.grad) for i, x in zip(indices, leaves, strict=True)]


def _smooth(program: Program) -> Program:
    """The same Program with gelu for relu, and so on: see `ActivationKind.smooth`."""

    def smooth(op: Op) -> Op:
        match op:
            case Activation() if word := ACTIVATIONS[op.kind].smooth:
                return replace(op, kind=word)
            case ExpertMlp() | ExpertMlpPadded() | MixtureMlp() if word := ACTIVATIONS[op.activation].smooth:
                return replace(op, activation=word)
        return op

    return replace(program, blocks=tuple(replace(b, ops=tuple(map(smooth, b.ops))) for b in program.blocks))


def _alone(choices: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Choices of the global batch, for the one rank of an unsharded model."""
    return {path: [experts] for path, experts in choices.items()}


def _rounded_again(parameter: Tensor, name: str) -> Tensor:
    """`parameter` in float64, each element off by an eighth of its dtype's eps, up or down."""
    drawn = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    return parameter.double() * (1 + (drawn - 0.5).sign() * torch.finfo(parameter.dtype).eps / 8)


def _confident_logits(inputs: Inputs, vocab: int, dtype: torch.dtype) -> Tensor:
    """Logits `[batch, sequence, vocab]` of a model that has learned: most of the probability is the label's."""
    shape = (*inputs.targets.shape, vocab)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    raised = drawn.scatter_add(-1, inputs.targets.clamp_min(0)[..., None], drawn.new_full((*shape[:-1], 1), MARGIN))
    return raised.to(dtype)


class _Comparison:
    """Errors of a plan's run and of the unsharded model's in one dtype, both against float64."""

    def __init__(self, plan: Plan, exact: _Unsharded, same: _Unsharded, nudged: _Unsharded) -> None:
        self._plan, self._exact, self._same, self._nudged = plan, exact, same, nudged
        self._eps = torch.finfo(DTYPES[plan.spec.subject.dtype]).eps
        self._ratios: dict[str, dict[str, float]] = {"output": {}, "gradient": {}}
        self._steps: dict[str, float] = {}
        self._known = self._known_errors()

    def outputs(self, results: Sequence[Tensor], scalars: Mapping[str, Sequence[Tensor]]) -> None:
        """Logits or y, and losses, of every rank."""
        exact, dense = self._exact, self._plan.meshes["dense"]
        layout = self._plan.result_layout
        parts = [(local_slices(exact.result.shape, layout, dense, r), x) for r, x in enumerate(results)]
        error = max(distance(run.result, exact.result) for run in (self._same, self._nudged))
        error = max(error, FLOOR * self._eps * float(exact.result.norm()))
        self._ratios["output"][result_name(self._plan.spec)] = _ratio(distance_of(parts, exact.result), error)
        # A loss is a mean over tokens, whose error may vanish by chance. It is at most about that of a logit.
        mean = error / math.sqrt(max(exact.result.numel(), 1)) if self._plan.spec.has_model else 0.0
        for name, wanted in exact.scalars.items():
            known = max(abs(self._same.scalars[name] - wanted), mean, LOSS_EPS * abs(wanted))
            off = max(abs(float(scalar.detach()) - wanted) for scalar in scalars[name])
            self._ratios["output"][f"the {name}"] = _ratio(off, known)

    def routers(self, routes: Routes) -> None:
        """Router logits in fp32 that were in bf16 before: as many choices are ties as bf16 has equal logits."""
        for path, (expected,) in ((path, found.values()) for path, found in self._same.routes.logits.items()):
            if not _are_bf16(expected) and all(map(_are_bf16, routes.logits[path].values())):
                self._ratios["output"][f"the router logits of {path.rstrip('.')}, rounded to bf16"] = math.inf

    def gradients(self, summed: Mapping[str, Sequence[Tensor]]) -> None:
        """Every parameter's gradient."""
        for name, parts in summed.items():
            found = distance_of(self._parts(name, parts), self._exact.gradients[name])
            self._ratios["gradient"][name] = _ratio(found, self._known[name])

    def gradient_of_x(self, inputs: Inputs) -> None:
        """What a layer gives back to the model around it, on every rank."""
        of_ranks = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs.rank_given]
        cut = [tuple(slice(0, size) for size in x.shape[1:]) for x in of_ranks]
        parts = [((rows, *rest), x) for rows, rest, x in zip(inputs.rank_rows, cut, of_ranks, strict=True)]
        self._ratios["gradient"]["x"] = _ratio(distance_of(parts, self._exact.gradients["x"]), self._known["x"])

    def loss_alone(self, got: Sequence[Part], expected: Tensor, same: Tensor) -> None:
        """The gradient of confident logits."""
        known = max(distance(same, expected), FLOOR * self._eps * float(expected.norm()))
        self._ratios["gradient"]["confident logits"] = _ratio(distance_of(got, expected), known)

    def step(self, parameters: Mapping[str, Tensor], summed: Mapping[str, Sequence[Tensor]]) -> None:
        """One step of the file's optimizer, over fp32 masters of each rank's parts."""
        plan, exact = self._plan, self._exact.gradients
        wanted = _stepped(plan, {name: [(p.double(), exact[name])] for name, p in parameters.items()})
        cut = {
            name: [(p[index].float(), part.float()) for index, part in self._parts(name, summed[name])]
            for name, p in parameters.items()
        }
        for name, steps in _stepped(plan, cut).items():
            (whole,) = wanted[name]
            clear = exact[name].abs() > CLEAR * self._known[name] / math.sqrt(whole.numel())
            parts = [(index, step * clear[index]) for index, step in self._parts(name, steps)]
            size = float((whole * clear).norm())
            off = distance_of(parts, whole * clear)
            self._steps[name] = off / size if size else (math.inf if off else 0.0)

    def report(self, dtype: str) -> Rounding:
        """The largest of each."""
        output, gradient = (max(self._ratios[kind].values()) for kind in ("output", "gradient"))
        step = max(self._steps.values())
        bound, mean_bound = FACTORS.get(dtype, FACTOR), MEANS.get(dtype, MEAN)
        ratios = [ratio for name, ratio in self._ratios["gradient"].items() if ratio and name in self._known]
        mean = geometric_mean(ratios) if ratios else 0.0
        over = {what: ratio / bound for what, ratio in self._ratios["output"].items()}
        over |= {f"the gradient of {name}": ratio / bound for name, ratio in self._ratios["gradient"].items()}
        over |= {f"the step of {name}": error / STEP_BOUND for name, error in self._steps.items()}
        over["mean over all gradients"] = mean / mean_bound
        return Rounding(
            ok=max(over.values()) <= 1,
            dtype=dtype,
            bound=bound,
            mean=mean,
            mean_bound=mean_bound,
            output=output,
            gradient=gradient,
            step=step,
            worst=max(over, key=lambda what: over[what]),
            gradients=self._ratios["gradient"],
        )

    def _parts(self, name: str, parts: Sequence[Tensor]) -> list[Part]:
        data = self._plan.parameters[name]
        layout, mesh = data.layout, self._plan.meshes[data.mesh]
        return [(local_slices(data.shape, layout, mesh, rank), part) for rank, part in enumerate(parts)]

    def _known_errors(self) -> dict[str, float]:
        """The error of each gradient that is no fault of the plan: the unsharded model's in the dtype.

        A gradient of few elements may by chance have almost none. It counts at least as much as a change of the
        parameters by an eighth of an eps makes it, as a quarter of the median gradient's, and as rounding its elements.
        """
        exact = self._exact.gradients
        least = NOISE * max(rms(gradient) for gradient in exact.values())
        sizes = {name: max(float(g.norm()), least * math.sqrt(g.numel())) for name, g in exact.items()}
        errors = {
            name: max(distance(run.gradients[name], gradient) for run in (self._same, self._nudged))
            for name, gradient in exact.items()
        }
        typical = median(errors[name] / size for name, size in sizes.items() if size) if any(sizes.values()) else 0.0
        part = max(typical / 4, FLOOR * self._eps)
        return {
            name: max(error, part * sizes[name]) * (1 + CHANCE / math.sqrt(exact[name].numel()))
            for name, error in errors.items()
        }


def _ratio(found: float, known: float) -> float:
    """found / known, 0/0 being 0."""
    if not math.isfinite(found) or not known:
        return math.inf if found else 0.0
    return found / known


def rms(tensor: Tensor) -> float:
    """The root of the mean square, 0 of none."""
    return float(tensor.norm()) / math.sqrt(max(tensor.numel(), 1))


def distance(got: Tensor, whole: Tensor) -> float:
    """The 2-norm of the difference."""
    return float((got - whole).norm())


def distance_of(parts: Sequence[Part], whole: Tensor) -> float:
    """The same for values that lie on ranks in parts; of replicas, the one that is further off counts."""
    squares: dict[tuple[tuple[int, int], ...], float] = {}
    for index, part in parts:
        wanted = whole[index]
        if part.shape != wanted.shape:
            return math.inf
        square = float((part.detach().double() - wanted).square().sum())
        if square != square:
            return math.inf
        key = tuple((cut.start, cut.stop) for cut in index)
        squares[key] = max(squares.get(key, 0.0), square)
    return math.sqrt(sum(squares.values()))


def _are_bf16(values: Tensor) -> bool:
    """Whether every number is one that bf16 has."""
    return torch.equal(values.bfloat16().to(values.dtype), values)


def _stepped(plan: Plan, parts: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> dict[str, list[Tensor]]:
    """What one step of the file's optimizer adds to each of several parts (value, gradient) of each parameter."""
    made = {name: [_parameter(value, gradient) for value, gradient in each] for name, each in parts.items()}
    train = plan.spec.train
    decayed = [p for name, each in made.items() if plan.parameters[name].decays for p in each]
    undecayed = [p for name, each in made.items() if not plan.parameters[name].decays for p in each]
    make_optimizer(train.optimizer if train else AdamWSpec(), decayed, undecayed).step()
    return {
        name: [p.detach().double() - before.double() for p, (before, _) in zip(each, parts[name], strict=True)]
        for name, each in made.items()
    }


def _parameter(value: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    return parameter
