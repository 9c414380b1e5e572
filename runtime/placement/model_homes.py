"""The homes of a model's experts, and the way back: whoever takes or gives its parameters finds experts in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ReferenceType, finalize, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moec.runtime.errors import JobError
from moec.runtime.model.plan_layer import Layer, layer_inside
from moec.runtime.placement.place import Place
from moec.runtime.weights.homes import Homes


class ModelHomes:
    """The homes of the layers of a model and of its copies, and the optimizers whose states move with experts.

    `state_dict` and `load_state_dict` of models, of their modules and of optimizers first move experts back: a
    collective, if any have moved.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, places: Mapping[Place, str], rank: int) -> None:
        self._optimizers: list[ReferenceType[Optimizer]] = []
        self.of_layers = dict[int, Homes]()
        _return_before(model, self)
        for place, group in places.items():
            layer = layer_inside(layers[place.number])
            assert isinstance(layer, Layer)
            shape = place.ranks, place.experts
            homes = Homes(layer._weights, layer.hosted, shape, place.position(rank), group, self._states)
            layer._weights.homes = self.of_layers[place.number] = homes
            for module in layer.modules():
                _return_before(module, self)
        # A weak reference: torch keeps the hook.
        handle = register_optimizer_step_pre_hook(_Watch(ref(self)))
        finalize(self, handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHomes:
        return self

    @property
    def have_moved(self) -> bool:
        """Whether an expert is not in its first home."""
        return any(homes.have_moved for homes in self.of_layers.values())

    def restore(self, *_: Any) -> None:
        """Moves all experts to their first homes. A collective, if any have moved."""
        for homes in self.of_layers.values():
            homes.move(homes.first)

    def add(self, optimizer: Optimizer) -> None:
        """Moves what this optimizer keeps of experts with them."""
        if optimizer not in self._known():
            self._optimizers.append(ref(optimizer))
            optimizer.register_state_dict_pre_hook(self.restore)
            optimizer.register_load_state_dict_pre_hook(self.restore)

    def look_at(self, optimizer: Optimizer) -> None:
        """Adds an optimizer that steps on experts for the first time. Raises `JobError` if it has states, and experts
        have moved since: MOE0754."""
        if optimizer in self._known():
            return
        own = {id(parameter) for homes in self.of_layers.values() for parameter in homes.parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if any(optimizer.state.get(parameter) for parameter in stepped) and self.have_moved:
            message = "an optimizer has states of experts that have moved since, and has not stepped before"
            help = "load its state before the first step, or with `job.load(path, model, optimizer)`"
            raise JobError("MOE0754", message, help)
        if stepped:
            self.add(optimizer)

    def _known(self) -> list[Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _states(self, parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
        for optimizer in self._known():
            yield from optimizer.state.get(parameter, {}).items()


class _Watch:
    """What torch calls before each step of any optimizer."""

    def __init__(self, homes: ReferenceType[ModelHomes]) -> None:
        self._homes = homes

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (homes := self._homes()) is not None:
            homes.look_at(optimizer)


def _return_before(module: nn.Module, homes: ModelHomes) -> None:
    module.register_state_dict_pre_hook(homes.restore)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(homes.restore)  # type: ignore[no-untyped-call]
