"""Which backend does the work."""

from __future__ import annotations

import pytest
import torch

from moec.runtime import ops
from moec.runtime.backends import BackendError, select, torch_backend


def test_plain_torch_serves_cpu_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    assert select("cpu") is torch_backend
    assert select("cuda") is torch_backend


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "torch")
    assert select("cuda") is torch_backend


def test_triton_is_refused_until_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    with pytest.raises(BackendError, match="not supported yet"):
        ops.swiglu(torch.randn(2, 2, 3))


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "tritn")
    with pytest.raises(BackendError, match="must be one of torch, triton, not 'tritn'"):
        ops.swiglu(torch.randn(2, 2, 3))
