"""Chooses the tiles of grouped products: the running plan's, if they were tuned on this device, else moec's.

Nothing is measured here; only `moec tune` measures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from moec.codegen.kernels.stored_tiles import StoredTiles, TileKey, choose
from moec.codegen.kernels.tiles import Ways
from moec.passes.ir.activations import ACTIVATIONS

LIBRARY = ("a100", "h100", "h200", "b200", "gb200", "gb300", "mi300x")
"""Devices of moec's library that kernels run on."""

INTERPRETER = "interpreter"
"""What stands for the device of CPU tensors."""

# Process-wide, not thread-local: on CUDA, backward runs in autograd's own threads.
_tuned: tuple[tuple[str, Mapping[TileKey, Ways]], ...] = ()


@contextmanager
def use(tiles: StoredTiles | None) -> Iterator[None]:
    """Until the block ends, kernels take tiles only from this plan; with None, only moec's shipped tiles and rule."""
    global _tuned
    outer = _tuned
    _tuned = () if tiles is None else ((tiles.device, tiles.by_key()),)
    try:
        yield
    finally:
        _tuned = outer


@contextmanager
def opened(tiles: StoredTiles | None) -> Iterator[None]:
    """Until the block ends, kernels take this job's tiles too. Tiles change no result, so jobs can use each other's."""
    global _tuned
    own = () if tiles is None else ((tiles.device, tiles.by_key()),)
    _tuned = (*own, *_tuned)
    try:
        yield
    finally:
        _tuned = tuple(other for other in _tuned if all(other is not mine for mine in own))


def tiles_at(
    device: torch.device, dtype: str, rows: int, experts: int, widths: tuple[int, int], activation: str
) -> Ways:
    """The ways of the products of `rows` rows in all on a device; a plan's only if it was tuned on such a device."""
    name = device_name(device)
    tuned: dict[TileKey, Ways] = {}
    for own, tiles in reversed(_tuned):
        tuned.update(tiles if own == name else {})
    family = family_of(device)
    gated = ACTIVATIONS[activation].gated
    return choose(dtype, rows, experts, widths, gated, device=name, family=family, tuned=tuned).ways


@cache
def device_name(device: torch.device) -> str:
    """A device's name in moec's library, else what its driver calls it, in small letters and underscores."""
    return INTERPRETER if device.type != "cuda" else short_name(torch.cuda.get_device_name(device))


def short_name(name: str) -> str:
    """`h100` of "NVIDIA H100 80GB HBM3"; `nvidia_l40s` of "NVIDIA L40S", which the library does not have."""
    words = re.findall("[a-z0-9]+", name.lower())
    return next((word for word in words if word in LIBRARY), "_".join(words)[:100])


@cache
def family_of(device: torch.device) -> str:
    """The family of a device, by which the rule chooses tiles; any family will do for the interpreter."""
    if device.type != "cuda":
        return "hopper"
    if torch.version.hip is not None:
        return "cdna"
    return "hopper" if torch.cuda.get_device_capability(device) >= (9, 0) else "ampere"
