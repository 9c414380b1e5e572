"""The homes of a model's experts, and the way back: whoever takes or gives its parameters finds experts in order."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import ReferenceType, finalize, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moec.runtime.errors import JobError
from moec.runtime.model.plan_layer import Layer, layer_inside
from moec.runtime.placement.place import Place
from moec.runtime.ranks.checks import Checks, Complaint
from moec.runtime.ranks.groups import is_open
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.homes import ExpertHomes
from moec.runtime.weights.movable import unmovable
from moec.runtime.weights.slots import slots_in_order

STATE_DICT = "state_dict or load_state_dict"

LATE = "an optimizer has states of experts that have moved before it was seen, and nothing says in which order they are"
ALIKE = (
    "several optimizers have states of the same experts and have not stepped, and nothing says which is which on ranks"
)


class ModelHomes:
    """The homes of the layers of a model and of its copies, and the optimizers whose states move with experts.

    `state_dict` and `load_state_dict` of models, of their modules and of optimizers first move experts back: a
    collective, if any have moved. `job`: the prefix of its groups; `number`: that of the model in the job.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        places: Sequence[Place],
        rank: int,
        job: str,
        checks: Checks,
        number: int,
    ) -> None:
        self._job, self._checks, self._number = job, checks, number
        self._optimizers: list[ReferenceType[Optimizer]] = []
        self._complaint = ""
        """Why nothing can move now."""
        self._was_movable = False
        self._seconds: float | None = None
        self._of_layers = dict[int, ExpertHomes]()
        self._restore_before(model)
        for place in places:
            layer = layer_inside(layers[place.number])
            assert isinstance(layer, Layer)
            first, group = slots_in_order(place.shape.ranks, place.shape.experts), job + place.group
            homes = ExpertHomes(layer._weights, layer.of_experts, first, place.position(rank), group, self)
            layer._weights.homes = self._of_layers[place.number] = homes
            experts = {id(parameter) for parameter in homes.parameters()}
            for module in layer.modules():
                own = [name for name, p in module.named_parameters(recurse=False) if id(p) in experts]
                self._restore_before(module, homes, tuple(own))
        # A weak reference: torch keeps the hook.
        handle = register_optimizer_step_pre_hook(_Watch(ref(self)))
        finalize(self, handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHomes:
        return self

    @property
    def have_moved(self) -> bool:
        """Whether an expert is not in its first home."""
        return any(homes.have_moved for homes in self._of_layers.values())

    def figures(self) -> dict[str, float]:
        """The seconds that the last move took this rank's host, if there was one."""
        return {} if self._seconds is None else {"move_seconds": self._seconds}

    def of_layer(self, number: int) -> ExpertHomes:
        """Those of a layer."""
        return self._of_layers[number]

    # ---- moving ----------------------------------------------------------------------------------------

    def move(self, slots: Mapping[int, Tensor]) -> None:
        """Makes `slots` the homes of these layers. A collective, where they differ from those of now."""
        for homes in self._of_layers.values():
            homes.require_kept()
        moving = [number for number, to in slots.items() if not self._of_layers[number].are(to)]
        if moving:
            start = time.perf_counter()
            self._look_around()
            for number in moving:
                self._of_layers[number].move(slots[number])
            self._seconds = time.perf_counter() - start

    def restore(self, call: str = STATE_DICT, complaint: Complaint | None = None) -> None:
        """Moves all experts to their first homes, for what the script calls. A collective, if any have moved.

        Raises `JobError` on every rank: for a `complaint` of one, if ranks call something else (MOE0702), and if
        experts cannot move (MOE0754).
        """
        if not self.have_moved:
            return
        if in_backward():
            words = f"{call} in a backward pass, while experts are in other homes"
            raise JobError("MOE0754", words, "call it between two steps")
        if not is_open(self._job):
            words = "the job ended while experts were in other homes: row i of their parameters is not expert i"
            raise JobError(
                "MOE0754", words, "load the last checkpoint; a job that ends without an error moves them back"
            )
        self._checks.require(f"{call}, while experts of model {self._number} are in other homes", complaint)
        self.move({number: homes.first for number, homes in self._of_layers.items()})

    def require_movable_once(self) -> None:
        """Raises `JobError` on every rank if experts cannot move: MOE0754. A collective, of the first call."""
        if not self._was_movable:
            self._look_around()
            for homes in self._of_layers.values():
                homes.require_movable()
            self._was_movable = True

    def complaint(self) -> str:
        """Why nothing can move now; empty if experts can."""
        return self._complaint

    def states(self, parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
        """All that optimizers keep of a parameter, in the order in which these were seen and of names: one may have
        added states in another order on each rank. An optimizer's settings come first: where ranks have seen optimizers
        in different orders these differ, and stop the job."""
        seen = set[int]()
        for optimizer in self._known():
            state = optimizer.state.get(parameter)
            if state and id(state) not in seen:  # a wrapper may have those of the one inside it
                seen.add(id(state))
                yield "the optimizer's settings", repr(_settings(getattr(optimizer, "defaults", {})))
                yield from sorted(((_name(key), value) for key, value in state.items()), key=itemgetter(0))

    def _look_around(self) -> None:
        """Finds optimizers that have states and have not stepped yet, and what keeps experts from moving."""
        self._complaint = self._found()
        if self._complaint:
            gc.collect()  # a deleted optimizer in a cycle of references may be left
            self._complaint = self._found()

    def _found(self) -> str:
        """Adds the optimizers that are found; or says why nothing can move."""
        owners = Counter(number for homes in self._of_layers.values() for number in set(map(id, homes.parameters())))
        if any(number > 1 for number in owners.values()):
            return "two layers have one parameter of experts"
        # Of their types: `isinstance` asks objects for `__class__`, which may compute, warn or raise.
        optimizers = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
        loaded = [
            (self._key(found), found) for found in optimizers if found not in self._known() and self._has_states(found)
        ]
        if loaded and self.have_moved:
            return LATE
        if len({key for key, _ in loaded}) < len(loaded):
            return ALIKE
        for _, optimizer in sorted(loaded, key=lambda each: each[0]):  # in an order that all ranks share
            self.add(optimizer)
        return ""

    # ---- optimizers ------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer) -> None:
        """Moves what this optimizer keeps of experts with them."""
        if optimizer not in self._known():
            self._optimizers.append(ref(optimizer))
            if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
                return  # a wrapper, which has no state of its own: the one inside it has hooks
            optimizer.register_state_dict_pre_hook(self._before_states)
            optimizer.register_load_state_dict_pre_hook(self._before_states)

    def look_at(self, optimizer: Optimizer) -> None:
        """Adds an optimizer that steps on experts. Raises `JobError` for states in an unknown order: MOE0754."""
        if self._is_late(optimizer):
            raise unmovable(LATE)
        if optimizer not in self._known() and self._experts_of(optimizer):
            self.add(optimizer)

    def _is_late(self, optimizer: Optimizer) -> bool:
        """Whether its states may be from before a move: it was not there then, or has been copied or loaded since."""
        return optimizer not in self._known() and self._has_states(optimizer) and self.have_moved

    def _has_states(self, optimizer: Optimizer) -> bool:
        """Whether it has states of experts of its own, and not those of a known one that it wraps."""
        known = {id(of.state.get(parameter)) for of in self._known() for parameter in self._experts_of(of)}
        states = (optimizer.state.get(parameter) for parameter in self._experts_of(optimizer))
        return any(state and id(state) not in known for state in states)

    def _key(self, optimizer: Optimizer) -> tuple[str, tuple[int, ...]]:
        """What tells optimizers apart, alike on all ranks."""
        numbers = {id(p): n for n, p in enumerate(p for homes in self._of_layers.values() for p in homes.parameters())}
        return type(optimizer).__qualname__, tuple(numbers[id(p)] for p in self._experts_of(optimizer))

    def _experts_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The experts among its parameters; none of an optimizer whose `__init__` has not ended."""
        experts = {id(parameter) for homes in self._of_layers.values() for parameter in homes.parameters()}
        return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if id(p) in experts]

    def _known(self) -> list[Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    # ---- hooks -----------------------------------------------------------------------------------------

    def _before_states(self, *_: Any) -> None:
        """What comes before `state_dict` and `load_state_dict` of an optimizer."""
        self.restore()

    def _restore_before(
        self, module: nn.Module, layer: ExpertHomes | None = None, experts: tuple[str, ...] = ()
    ) -> None:
        """Moves experts back before anyone takes or gives the tensors of `module`, whose own ones `experts` are those
        of a layer."""
        before = partial(_before, self, layer, experts)
        module.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]


def _before(homes: ModelHomes, layer: ExpertHomes | None, experts: tuple[str, ...], module: nn.Module, *_: Any) -> None:
    """What comes before `state_dict` and `load_state_dict` of a module. Raises `JobError` for a copied part of a layer,
    whose experts do not move with the model's: MOE0754."""
    known = set(map(id, layer.parameters())) if layer is not None and experts else set()
    own = [parameter for name in experts if (parameter := module._parameters.get(name)) is not None]
    if any(id(parameter) not in known for parameter in own):
        words = "this module is a copy of a part of a layer, and its experts do not move with the model's"
        raise JobError("MOE0754", words, "copy the whole layer or model, or leave `greedy` out of `placement`")
    homes.restore()


def _name(key: object) -> str:
    return key if isinstance(key, str) else f"{type(key).__name__} {key!r}"


def _settings(values: object) -> list[Any]:
    """The fractions, flags and words among what an optimizer was made with. They are alike on all ranks, as whole
    numbers (seeds) and what is printed with its address need not be."""
    if isinstance(values, Mapping):
        return [(_name(key), found) for key, value in values.items() if (found := _settings(value))]
    if isinstance(values, tuple | list):
        return [found for value in values if (found := _settings(value))]
    return [values] if isinstance(values, bool | float | str) else []


class _Watch:
    """What torch calls before each step of any optimizer."""

    def __init__(self, homes: ReferenceType[ModelHomes]) -> None:
        self._homes = homes

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (homes := self._homes()) is not None:
            homes.look_at(optimizer)
