"""The model of a job, and the plan's names of its parameters and states, also of layers inside of wrappers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_layer import Layer
from moec.runtime.weights.home import home_of

T = TypeVar("T")


def require_model(model: object, plan: Plan) -> None:
    """Raises `JobError` unless `model` is a `PlanModule`, and not a wrapper around one."""
    if isinstance(model, PlanModule):
        return
    help = "give it the model that `job.build` made; `model.compile()` compiles it in place"
    if isinstance(model, Tensor):
        help = "the model comes first: `job.step(model, tokens, labels)`, `job.accumulate(model, *labels)`"
    elif isinstance(model, Iterator) or (isinstance(model, list | tuple) and not isinstance(model, nn.Module)):
        help = "give it the model that `job.build` made, not its parameters: moec knows which ranks have each of them"
    elif isinstance(model, nn.Module) and any(isinstance(inner, PlanModule) for inner in model.modules()):
        help = "give it the model that is inside; wrap its layers instead; `model.compile()` compiles it in place"
    got = type(model).__name__
    message = f"the job of plan `{plan.name}` needs the model of `job.build()`, not an object of class {got}"
    raise JobError("MOE0714", message, help)


def require_own(model: object, plan: Plan, number: str) -> None:
    """Raises `JobError` unless the job with this `number` built the model.

    A model of another job uses other groups and may be sharded differently.
    """
    require_model(model, plan)
    assert isinstance(model, PlanModule)
    if home_of(model).groups != number:
        raise JobError(
            "MOE0714",
            f"this job of {plan.name} got a model that another job built",
            "pass every model, or a copy of it, to the job whose `build` made it",
        )


def parameters_by_name(model: PlanModule, plan: Plan) -> dict[str, nn.Parameter]:
    """The parameters by their names in the plan. Raises `JobError` for parameters that the plan does not have."""
    parameters, foreign = by_plan_names(model, model.named_parameters(), plan.parameters)
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise JobError(
            "MOE0710",
            f"the plan has no parameter {foreign[0]}{more}, so that nothing says which ranks have it",
            "use an optimizer of torch over `model.parameters()`, and clip and compare gradients and parameters of "
            "your own modules yourself; save and resume while no parametrization is registered, with its parameters as "
            "an extra (docs/checkpoints.md); a wrapper without parameters of its own may be around any layer",
        )
    return parameters


def states_by_name(model: PlanModule, plan: Plan) -> dict[str, Tensor]:
    """The plan's states by their names in the plan. Leaves out other buffers."""
    states, _ = by_plan_names(model, model.named_buffers(), plan.states)
    return states


def by_plan_names(
    model: PlanModule, items: Iterable[tuple[str, T]], names: Container[str]
) -> tuple[dict[str, T], list[str]]:
    """Parameters or buffers by their names in the plan, and the model's names of those that the plan does not have."""
    paths = _paths_of_wrapped_layers(model)
    by_name, foreign = dict[str, T](), list[str]()
    for name, value in items:
        layer = ".".join(name.split(".", 2)[:2])
        path = paths.get(layer)
        if path is None and name in names:
            by_name[name] = value
        elif (
            path is not None and name.startswith(f"{path}.") and (plan_name := layer + name.removeprefix(path)) in names
        ):
            by_name[plan_name] = value
        else:
            foreign.append(name)
    return by_name, foreign


def _paths_of_wrapped_layers(model: PlanModule) -> dict[str, str]:
    """The paths of layers in wrappers: `layers.3` → `layers.3.wrapped`."""
    paths = {}
    for number, module in enumerate(model.layers):
        inner_path = next((path for path, inner in module.named_modules() if isinstance(inner, Layer)), "")
        if inner_path:
            paths[f"layers.{number}"] = f"layers.{number}.{inner_path}"
    return paths
