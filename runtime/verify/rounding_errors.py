"""Measures rounding errors against float64: ratios of a plan's to the unsharded model's, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

import torch
from torch import Tensor, nn

from moec.codegen.emit import DTYPES
from moec.codegen.plan import Plan
from moec.passes.cost.optimizers import kind_of
from moec.passes.ir import local_slices
from moec.runtime.optimizers.optimizer import make_optimizer
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.distances import Part, distance, distance_of_parts, rms
from moec.runtime.verify.inputs import GlobalBatch
from moec.runtime.verify.rounding_runs import UnshardedRun
from moec.runtime.verify.unsharded import result_name
from moec.runtime.verify.verify_report import FACTOR, FACTORS, MEAN, MEANS, STEP_BOUND, Rounding
from moec.runtime.weights.masters import Master

FLOOR = 0.2
"""The smallest error assumed, in eps of the dtype relative to the tensor: rounding each element alone makes it."""

EPS_FP32 = torch.finfo(torch.float32).eps
"""A loss is a sum in fp32 over all tokens and ranks, and may always be off by this part of it."""

GRADIENT_FLOOR = 1e-6
"""A gradient whose elements are below this part of the largest gradient's is measured as if they were as large."""

CHANCE = 1.5
"""A ratio over n numbers may exceed its bound by the factor `1 + CHANCE / sqrt(n)`."""

CLEAR = 64
"""An element of a gradient is clear if it is this many times its rounding error. AdamW's first step is about the
gradient's sign, so that where it is not clear, rounding alone turns the step around."""


class RoundingErrors:
    """Errors of a plan's run and of the unsharded model's in one dtype, both against float64."""

    def __init__(self, plan: Plan, exact: UnshardedRun, same_dtype: UnshardedRun, perturbed: UnshardedRun) -> None:
        self._plan, self._exact, self._same_dtype, self._perturbed = plan, exact, same_dtype, perturbed
        self._eps = torch.finfo(DTYPES[plan.spec.subject.dtype]).eps
        self._ratios: dict[str, dict[str, float]] = {"output": {}, "gradient": {}}
        self._steps: dict[str, float] = {}
        self._known = self._known_errors()

    def add_outputs(self, results: Sequence[Tensor], scalars: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds the ratios of logits or y, and of losses, of every rank."""
        exact, dense = self._exact, self._plan.meshes["dense"]
        layout = self._plan.result_layout
        parts = [(local_slices(exact.result.shape, layout, dense, r), x) for r, x in enumerate(results)]
        known = max(distance(run.result, exact.result) for run in (self._same_dtype, self._perturbed))
        known = max(known, FLOOR * self._eps * float(exact.result.norm()))
        self._ratios["output"][result_name(self._plan.spec)] = _ratio(distance_of_parts(parts, exact.result), known)
        # A loss is a mean over tokens, whose error may vanish by chance. It is at most about that of a logit.
        mean = known / math.sqrt(max(exact.result.numel(), 1)) if self._plan.spec.has_model else 0.0
        for name, expected in exact.scalars.items():
            known = max(abs(self._same_dtype.scalars[name] - expected), mean, EPS_FP32 * abs(expected))
            error = max(abs(float(scalar.detach()) - expected) for scalar in scalars[name])
            self._ratios["output"][f"the {name}"] = _ratio(error, known)

    def add_routers(self, routes: Routes) -> None:
        """Adds an infinite ratio if a plan's router logits were rounded to bf16: bf16 makes ties."""
        for key, (expected,) in self._same_dtype.routes.scores.items():
            if not _are_bf16(expected) and all(map(_are_bf16, routes.scores[key])):
                layer = ".".join(key.split(".")[:2])
                self._ratios["output"][f"the router logits of {layer}, rounded to bf16"] = math.inf

    def add_gradients(self, summed: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds the ratio of every parameter's gradient."""
        for name, parts in summed.items():
            error = distance_of_parts(self._parts(name, parts), self._exact.gradients[name])
            self._ratios["gradient"][name] = _ratio(error, self._known[name])

    def add_gradient_of_x(self, batch: GlobalBatch) -> None:
        """Adds the ratio of the gradient of a layer's x, on every rank."""
        parts = []
        for x, rows in zip(batch.rank_inputs, batch.rank_rows, strict=True):
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            parts.append(((rows, *(slice(0, size) for size in x.shape[1:])), gradient))
        self._ratios["gradient"]["x"] = _ratio(distance_of_parts(parts, self._exact.gradients["x"]), self._known["x"])

    def add_logits_gradient(self, parts: Sequence[Part], expected: Tensor, same_dtype: Tensor) -> None:
        """Adds the ratio of the gradient of `confident_logits`, on every rank."""
        known = max(distance(same_dtype, expected), FLOOR * self._eps * float(expected.norm()))
        self._ratios["gradient"]["confident logits"] = _ratio(distance_of_parts(parts, expected), known)

    def add_step(self, parameters: Mapping[str, Tensor], summed: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds the error of one step of the file's optimizer, over fp32 masters of each rank's parts.

        Optimizers of whole matrices take one step over the joined parts. Muon's iteration amplifies what rounding adds
        to small singular values, so that its step is compared with the float64 step of the same gradient.
        """
        plan, exact, kind = self._plan, dict(self._exact.gradients), kind_of(self._plan.spec.update.optimizer)
        gradients = {name: self._parts(name, summed[name]) for name in parameters}
        if kind.whole_matrices:
            gradients = {name: [_joined(exact[name], parts)] for name, parts in gradients.items()}
        amplified = [n for n in parameters if kind.amplifies and plan.parameters[n].matrices.hidden]
        exact |= {name: gradients[name][0][1].double() for name in amplified}
        expected_steps = _optimizer_steps(plan, {name: [(p.double(), exact[name])] for name, p in parameters.items()})
        rank_parts = {
            name: [(p[index].float(), part.float()) for index, part in gradients[name]]
            for name, p in parameters.items()
        }
        for name, steps in _optimizer_steps(plan, rank_parts).items():
            (expected,) = expected_steps[name]
            clear = exact[name].abs() > CLEAR * self._known[name] / math.sqrt(expected.numel())
            clear |= torch.tensor(name in amplified)
            parts = [(index, step * clear[index]) for (index, _), step in zip(gradients[name], steps, strict=True)]
            size = float((expected * clear).norm())
            # Masters in fp32 round the decay and the update, which may be far smaller than they are.
            rounding = 2 * EPS_FP32 * float(parameters[name].norm())
            error = max(distance_of_parts(parts, expected * clear) - rounding, 0.0)
            self._steps[name] = error / size if size else (math.inf if error else 0.0)

    def report(self, dtype: str) -> Rounding:
        """The largest ratios and the largest error of a step."""
        output, gradient = (max(self._ratios[kind].values()) for kind in ("output", "gradient"))
        step = max(self._steps.values())
        bound, mean_bound = FACTORS.get(dtype, FACTOR), MEANS.get(dtype, MEAN)
        ratios = [ratio for name, ratio in self._ratios["gradient"].items() if ratio and name in self._known]
        mean = geometric_mean(ratios) if ratios else 0.0
        over = {name: ratio / bound for name, ratio in self._ratios["output"].items()}
        over |= {f"the gradient of {name}": ratio / bound for name, ratio in self._ratios["gradient"].items()}
        over |= {f"the step of {name}": error / STEP_BOUND for name, error in self._steps.items()}
        over["the mean over all gradients"] = mean / mean_bound
        return Rounding(
            ok=max(over.values()) <= 1,
            dtype=dtype,
            bound=bound,
            mean=mean,
            mean_bound=mean_bound,
            output=output,
            gradient=gradient,
            step=step,
            worst=max(over, key=lambda name: over[name]),
            gradients=self._ratios["gradient"],
        )

    def _parts(self, name: str, parts: Sequence[Tensor]) -> list[Part]:
        data = self._plan.parameters[name]
        mesh = self._plan.meshes[data.mesh]
        return [(data.cells(mesh, rank), part) for rank, part in enumerate(parts)]

    def _known_errors(self) -> dict[str, float]:
        """The error of each gradient without a plan: the unsharded model's error in the dtype.

        A gradient of few elements may by chance have almost no error. The result is at least the error that changing
        parameters by an eighth of an eps makes, a quarter of the median relative error, and `FLOOR`.
        """
        exact = self._exact.gradients
        least = GRADIENT_FLOOR * max(rms(gradient) for gradient in exact.values())
        sizes = {name: max(float(g.norm()), least * math.sqrt(g.numel())) for name, g in exact.items()}
        errors = {
            name: max(distance(run.gradients[name], gradient) for run in (self._same_dtype, self._perturbed))
            for name, gradient in exact.items()
        }
        typical = median(errors[name] / size for name, size in sizes.items() if size) if any(sizes.values()) else 0.0
        part = max(typical / 4, FLOOR * self._eps)
        return {
            name: max(error, part * sizes[name]) * (1 + CHANCE / math.sqrt(exact[name].numel()))
            for name, error in errors.items()
        }


def _ratio(error: float, known: float) -> float:
    """error / known, 0/0 being 0."""
    if not math.isfinite(error) or not known:
        return math.inf if error else 0.0
    return error / known


def _are_bf16(values: Tensor) -> bool:
    """Whether every number is one that bf16 has."""
    return torch.equal(values.bfloat16().to(values.dtype), values)


def _joined(reference: Tensor, parts: Sequence[Part]) -> Part:
    """The tensor of all ranks' parts, as one part in the dtype of `reference`; of replicas the last counts."""
    joined = torch.zeros_like(reference)
    for index, part in parts:
        joined[index] = part.double()
    return tuple(slice(0, size) for size in joined.shape), joined


def _optimizer_steps(plan: Plan, parts: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> dict[str, list[Tensor]]:
    """The change that one step of the file's optimizer makes to each part (value, gradient) of each parameter."""
    parameters = {name: [_parameter(value, grad) for value, grad in pairs] for name, pairs in parts.items()}
    datas = plan.parameters
    masters = [Master(p, datas[name].decays, datas[name].matrices) for name, ps in parameters.items() for p in ps]
    make_optimizer(plan.spec.update._replace(state="fp32"), masters).step()
    return {
        name: [p.detach().double() - value.double() for p, (value, _) in zip(ps, parts[name], strict=True)]
        for name, ps in parameters.items()
    }


def _parameter(value: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    return parameter
