"""Fits the free constants of a `DeviceModel` to measured kernels.

Measurements are lines of JSON, one per timed kernel (`Measurement`); lines of other kinds are skipped. The fit is least
squares of the logarithm of predicted over measured time. A weak pull towards the assumed values keeps constants that no
measurement depends on where they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError
from zipf_loads import zipf

from moec.codegen.data import Data
from moec.codegen.kernels.model.model import predict
from moec.codegen.kernels.model.model_calibration import StoredModel
from moec.codegen.kernels.model.model_device import FREE, DeviceModel
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer
from moec.codegen.kernels.tiles import WAY_PATTERN, Kernel, parse_way

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

PULL = 0.01
"""Weight of a constant's distance (as a logarithm) from its assumed value, against 1 for a measurement."""

MAX_STEPS = 60
RANGE = log(8)
"""A constant may move by this factor at most."""

Extent = Annotated[int, Field(ge=1, le=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measurement(Data):
    """One kernel's time on a device. `k` 0: rows came in the experts' order. `tokens` are those before the choice."""

    device: str
    kernel: Kernel
    way: Annotated[str, Field(pattern=WAY_PATTERN)]
    bulk: bool = False
    experts: Extent
    dim: Extent
    hidden: Extent
    gated: bool
    dtype: Annotated[str, Field(pattern=r"^(bf16|fp16|fp32|fp64)$")]
    k: Annotated[int, Field(ge=0, le=4096)]
    tokens: Extent
    load: Literal["uniform", "zipf"] = "uniform"
    ms: Positive

    @property
    def layer(self) -> ExpertLayer:
        """The experts."""
        return ExpertLayer(
            experts=self.experts, dim=self.dim, hidden=self.hidden, gated=self.gated, dtype=self.dtype, k=self.k
        )

    @property
    def rows_of_experts(self) -> Load:
        """The rows of each expert, as drawn."""
        draw = zipf if self.load == "zipf" else Load.uniform
        return draw(self.tokens, self.experts, max(1, self.k))

    def predicted(self, device: DeviceModel) -> float:
        """Milliseconds by the model."""
        way = parse_way(self.way)
        return 1e3 * predict(self.kernel, way, self.layer, self.rows_of_experts, device, bulk=self.bulk).seconds


def read_measurements(text: str, device: str) -> tuple[Measurement, ...]:
    """The timed kernels of a device among lines of JSON; a last line that was cut off is skipped."""
    measurements = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
            fields = {name: value for name, value in row.items() if name in Measurement.model_fields}
            measurements.append(Measurement.model_validate(fields))
        except (ValueError, AttributeError, ValidationError):
            continue
    return tuple(measurement for measurement in measurements if measurement.device == device)


def calibrate(model: DeviceModel, measurements: Sequence[Measurement]) -> DeviceModel:
    """The model with the constants that fit the measurements best; without measurements, the model as it is.

    Levenberg and Marquardt's method on the constants' logarithms. Measurements of tiles that do not fit are left out.
    """
    import numpy as np

    rows = [measurement for measurement in measurements if isfinite(measurement.predicted(model))]
    if not rows:
        return model
    origin = f"calibrated from {len(rows)} measurements on {model.name}"
    start = np.array([log(getattr(model, name)) for name in FREE])
    at, damping = start.copy(), 1e-2
    errors = _errors(at, start, rows, model)
    for _ in range(MAX_STEPS):
        slopes = _slopes(at, start, rows, model, errors)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ errors)
        there = _within(at + step, start)
        new = _errors(there, start, rows, model)
        if new @ new < errors @ errors:
            done = errors @ errors - new @ new < 1e-10
            at, errors, damping = there, new, damping / 4
            if done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return model.with_constants(_constants(at), origin)


def _constants(logs: Numbers) -> dict[str, float]:
    return {name: exp(value) for name, value in zip(FREE, logs, strict=True)}


def _within(logs: Numbers, start: Numbers) -> Numbers:
    """No constant leaves its range, and no efficiency passes 1."""
    import numpy as np

    most = [0.0 if name.endswith("_efficiency") else np.inf for name in FREE]
    return np.minimum(np.clip(logs, start - RANGE, start + RANGE), most)


def _errors(at: Numbers, start: Numbers, rows: Sequence[Measurement], model: DeviceModel) -> Numbers:
    """Logarithms of predicted over measured times, then the constants' weighted distances from the start."""
    import numpy as np

    device = model.with_constants(_constants(at), "")
    return np.concatenate([[log(row.predicted(device) / row.ms) for row in rows], PULL * (at - start)])


def _slopes(
    at: Numbers,
    start: Numbers,
    rows: Sequence[Measurement],
    model: DeviceModel,
    errors: Numbers,
) -> Numbers:
    """Derivatives of the errors by each constant's logarithm, by differences."""
    import numpy as np

    width = 1e-4
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] -= width
        columns.append((errors - _errors(moved, start, rows, model)) / width)
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class Residual:
    """A measurement, and its predicted over its measured time."""

    measurement: Measurement
    ratio: float


def residuals(model: DeviceModel, measurements: Iterable[Measurement]) -> tuple[Residual, ...]:
    """The residual of every measurement that the model can compute, the largest first."""
    ratios = [Residual(measurement, measurement.predicted(model) / measurement.ms) for measurement in measurements]
    finite = (residual for residual in ratios if isfinite(residual.ratio))
    return tuple(sorted(finite, key=lambda residual: -abs(log(residual.ratio))))


def report(model: DeviceModel, measurements: Sequence[Measurement], most: int = 10) -> Iterator[str]:
    """The mean error of all and of each kernel, the constants, and the measurements with the largest errors."""
    by_distance = residuals(model, measurements)
    yield f"{model.name}: {model.origin}"
    if not by_distance:
        return
    yield f"mean error {_mean_error(by_distance):.1%} over {len(by_distance)} measurements"
    for kernel in dict.fromkeys(residual.measurement.kernel for residual in by_distance):
        own = [residual for residual in by_distance if residual.measurement.kernel == kernel]
        yield f"  {kernel}: {_mean_error(own):.1%} over {len(own)}"
    for name in FREE:
        yield f"  {name} = {getattr(model, name):.4g}"
    for residual in by_distance[:most]:
        row = residual.measurement
        where = f"{row.kernel} {row.way} of {row.experts} x {row.dim} x {row.hidden}, {row.tokens} tokens"
        yield f"  {residual.ratio:.2f} x the measured {row.ms:.3f} ms: {where}"


def _mean_error(residuals: Sequence[Residual]) -> float:
    return sum(abs(residual.ratio - 1) for residual in residuals) / len(residuals)


def stored(model: DeviceModel, measurements: Sequence[Measurement]) -> StoredModel:
    """A calibrated model's constants, to be written as JSON."""
    all_residuals = residuals(model, measurements)
    constants = {name: getattr(model, name) for name in FREE}
    return StoredModel(
        device=model.name, measurements=len(all_residuals), mean_error=_mean_error(all_residuals), constants=constants
    )
