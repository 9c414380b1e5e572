"""The family of a device, by which the rule chooses tiles: what its instructions and its shared memory allow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moec.codegen.kernels.fitting import buffer_bytes
from moec.codegen.kernels.tile_rule import FULL, HALF
from moec.codegen.kernels.tiles import KERNELS
from moec.runtime.backends.triton.triton_tiles import family_of

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    family_of.cache_clear()
    yield
    family_of.cache_clear()


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 9), "ampere"),
        ((9, 0), "hopper"),
        ((10, 0), "hopper"),
        ((10, 3), "hopper"),
        ((12, 0), "ampere"),
        ((12, 1), "ampere"),
    ],
)
def test_devices_without_wgmma_and_with_small_blocks_get_the_tiles_of_ampere(
    capability: tuple[int, int], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert family_of(CUDA) == family


def test_the_tiles_of_ampere_fit_the_smallest_blocks_of_shared_memory() -> None:
    """99 KB on capabilities 8.6, 8.9 and 12 (CUDA programming guide)."""
    for dtype, ways in (*(("bf16", ways) for ways in HALF["ampere"].values()), *FULL.items()):
        for kernel in KERNELS:
            tile = ways.tile(kernel)
            assert tile is not None
            assert buffer_bytes(tile, dtype) <= 99 * 1024, f"{kernel} {tile}"
