"""One rank prints a warning that applies to all ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
from support.ranks.gloo_pool import GlooPool

from moec.runtime.backends import _select, select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton.triton_launch import no_fp64, too_many


def fall_back_as_rank(local_rank: int | None) -> list[str]:
    """The warnings of a rank whose Triton is too old, on an AMD device, of a model with too many experts."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.delenv("MOEC_BACKEND", raising=False)
        if local_rank is not None:
            patch.setenv("LOCAL_RANK", str(local_rank))
        patch.setattr(triton, "__version__", "3.5.1")
        patch.setattr(torch.version, "hip", "6.4")
        for cached in (_select, too_many, no_fp64):
            cached.cache_clear()
        for _ in range(2):
            assert select("cuda") is torch_backend
            assert too_many(2049)
            assert no_fp64(torch.device("cuda"), torch.float64)
    for cached in (_select, too_many, no_fp64):
        cached.cache_clear()
    return [str(warning.message) for warning in caught]


OLD = "moec runs its operators in plain torch, which is slow on this device: the kernels need Triton 3.6 to 3.9"
OF_MACHINE = [
    f"{OLD}, and 3.5.1 is installed",
    "moec has no float64 kernels for AMD devices; float64 products run in plain torch",
]
OF_MODEL = "moec's kernels take at most 2048 experts; a layer of 2049 runs in plain torch"


def test_one_rank_warns_that_plain_torch_does_the_work(gloo: GlooPool) -> None:
    first, *others = gloo.run(3, fall_back_as_rank, None)
    assert sorted(first) == sorted([*OF_MACHINE, OF_MODEL])
    assert others == [[], []]


def test_the_first_rank_of_another_machine_warns_of_that_machine_alone(gloo: GlooPool) -> None:
    first, second = gloo.run(2, fall_back_as_rank, 0)
    assert sorted(first) == sorted([*OF_MACHINE, OF_MODEL])
    assert sorted(second) == sorted(OF_MACHINE)


def test_without_torchrun_a_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert len(fall_back_as_rank(None)) == 3
