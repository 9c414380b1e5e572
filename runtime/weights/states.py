"""The states of a layer: tensors that training changes once per step, without a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moec.passes.ir import State
from moec.runtime.errors import JobError
from moec.runtime.weights.home import Home
from moec.runtime.weights.names import add_buffer, read_buffer, split_name


class LayerStates:
    """The states of one layer: buffers in fp32, whatever dtype the layer computes in; float64 in a float64 model."""

    def __init__(self, owner: nn.Module, states: Sequence[State], home: Home) -> None:
        self._names = {state.name: split_name(state.name) for state in states}
        for state in states:
            add_buffer(owner, state.name, home.state(state))

    def by_name(self, owner: nn.Module) -> dict[str, Tensor]:
        """The current states, in the order of the file. Raises `JobError` for one in a narrower dtype."""
        states = {}
        for name, path in self._names.items():
            value = read_buffer(owner, *path)
            if value.dtype not in (torch.float32, torch.float64):
                raise JobError(
                    "MOE0710",
                    f"{name} is {value.dtype}, and a state is float32: its updates round away in a narrower dtype",
                    "layers compute in the file's `dtype`; leave states and parameters float32",
                )
            states[name] = value
        return states
