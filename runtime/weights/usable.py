"""Whether a layer can compute with a parameter that a script may have replaced or converted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.runtime.errors import JobError
from moec.runtime.refused_derivatives import HELP, has_tangent, in_transform, is_tracked, no_derivative
from moec.runtime.weights.weight_spec import WeightSpec


def require_no_derivative(parameters: Sequence[Tensor], specs: Sequence[WeightSpec]) -> None:
    """Raises `JobError` if forward mode or `torch.func`, which the nodes lack, would differentiate a parameter."""
    for parameter, spec in zip(parameters, specs, strict=True):
        if has_tangent(parameter) or (in_transform() and is_tracked(parameter)):
            raise no_derivative(
                f"{spec.name} ({spec.site}), which is cast, or summed over ranks,",
                "derivative in forward mode or `torch.func`",
                f"{HELP}; parameters in the layers' dtype are not cast, and those with `requires_grad_(False)` "
                "leave the derivatives of inputs",
            )


def require_usable(parameter: Tensor, spec: WeightSpec) -> None:
    """Raises `JobError` for a parameter with another shape or dtype than the plan's, or trained though frozen."""
    shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape
    if shape != spec.shape:
        raise JobError(
            "MOE0710",
            f"{spec.name} ({spec.site}) was replaced: this rank's part has shape {list(shape)}, "
            f"but the plan wants {list(spec.shape)}",
            "on several ranks parameters are DTensors: use `torch.distributed.tensor.distribute_tensor(whole, "
            "old.device_mesh, old.placements)`",
        )
    if spec.frozen and parameter.requires_grad:
        raise JobError(
            "MOE0713",
            f"{spec.name} ({spec.site}) has `requires_grad`, but the plan freezes it: no rank would sum its gradient",
            "leave its part out of `frozen` in `train`, and compile the file again",
        )
    # A parametrization or `functional_call` may compute with another dtype: then the parameter is elsewhere.
    if spec.master is not None and parameter.dtype != spec.master and isinstance(parameter, nn.Parameter):
        dtype = str(spec.master).removeprefix("torch.")
        use = "this frozen parameter stays" if spec.frozen else "an optimizer updates masters"
        raise JobError(
            "MOE0710",
            f"{spec.name} ({spec.site}) was converted to {parameter.dtype}, but {use} in {spec.master}",
            f"layers compute in the file's `dtype`; leave the parameters {dtype}; "
            "`moec.reference(…, dtype=torch.float64)` makes the unsharded model in float64",
        )
