"""Collects an optimizer's state by the names of its parameters for a checkpoint, and puts it back.

A parameter's state consists of tensors and numbers. A tensor is a DTensor, or has the layout of its parameter, or is
0-d and equal on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, empty
from torch.optim import Optimizer

from moec.runtime.checkpoint.format.index import Entry, OptimizerEntry
from moec.runtime.checkpoint.format.parts import DTYPE_NAMES, DTYPES
from moec.runtime.checkpoint.format.trees import decode, encode
from moec.runtime.errors import JobError
from moec.runtime.weights.masters import placements_without

PREFIX, OPTIONS = "optimizer/", "options/"
EXECUTION_OPTIONS = frozenset(("params", "param_names", "fused", "foreach", "capturable", "differentiable"))
"""Entries of a group that are not stored: its parameters, and options that only say how a step is executed."""

FORMER_KINDS = {"moec.runtime.job.muon.Muon": "muon", "moec.runtime.job.adafactor.Adafactor": "adafactor"}
"""The kinds of moec's optimizers in older checkpoints, which had the classes' modules."""


def kind_of(optimizer: Optimizer) -> str:
    """The optimizer's own name of its kind (`kind`), or its class as a script imports it."""
    kind = type(optimizer)
    if isinstance(name := getattr(kind, "kind", None), str):
        return name
    module = "torch.optim" if getattr(torch.optim, kind.__qualname__, None) is kind else kind.__module__
    return f"{module}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """What a checkpoint stores of an optimizer: an `OptimizerEntry` as plain data, and tensors by stored names."""

    entry: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def collect(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> OptimizerContent:
    """What a checkpoint stores of `optimizer` over the parameters `named`. Copies nothing.

    Raises `JobError` MOE0807 for a parameter that is not the model's and for a state that cannot be mapped to other
    ranks, MOE0808 for an option that is no plain data.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    groups, tensors, numbers = [], dict[str, Tensor](), dict[str, dict[str, Any]]()
    for number, group in enumerate(optimizer.param_groups):
        option_tensors: list[Tensor] = []
        options = {key: value for key, value in group.items() if key not in EXECUTION_OPTIONS}
        tree = encode(options, f"optimizer.param_groups[{number}]", option_tensors)
        tensors.update({f"{OPTIONS}{number}/{i}": tensor for i, tensor in enumerate(option_tensors)})
        members = [_name(parameter, names) for parameter in group["params"]]
        groups.append({"parameters": members, "options": tree})
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                _require_key(key, name)
                if isinstance(value, Tensor):
                    _require_mapped(key, value, name, parameter)
                    tensors[f"{PREFIX}{key}/{name}"] = value
                else:
                    inside: list[Tensor] = []
                    tree = encode(value, f"optimizer.state[{name}][{key!r}]", inside)
                    _require_no_tensors(key, name, inside)
                    numbers.setdefault(name, {})[key] = tree
    made = encode(scalars_of(_made_with(optimizer)), "optimizer.defaults", [])
    entry = {"kind": kind_of(optimizer), "made": made, "groups": groups, "numbers": numbers}
    return OptimizerContent(entry, tensors)


def _made_with(optimizer: Optimizer) -> dict[str, Any]:
    """The options that the run's first optimizer was made with, or this script's where all groups have these."""
    first, made = _options_of_run.get(optimizer, {}), dict(optimizer.defaults)
    for key, value in made.items():
        if any(group.get(key) != value for group in optimizer.param_groups):
            made[key] = first.get(key, value)
    return made


def scalars_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer or of a group that are numbers, texts or tuples of these."""
    kept = {key: value for key, value in options.items() if key not in EXECUTION_OPTIONS}
    return {key: value for key, value in kept.items() if _is_scalar(value) or _are_scalars(value)}


def _is_scalar(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _are_scalars(value: object) -> bool:
    return type(value) in (list, tuple) and all(map(_is_scalar, cast("Sequence[object]", value)))


def require_members(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Raises `JobError` MOE0807 for a parameter of `optimizer` that is not among `named`, the model's."""
    names = {id(parameter): name for name, parameter in named.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _name(parameter, names)


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise JobError(
            "MOE0807",
            f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in the model",
            "give an optimizer over `model.parameters()` alone, and other modules a second one; these are extras: "
            "`job.save(path, model, optimizer, adapter=adapter, second=second)`",
        )
    return name


def _require_key(key: object, name: str) -> None:
    if not isinstance(key, str) or not re.fullmatch(r"[\w.-]{1,100}", key):
        raise JobError("MOE0807", f"the optimizer's state of {name} has an entry {key!r:.100}, which is no name")


def _require_no_tensors(key: str, name: str, inside: Sequence[Tensor]) -> None:
    if inside:
        raise JobError(
            "MOE0807",
            f"the optimizer's {key} of {name} has {len(inside)} tensors inside: moec cannot tell how they are "
            "split over ranks",
            "use an optimizer whose states are tensors and numbers, such as SGD, Adam or AdamW",
        )


def _require_mapped(key: str, value: Tensor, name: str, parameter: Tensor) -> None:
    """Raises `JobError` for a plain tensor that is the state of a DTensor: its part of the whole state is unknown."""
    if value.dim() == 0 or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return
    raise JobError(
        "MOE0807",
        f"the optimizer's {key} of {name} is a plain tensor {list(value.shape)}, but the parameter is a DTensor "
        f"{list(parameter.shape)} over {parameter.device_mesh.size()} ranks: its part of the whole is unknown",
        "use an optimizer whose states are DTensors or 0-d, such as SGD, Adam or AdamW",
    )


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a stored state. `make` makes its tensor, whose layout is that of `like`."""

    key: str
    parameter: nn.Parameter
    like: Tensor
    make: Callable[[], Tensor]


def targets_of(
    optimizer: Optimizer, entry: OptimizerEntry | None, entries: Mapping[str, Entry], named: Mapping[str, nn.Parameter]
) -> dict[str, Target]:
    """The place of every state tensor of a checkpoint, by its stored name. Changes nothing.

    Raises `JobError` MOE0806 for a checkpoint without an optimizer, with one of another class or other groups of
    parameters, or with a state that fits no tensor of this rank.
    """
    if entry is None:
        raise _other(
            "the checkpoint has no optimizer",
            "load the model alone, `job.load(path, model)`; if job.resume found it, move it to another folder, and "
            "load it from there before job.resume",
        )
    saved = FORMER_KINDS.get(entry.kind, entry.kind)
    if saved != kind_of(optimizer):
        raise _other(f"the checkpoint has the state of a {saved}, but the optimizer is a {kind_of(optimizer)}")
    names = {id(parameter): name for name, parameter in named.items()}
    _require_groups(optimizer, entry, names)
    targets = {}
    flags = {id(p): bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
    members = {name for group in entry.groups for name in group.parameters}
    for stored_name, stored in entries.items():
        if not stored_name.startswith(PREFIX):
            continue
        key, _, name = stored_name.removeprefix(PREFIX).partition("/")
        if name not in members:
            raise _other(f"the checkpoint has {key} of {name}, which is in none of its groups")
        parameter = named[name]
        state = optimizer.state.get(parameter, {})
        _require_dtype(optimizer, key, name, parameter, stored)
        targets[stored_name] = _target(key, name, parameter, state.get(key), stored, flags[id(parameter)])
    return targets


def _require_dtype(optimizer: Optimizer, key: str, name: str, parameter: nn.Parameter, stored: Entry) -> None:
    """Raises `JobError` if the optimizer has a dtype for its states (`state_dtype`) and the stored one is another."""
    if not stored.shape or not hasattr(optimizer, "state_dtype"):
        return
    wanted = DTYPE_NAMES[optimizer.state_dtype or parameter.dtype]
    if stored.dtype != wanted:
        raise _other(
            f"{key} of {name} is {stored.dtype} in the checkpoint, but this optimizer keeps {wanted}",
            "compile with the `state` of `train` as the run that saved did, or load without the optimizer",
        )


def _require_groups(optimizer: Optimizer, entry: OptimizerEntry, names: Mapping[int, str]) -> None:
    here = [{_name(p, names) for p in group["params"]} for group in optimizer.param_groups]
    there = [set(group.parameters) for group in entry.groups]
    if sorted(map(sorted, here)) == sorted(map(sorted, there)):
        return
    counts = f"{len(there)} groups with {sum(map(len, there))} parameters", f"{len(here)} with {sum(map(len, here))}"
    alone = sorted(set().union(*there) ^ set().union(*here))
    if alone:
        side = "the checkpoint" if any(alone[0] in group for group in there) else "the optimizer"
        detail = f"only {side} has {alone[0]}"
    else:
        odd = next(group for group in there if group not in here)
        detail = f"no group here has exactly the {len(odd)} parameters of one there, such as {min(odd, default='none')}"
    raise _other(f"the checkpoint's optimizer has {counts[0]}, the optimizer here {counts[1]}; {detail}")


def _target(key: str, name: str, parameter: nn.Parameter, state: object, stored: Entry, on_device: bool) -> Target:
    dtype = DTYPES[stored.dtype]
    has_known_layout = isinstance(state, DTensor) or not isinstance(parameter, DTensor) or not stored.shape
    if isinstance(state, Tensor) and tuple(state.shape) == stored.shape and has_known_layout:
        if state.dtype != dtype:
            here = DTYPE_NAMES.get(state.dtype, str(state.dtype))
            raise _other(f"{key} of {name} is {stored.dtype} in the checkpoint, but {here} here")
        return Target(key, parameter, state, lambda: state)
    if stored.shape == tuple(parameter.shape) and parameter.dim():
        return Target(key, parameter, parameter, lambda: torch.empty_like(parameter, dtype=dtype).detach())
    if isinstance(parameter, DTensor) and _is_factor(stored.shape, parameter):
        factor = partial(_empty_factor, stored.shape, parameter, dtype)
        return Target(key, parameter, factor(), factor)
    if not stored.shape or not isinstance(parameter, DTensor):
        # torch's `load_state_dict` keeps only `step` on the CPU, and only if no kernel reads it.
        device = torch.device("cpu") if key == "step" and not on_device else parameter.device
        whole = torch.empty(stored.shape, dtype=dtype, device="meta")
        return Target(key, parameter, whole, lambda: torch.empty(stored.shape, dtype=dtype, device=device))
    raise _other(
        f"{key} of {name} is {list(stored.shape)} in the checkpoint, but the parameter is {list(parameter.shape)} over "
        f"{parameter.device_mesh.size()} ranks",
        "take a step with the optimizer before you load: its states then have their layouts",
    )


def _is_factor(shape: tuple[int, ...], parameter: DTensor) -> bool:
    """Whether each dim of a state has size 1 or the parameter's size, as in Adafactor's factors."""
    if not shape or len(shape) != parameter.dim():
        return False
    return all(n in (1, whole) for n, whole in zip(shape, parameter.shape, strict=True))


def _empty_factor(shape: tuple[int, ...], parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """A DTensor with the parameter's layout, but replicated in dims of size 1."""
    placements = placements_without(parameter, [dim for dim, size in enumerate(shape) if size == 1])
    return empty(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)


_options_of_run = WeakKeyDictionary[Optimizer, Mapping[str, Any]]()
"""The options that the run's first optimizer was made with (`PlainState.made`), by loaded optimizer."""


def _other(message: str, help: str = "make the optimizer as the run that saved did, or load without it") -> JobError:
    return JobError("MOE0806", message, help)


@dataclass(frozen=True, slots=True)
class PlainState:
    """The plain data of a checkpoint's optimizer: `options` by group, `numbers` by parameter.

    `groups[i]` is the number of the checkpoint's group with the parameters of this optimizer's group i. `made`: the
    options that the run's first optimizer was made with; none in a checkpoint of format 1.
    """

    options: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, Mapping[str, Any]]
    groups: Sequence[int]
    made: Mapping[str, Any]

    @property
    def is_reordered(self) -> bool:
        """Whether the groups here are in another order than in the checkpoint."""
        return list(self.groups) != sorted(self.groups)


def plain_state_of(
    optimizer: Optimizer,
    entry: OptimizerEntry,
    named: Mapping[str, nn.Parameter],
    tensor_of: Callable[[int, int], Tensor],
) -> PlainState:
    """Decodes the plain data of `entry`; `tensor_of(group, number)` gives tensors among the options. Changes nothing.

    `optimizer` has the groups of `entry` in any order. Raises `ValueError` or `TypeError` for data that `collect` does
    not write.
    """
    options, numbers = [], {}
    for number, group in enumerate(entry.groups):
        group_options = decode(group.options, partial(tensor_of, number))
        if not isinstance(group_options, dict) or not EXECUTION_OPTIONS.isdisjoint(group_options):
            raise ValueError(f"the options of group {number} are not those of an optimizer")
        options.append(group_options)
    for name, trees in entry.numbers.items():
        numbers[name] = {key: decode(tree, _no_tensor) for key, tree in trees.items()}
    made = decode(entry.made, _no_tensor) or {}
    if not isinstance(made, dict):
        raise ValueError("the options that an optimizer was made with are no dict")
    return PlainState(options, numbers, _numbers_of_groups(optimizer, entry, named), made)


def _numbers_of_groups(optimizer: Optimizer, entry: OptimizerEntry, named: Mapping[str, nn.Parameter]) -> list[int]:
    """`PlainState.groups`. Groups without parameters are matched in their order."""
    names = {id(parameter): name for name, parameter in named.items()}
    left: dict[frozenset[str], list[int]] = {}
    for number in reversed(range(len(entry.groups))):
        left.setdefault(frozenset(entry.groups[number].parameters), []).append(number)
    return [left[frozenset(names[id(p)] for p in group["params"])].pop() for group in optimizer.param_groups]


def _no_tensor(_: int) -> Tensor:
    raise ValueError("a tensor is among the numbers")


def put_back(
    optimizer: Optimizer,
    plain: PlainState,
    named: Mapping[str, nn.Parameter],
    states: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Gives `optimizer` the options and states of a checkpoint; drops states that the checkpoint lacks.

    `states`: filled tensors by parameter and key. Later checkpoints of `optimizer` store the options that the run began
    with, not those of this script.
    """
    _options_of_run[optimizer] = plain.made
    names = {id(parameter): name for name, parameter in named.items()}
    for group, number in zip(optimizer.param_groups, plain.groups, strict=True):
        members = [names[id(parameter)] for parameter in group["params"]]
        group.update(plain.options[number])
        for name, parameter in zip(members, group["params"], strict=True):
            state = {**states.get(name, {}), **plain.numbers.get(name, {})}
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)
