"""The fitted constants of a `DeviceModel`, stored by device. `benchmarks/calibrate_kernels.py` fits them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moec.codegen.data import Data
from moec.codegen.kernels.model.model_device import DEVICES, FOLDER, FREE, DeviceModel


class StoredModel(Data):
    """The fitted constants of a device, as `tuned/<device>.model.json` has them."""

    device: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,100}$")]
    measurements: Annotated[int, Field(ge=1, le=2**31)]
    mean_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    constants: Mapping[Literal[FREE], Annotated[float, Field(gt=0, allow_inf_nan=False)]]  # type: ignore[valid-type]

    @property
    def origin(self) -> str:
        """The source of the constants, as `moec inspect` prints it."""
        error = f"mean error {self.mean_error:.0%}"
        return f"calibrated from {self.measurements} measurements on {self.device}, {error}"


def model_file(name: str) -> Path:
    """The file with a device's fitted constants."""
    return FOLDER / f"{name}.model.json"


@cache
def device_model(name: str) -> DeviceModel | None:
    """The model of a device, with its calibration if moec ships one; None for an unknown device."""
    model = DEVICES.get(name)
    if model is None or not model_file(name).is_file():
        return model
    stored = StoredModel.model_validate_json(model_file(name).read_bytes())
    return model.with_constants(stored.constants, stored.origin)
