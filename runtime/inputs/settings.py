"""The settings of a model: inputs of its graphs that change without recompilation, as 0-d int64 tensors on CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.passes.ir import SEED, SETTINGS, STEP, TRAINING
from moec.runtime.ranks.checks import Complaint, MustMatch

_MODE: Mapping[bool, Tensor] = {mode: torch.tensor(int(mode), device="cpu") for mode in (True, False)}

CHANGEABLE = (SEED.name, STEP.name)
"""The settings that a script changes. A module's mode (`train()`, `eval()`) gives the setting `training`."""


def initial_values(seed: int) -> dict[str, int]:
    """The settings of a new model. Raises `JobError` for a seed that `set` refuses."""
    require_seed(seed)
    return {SEED.name: seed, STEP.name: STEP.default}


def require_seed(seed: int) -> None:
    """Raises `JobError` for a seed that is no valid setting: a module draws its parameters from it."""
    complaint = complaint_about({SEED.name: seed})
    if complaint is not None:
        raise complaint.error()


def setting_values(names: Sequence[str], values: Mapping[str, int], *, training: bool) -> tuple[Tensor, ...]:
    """The settings `names` of a graph, in this order."""
    return tuple(_MODE[training] if n == TRAINING.name else torch.tensor(values[n], device="cpu") for n in names)


def complaint_about(changes: Mapping[str, object]) -> Complaint | None:
    """The complaint about new values of settings, or None."""
    for name, value in changes.items():
        if name == TRAINING.name:
            return Complaint(
                "MOE0715", "`training` is the module's mode, not a setting", "call `model.train()` or `model.eval()`"
            )
        if name not in CHANGEABLE:
            return Complaint("MOE0715", f"there is no setting `{name}`", f"the settings are {', '.join(CHANGEABLE)}")
        low, high = SETTINGS[name].low, SETTINGS[name].high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            return Complaint("MOE0715", f"`{name}` is {value!r}, and must be a whole number from {low} to {high}")
    return None


def same_on_ranks(values: Mapping[str, object]) -> MustMatch:
    """The values of settings, which must be the same on every rank."""
    numbers = tuple(v if isinstance(v, int) else 0 for v in (values.get(name, 0) for name in CHANGEABLE))
    named_settings = sum(1 << bit for bit, name in enumerate(CHANGEABLE) if name in values)
    return MustMatch(
        "MOE0715",
        f"ranks differ in settings ({', '.join(CHANGEABLE)}, and which of them): from {{least}} to {{most}}",
        (*numbers, named_settings),
    )
