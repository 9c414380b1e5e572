"""The library for a product on this device: the chosen one, the one that `MOEC_BACKEND` forces, or the next best."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from types import ModuleType

import torch

from moec.codegen.kernels.library_rule import tile_instead
from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS, LIBRARIES, Kernel, Library, Tile, Way, Ways
from moec.runtime.backends import VARIABLE, BackendError, forced_backend
from moec.runtime.backends.triton.libraries import library_grouped_mm, library_quack
from moec.runtime.script import warn_first

MODULES: dict[Library, ModuleType] = {"grouped_mm": library_grouped_mm, "quack": library_quack}
"""Each has `complaint`, `times_transposed`, `times` and `transposed_times`."""

NEXT: dict[Library, Library | None] = {"quack": "grouped_mm", "grouped_mm": None}
"""The next best library; None: our own product."""


def runnable(
    device: torch.device,
    family: str,
    chosen: Ways,
    dtype: str,
    rows: int,
    experts: int,
    widths: tuple[int, int],
    gated: bool,
) -> Ways:
    """The ways in which the products of such a layer run on a device, of those chosen; `widths` are dim and hidden.

    `MOEC_BACKEND=grouped_mm` or `quack` takes that library for every product, and raises `BackendError` if it cannot
    compute them; `triton` takes our products. Otherwise a library that cannot run gives way to the next best, with one
    warning.
    """
    forced = forced_backend()
    if forced not in LIBRARIES and all(chosen.tile(kernel) for kernel in KERNELS):
        return chosen
    return _runnable(forced, chosen, device, dtype, rows, experts, widths, gated, family)


@lru_cache(maxsize=4096)
def _runnable(
    forced: str | None,
    chosen: Ways,
    device: torch.device,
    dtype: str,
    rows: int,
    experts: int,
    widths: tuple[int, int],
    gated: bool,
    family: str,
) -> Ways:
    problem = (device, dtype, experts, (*widths, 2 * widths[1] if gated else widths[1]))
    if forced in LIBRARIES:
        reason = _complaint(forced, *problem)
        if reason is not None:
            raise BackendError(f"{VARIABLE}={forced}: {reason}", f"unset it, or set {VARIABLE}=triton")
        return Ways(*(forced for _ in KERNELS))

    rule = tiles_for(dtype, rows, experts, widths, gated, family)

    def way(kernel: Kernel) -> Way:
        choice = chosen.of(kernel)
        if isinstance(choice, Tile):
            return choice
        library = None if forced == "triton" else _best(choice, *problem)
        return library or tile_instead(rule, chosen, kernel)

    return Ways(*(way(kernel) for kernel in KERNELS))


def _best(choice: Library, *problem: object) -> Library | None:
    """`choice`, or the next library that can run; None if none can. Warns about libraries that cannot."""
    for library in _library_and_next(choice):
        reason = _complaint(library, *problem)
        if reason is None:
            return library
        _warn(library, reason)
    return None


def _library_and_next(library: Library | None) -> Iterator[Library]:
    while library is not None:
        yield library
        library = NEXT[library]


@cache
def _complaint(library: Library, *problem: object) -> str | None:
    reason: str | None = MODULES[library].complaint(*problem)
    return reason


@cache
def _warn(library: Library, reason: str) -> None:
    warn_first(f"{library} was chosen for experts' products and cannot compute them: {reason}", "LOCAL_RANK")
