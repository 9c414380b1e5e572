"""The ways of grouped products at a call: those that the module was emitted with, else moec's own choice.

Nothing is measured here; only `moec tune` measures.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import torch

from moec.codegen.kernels.fitting import fitted
from moec.codegen.kernels.plan_ways import KNOWN, Target, takes_tuned, ways_text
from moec.codegen.kernels.stored_tiles import choose
from moec.codegen.kernels.tile_rule import INTERPRETER
from moec.codegen.kernels.tiles import Ways
from moec.codegen.plan import Plan
from moec.passes.ir import Block, Op
from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends import select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton.libraries.library_choice import runnable
from moec.runtime.script import warn_first


def ways_at(
    text: str | None,
    device: torch.device,
    dtype: str,
    rows: int,
    experts: int,
    widths: tuple[int, int],
    activation: str,
) -> Ways:
    """The ways of an operator's argument `text`; without it, moec's choice for `rows` rows in all on this device.

    Libraries that cannot run here are replaced, or raise `BackendError` (`runnable`).
    """
    gated, target = ACTIVATIONS[activation].gated, target_at(device)
    problem = (dtype, rows, experts, widths, gated)
    if text is not None:
        chosen = _parsed(text)
    else:
        chosen = choose(*problem, device=target.name, family=target.family, tuned={}).ways
    assert target.runnable is not None
    return target.runnable(chosen, *problem)


@cache
def _parsed(text: str) -> Ways:
    """Raises `RuntimeError`, as operators do for other wrong arguments."""
    try:
        return Ways.parse(text)
    except ValueError as error:
        raise RuntimeError(f"moec: ways: {error}") from error


@cache
def target_at(device: torch.device) -> Target:
    """The name and family of this machine's device."""
    family = family_of(device)
    return Target(device_name(device), family, partial(_runnable, device, family))


def _runnable(device: torch.device, family: str, ways: Ways, dtype: str, *problem: Any) -> Ways:
    """The ways that run on a device: libraries that it has, and tiles that fit its shared memory."""
    ways = runnable(device, family, ways, dtype, *problem)
    shared = shared_of(device)
    return ways if shared is None else _fitted(ways, dtype, shared, device_name(device))


@cache
def _fitted(ways: Ways, dtype: str, shared: int, name: str) -> Ways:
    fitting = fitted(ways, dtype, shared)
    if fitting != ways:
        _warn_of_shared_memory(name, shared)
    return fitting


@cache
def _warn_of_shared_memory(name: str, shared: int) -> None:
    warn_first(
        f"a block on {name} has {shared // 1024} KiB of shared memory, less than the chosen tiles need: "
        "moec uses smaller tiles; "
        "`moec tune` on this device finds the fastest",
        "LOCAL_RANK",
    )


@cache
def shared_of(device: torch.device) -> int | None:
    """The bytes of shared memory that a block can have; None where it limits no tile (the interpreter) or on AMD."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    from triton.runtime.driver import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    # Triton refuses launches above this limit.
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def runs_on(device: torch.device) -> torch.device:
    """The device that a module on `device` will run on: this machine's own for one on meta."""
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ways_on(plan: Plan, block: Block, op: Op, device: torch.device) -> str | None:
    """The ways in which an op of experts computes its products on `device`: the last argument of its operator.

    None where plain torch computes them. A module on the meta device will move to this machine's device. Tiles that
    were tuned on another device are not used, with one warning.
    """
    device = runs_on(device)
    if select(device.type) is torch_backend:
        return None
    target = target_at(device)
    if plan.tiles is not None and not takes_tuned(plan, target):
        _warn_of_other_device(plan.tiles.device, target.name)
    return ways_text(plan, block, op, target)


@cache
def _warn_of_other_device(tuned_on: str, name: str) -> None:
    warn_first(
        f"the plan's tiles were tuned on {tuned_on}, and this device is {name}: moec's own tiles run; "
        "`moec tune` on this device finds the fastest",
        "LOCAL_RANK",
    )


@cache
def device_name(device: torch.device) -> str:
    """A device's name in moec's library, else its driver's name for it, in small letters and underscores."""
    return INTERPRETER if device.type != "cuda" else short_name(torch.cuda.get_device_name(device))


def short_name(name: str) -> str:
    """`h100` of "NVIDIA H100 80GB HBM3"; `nvidia_l40s` of "NVIDIA L40S", which the library does not have."""
    words = re.findall("[a-z0-9]+", name.lower())
    return next((word for word in words if word in KNOWN), "_".join(words)[:100])


@cache
def family_of(device: torch.device) -> str:
    """The family of a device, by which the rule chooses tiles; any family will do for the interpreter.

    From compute capability 12 on, NVIDIA's devices have an Ampere's instructions and shared memory: no wgmma, and 99 KB
    for a block, which the tiles for Hopper exceed.
    """
    if device.type != "cuda":
        return "hopper"
    if torch.version.hip is not None:
        return "cdna"
    return "hopper" if (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0) else "ampere"
