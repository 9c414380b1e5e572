"""The optimizer's state of experts for `torch.distributed.checkpoint`: ranks have different experts under one name.

`get_state_dict`, `set_state_dict` and other functions of `torch.distributed.checkpoint.state_dict` read the optimizers'
states, which are plain tensors, as the experts are. They would save one rank's state as that of all ranks. After the
first layer over several ranks is made, they get DTensors instead, as from the layer's own `state_dict`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moec.runtime.errors import JobError
from moec.runtime.host.layer_state import EXPERTS


class _Home(Protocol):
    def as_dtensor(self, name: str, part: Tensor) -> Tensor: ...


_sharded: WeakKeyDictionary[nn.Module, _Home] = WeakKeyDictionary()
"""Modules of experts with their homes, whose `as_dtensor` makes a rank's part of a parameter a DTensor."""


def save_states_as_dtensors(experts: nn.Module, home: _Home) -> None:
    """From now on the optimizer's state of `experts`, which differ between ranks, is saved and loaded as DTensors."""
    _install()
    _sharded[experts] = home


@functools.cache
def _install() -> None:
    torch_states._state_dict_fn = _with_dtensor_states(torch_states._state_dict_fn)  # type: ignore[assignment]
    saves = state_dict_saver._stateful_to_state_dict
    state_dict_saver._stateful_to_state_dict = _refusing_optimizers(saves)  # type: ignore[assignment]


def _refusing_optimizers(inner: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Wraps torch's function that gets objects' states (torch 2.13, checkpoint/state_dict_saver.py)."""

    @functools.wraps(inner)
    def states_of(objects: dict[str, Any]) -> Any:
        if any(isinstance(value, Optimizer) and _dtensor_makers(value) for value in objects.values()):
            raise JobError(
                "MOE0746",
                "the optimizer itself gives this rank's states of experts, and they would be saved as if they were all",
                "save what `get_state_dict(model, optimizer)` of `torch.distributed.checkpoint.state_dict` gives",
            )
        return inner(objects)

    return states_of


def _with_dtensor_states(inner: Callable[[Any, str], Callable[..., Any]]) -> Callable[[Any, str], Callable[..., Any]]:
    """Wraps torch's function that gets a method of a model or an optimizer (torch 2.13, checkpoint/state_dict.py)."""

    @functools.wraps(inner)
    def method_of(owner: Any, name: str) -> Callable[..., Any]:
        method = inner(owner, name)
        dtensor_makers = _dtensor_makers(owner) if isinstance(owner, Optimizer) else {}
        if not dtensor_makers:
            return method
        if name == "state_dict":
            return lambda: _with_dtensors(method(), owner, dtensor_makers)
        return lambda state_dict: method(state_dict=_with_parts(state_dict, owner, dtensor_makers))

    return method_of


def _dtensor_makers(optimizer: Optimizer) -> dict[int, Callable[[Tensor], Tensor]]:
    """For each parameter, by its `id`: the function that makes a part of a state a DTensor."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        id(parameter): functools.partial(home.as_dtensor, EXPERTS + name)
        for experts, home in _sharded.items()
        for name, parameter in experts.named_parameters()
        if id(parameter) in trained
    }


def _with_dtensors(state_dict: dict[str, Any], optimizer: Optimizer, makers: Mapping[int, Any]) -> dict[str, Any]:
    """The state of an optimizer with DTensors for the experts. Raises `JobError` for states of other shapes."""

    def as_dtensor(parameter: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != parameter.shape:
            raise JobError(
                "MOE0746",
                f"the state `{key}` {list(value.shape)} of this rank's experts {list(parameter.shape)} would be saved "
                "as if it were of all",
                "save `optimizer.state_dict()` in a file for each rank, and load it with as many ranks",
            )
        return makers[id(parameter)](value)

    return _mapped(state_dict, optimizer, makers, as_dtensor)


def _with_parts(state_dict: dict[str, Any], optimizer: Optimizer, makers: Mapping[int, Any]) -> dict[str, Any]:
    """The state to load with this rank's part of each DTensor of the experts."""

    def part(parameter: Tensor, key: str, value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    return _mapped(state_dict, optimizer, makers, part)


def _mapped(
    state_dict: dict[str, Any],
    optimizer: Optimizer,
    makers: Mapping[int, Any],
    function: Callable[[Tensor, str, Any], Any],
) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for parameter, key in _keys(state_dict, optimizer):
        if id(parameter) in makers and key in state:
            state[key] = {name: function(parameter, name, value) for name, value in state[key].items()}
    return {**state_dict, "state": state}


def _keys(state_dict: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[Tensor, Any]]:
    """Each parameter with its key in `state`: a number, or a name if torch has replaced it."""
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        yield from zip(group["params"], saved_group["params"], strict=True)
