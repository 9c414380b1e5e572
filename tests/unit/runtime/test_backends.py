"""Which backend does the work."""

from __future__ import annotations

import pytest
import torch

from moec.runtime import ops
from moec.runtime.backends import BackendError, _select, select, torch_backend, triton_backend


def test_plain_torch_serves_cpu_and_kernels_serve_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    assert select("cpu") is torch_backend
    assert select("cuda") is triton_backend


def test_a_device_that_the_kernels_cannot_run_on_is_served_by_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    monkeypatch.setattr("triton.__version__", "3.5.1")
    _select.cache_clear()
    with pytest.warns(UserWarning, match=r"plain torch.*the kernels are for Triton 3.6 to 3.9, this is 3.5.1"):
        assert select("cuda") is torch_backend
    assert select("cuda") is torch_backend  # a second warning would be an error
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    with pytest.raises(BackendError, match=r"MOEC_BACKEND=triton: the kernels are for Triton 3.6 to 3.9"):
        select("cuda")
    _select.cache_clear()


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "torch")
    assert select("cuda") is torch_backend


def test_triton_is_refused_on_cpu_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="on CPU tensors Triton needs its interpreter, TRITON_INTERPRET=1"):
        ops.swiglu(torch.randn(2, 2, 3))


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "tritn")
    with pytest.raises(BackendError, match="must be one of torch, triton, not 'tritn'"):
        ops.swiglu(torch.randn(2, 2, 3))
