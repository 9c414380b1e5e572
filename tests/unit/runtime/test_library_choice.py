"""Which library computes a product where: as chosen, as forced, or the next best with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Tile, Ways
from moec.runtime.backends import BackendError
from moec.runtime.backends.triton.libraries import library_choice, library_quack
from moec.runtime.backends.triton.libraries.library_choice import runnable

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TILE = Tile(128, 128, 64, 8, 3)
OURS = Ways(*(TILE for _ in KERNELS))
LIBRARY = OURS.with_way("down", "grouped_mm").with_way("up_weights", "grouped_mm")
QUACK = Ways(*("quack" for _ in KERNELS))


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    caches = (library_choice._runnable, library_choice._complaint, library_choice._warn)
    for cached in (*caches, library_quack.installation_complaint):
        cached.cache_clear()
    yield
    for cached in (*caches, library_quack.installation_complaint):
        cached.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None = None) -> None:
    """A device of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)


def ways(chosen: Ways, device: torch.device = CUDA, dtype: str = "bf16", widths: tuple[int, int] = (64, 32)) -> Ways:
    return runnable(device, "hopper", chosen, dtype, 4096, 4, widths, True)


def test_what_is_chosen_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((9, 0), (10, 0)):
        on(monkeypatch, capability)
        assert ways(LIBRARY) == LIBRARY
    assert ways(OURS) is OURS


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "widths", "why"),
    [
        ((8, 0), None, "bf16", (64, 32), "is a loop that waits for the host on compute capability 8.0"),
        ((12, 0), None, "bf16", (64, 32), "is a loop that waits for the host on compute capability 12.0"),
        ((9, 4), "6.4", "bf16", (64, 32), "is a loop that waits for the host on AMD devices"),
        ((9, 0), None, "fp16", (64, 32), "is a loop that waits for the host in fp16"),
        ((9, 0), None, "fp32", (64, 32), "is a loop that waits for the host in fp32"),
        ((9, 0), None, "fp64", (64, 32), "does not support fp64"),
        ((9, 0), None, "bf16", (64, 36), "needs widths that are multiples of 8 in bf16, not 36"),
    ],
)
def test_a_library_that_cannot_run_gives_way_to_our_tiles_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    hip: str | None,
    dtype: str,
    widths: tuple[int, int],
    why: str,
) -> None:
    on(monkeypatch, capability, hip)
    with pytest.warns(UserWarning, match=f"grouped_mm was chosen .* torch's grouped_mm {why}"):
        found = ways(LIBRARY, dtype=dtype, widths=widths)
    assert all(found.tile(kernel) for kernel in KERNELS)
    assert {found.of(kernel).rows for kernel in ROW_KERNELS} == {TILE.rows}  # one table
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ways(LIBRARY, dtype=dtype, widths=widths)
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    with pytest.raises(BackendError, match=f"MOE0707.*MOEC_BACKEND=grouped_mm: torch's grouped_mm {why}"):
        ways(OURS, dtype=dtype, widths=widths)


def test_too_many_experts_for_cutlass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (9, 0))
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    with pytest.raises(BackendError, match="at most 1023 experts, not 1024"):
        runnable(CUDA, "hopper", OURS, "bf16", 4096, 1024, (64, 32), True)


def test_quack_that_is_not_installed_gives_way_to_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (9, 0))
    monkeypatch.setattr(library_quack, "OLDEST", (999,))  # missing or too old
    with pytest.warns(UserWarning, match="quack was chosen .* cannot compute them: quack"):
        found = ways(QUACK)
    assert found == Ways(*("grouped_mm" for _ in KERNELS))


def test_the_environment_forces_a_library_or_our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (9, 0))
    monkeypatch.setenv("MOEC_BACKEND", "grouped_mm")
    assert ways(OURS) == Ways(*("grouped_mm" for _ in KERNELS))
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    found = ways(LIBRARY)
    assert all(found.tile(kernel) for kernel in KERNELS)
    assert (found.up, found.down_weights) == (LIBRARY.up, LIBRARY.down_weights)


def test_on_cpu_grouped_mm_computes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(LIBRARY, CPU, "fp32") == LIBRARY
