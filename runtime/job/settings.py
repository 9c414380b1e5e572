"""The settings of a module's graphs: numbers that change without compiling again, as 0-d int64 tensors on CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.passes.ir import TRAINING

_TRAINING: Mapping[bool, Tensor] = {mode: torch.tensor(int(mode), device="cpu") for mode in (True, False)}


def setting_values(names: Sequence[str], *, training: bool) -> tuple[Tensor, ...]:
    """The values of a graph's settings, in its order. There is one setting so far, `training`."""
    assert all(name == TRAINING.name for name in names), names
    return (_TRAINING[training],) * len(names)
