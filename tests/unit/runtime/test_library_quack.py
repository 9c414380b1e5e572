"""quack's adapter, which no CPU can run: its arguments against quack's signatures, and installations without it."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moec.runtime.backends import BackendError, _select, select
from moec.runtime.backends.triton.libraries import library_quack

OFFSETS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    """Each test looks for quack anew."""
    for cached in (library_quack.installation_complaint, library_quack._gemm, _select):
        cached.cache_clear()
    yield
    for cached in (library_quack.installation_complaint, library_quack._gemm, _select):
        cached.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """What `importlib.metadata` says of quack from now on."""

    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, r"quack is not installed: pip install quack-kernels"),
        ("0.6.4", "quack must be at least 0.6.5, and 0.6.4 is installed"),
        ("0.5", "quack must be at least 0.6.5, and 0.5 is installed"),
    ],
)
def test_quack_by_name_is_refused_where_it_is_missing_or_too_old(
    monkeypatch: pytest.MonkeyPatch, version: str | None, why: str
) -> None:
    installed(monkeypatch, version)
    monkeypatch.setenv("MOEC_BACKEND", "quack")
    with pytest.raises(BackendError, match=f"MOE0707.*MOEC_BACKEND=quack: {why}"):
        select("cuda")


def test_a_quack_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file\nmore lines")

    installed(monkeypatch, "0.6.5")
    monkeypatch.setattr(library_quack, "_gemm", broken)
    said = library_quack.complaint(CUDA, "bf16", 4, (64, 64))
    assert said == "quack cannot be imported: libcuda.so.1: cannot open shared object file"
    monkeypatch.undo()


class TestWithQuack:
    """Where quack is installed: `pip install quack-kernels`."""

    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        unfit = library_quack.installation_complaint()
        if unfit is not None:
            pytest.skip(unfit)

    @pytest.fixture
    def gemm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """quack's reference, plain torch, behind the checks that its kernel makes of layouts."""
        from quack.gemm_interface import gemm, gemm_ref

        signature = inspect.signature(gemm)

        def checked(*arguments: Tensor, **named: object) -> None:
            given = signature.bind(*arguments, **named).arguments
            assert given.pop("tuned") is False
            a, b, out = given["A"], given["B"], given["out"]
            if given.get("cu_seqlens_m") is not None:
                assert (a.stride(-1), out.stride(-1)) == (1, 1)
            else:
                assert (a.stride(-2), b.stride(-1)) == (1, 1)
            offsets = given.get("cu_seqlens_m", given.get("cu_seqlens_k"))
            assert (offsets.dtype, offsets.data_ptr() % 16) == (torch.int32, 0)
            gemm_ref(**given)

        monkeypatch.setattr(library_quack, "_gemm", lambda: checked)

    @pytest.mark.usefixtures("gemm")
    def test_its_arguments_have_the_layouts_that_quack_asserts(self) -> None:
        rows, others, ups = torch.randn(8, 16), torch.randn(8, 24), torch.randn(3, 24, 16)
        expert = torch.tensor([0] * 3 + [2] * 5)
        moved = torch.cat([torch.zeros(1, dtype=torch.int32), OFFSETS])[1:]  # not aligned
        of_rows = library_quack.times_transposed(rows, ups, moved)
        torch.testing.assert_close(of_rows, torch.einsum("rk,rnk->rn", rows, ups[expert]))
        back = library_quack.times(others, ups, OFFSETS)
        torch.testing.assert_close(back, torch.einsum("rn,rnk->rk", others, ups[expert]))
        gradient = library_quack.transposed_times(others, rows, OFFSETS)
        summed = torch.stack([others[expert == e].t() @ rows[expert == e] for e in range(3)])
        torch.testing.assert_close(gradient, summed)
