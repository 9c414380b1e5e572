"""The choice of the backend."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton

from moec.passes.ir.activations import PARAMETERS
from moec.runtime import ops
from moec.runtime.backends import BackendError, _select, select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton import triton_backend
from moec.runtime.backends.triton.triton_support import complaint
from moec.runtime.ops.registry import BACKEND_OPERATORS


def test_plain_torch_serves_cpu_and_kernels_serve_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    assert select("cpu") is torch_backend
    assert select("cuda") is triton_backend
    monkeypatch.setenv("MOEC_BACKEND", "")  # as good as unset
    assert select("cpu") is torch_backend


def test_a_device_that_the_kernels_cannot_run_on_is_served_by_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    monkeypatch.setattr("triton.__version__", "3.5.1")
    _select.cache_clear()
    with pytest.warns(UserWarning, match=r"plain torch.*the kernels need Triton 3.6 to 3.9, and 3.5.1 is installed"):
        assert select("cuda") is torch_backend
    assert select("cuda") is torch_backend  # a second warning would be an error
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    with pytest.raises(BackendError, match=r"MOEC_BACKEND=triton: the kernels need Triton 3.6 to 3.9"):
        select("cuda")
    _select.cache_clear()


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "torch")
    assert select("cuda") is torch_backend


def test_triton_is_refused_on_cpu_without_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="on CPU tensors Triton needs its interpreter, TRITON_INTERPRET=1"):
        ops.gated(torch.randn(2, 2, 3), "swiglu")


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "tritn")
    with pytest.raises(BackendError, match="must be one of torch, triton, grouped_mm, quack, not 'tritn'"):
        ops.gated(torch.randn(2, 2, 3), "swiglu")


def test_a_backend_that_cannot_be_had_is_a_diagnostic(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("Triton", "cuda"):
        monkeypatch.setenv("MOEC_BACKEND", asked)
        with pytest.raises(BackendError) as error:
            select("cuda")
        assert [diagnostic.code for diagnostic in error.value.diagnostics] == ["MOE0707"]


def test_an_old_device_is_served_by_torch_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    _select.cache_clear()
    with pytest.warns(UserWarning, match=r"plain torch.*compute capability 8.0, Tesla V100 has 7.0"):
        assert select("cuda") is torch_backend
    assert select("cuda") is torch_backend  # a second warning would be an error
    monkeypatch.setenv("MOEC_BACKEND", "triton")
    with pytest.raises(BackendError, match=r"MOE0707.*MOEC_BACKEND=triton: the kernels need compute capability 8.0"):
        select("cuda")
    _select.cache_clear()


# ---- why kernels cannot run --------------------------------------------------------------------------


def test_a_fit_device_has_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint("cuda") is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert complaint("cpu") is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "2.3.1", "4.0.0+git1234"])
def test_a_version_of_triton_that_is_not_tried_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert complaint("cuda") == f"the kernels need Triton 3.6 to 3.9, and {version} is installed"


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1", "3.7.0+git1234"])
def test_the_versions_of_triton_that_are_tried_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert complaint("cuda") is None


def test_the_oldest_interpreter_does_not_work_with_the_newest_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(np, "__version__", "2.4.0")
    assert complaint("cpu") == "the interpreter of Triton 3.6.0 does not work with NumPy 2.4 or newer"
    monkeypatch.setattr(np, "__version__", "2.3.5")
    assert complaint("cpu") is None


def test_a_device_without_bf16_products_is_refused_and_its_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert complaint("cuda") == "the kernels need compute capability 8.0, Tesla V100 has 7.0"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert complaint("cpu") is None


def test_a_broken_triton_is_no_mistake_of_moecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text('raise ImportError("libtriton.so: no such file")')
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert complaint("cuda") == "Triton cannot be imported: libtriton.so: no such file"


WITHOUT_TRITON = """
import sys, warnings
sys.modules["triton"] = None  # importing it fails
import moec, torch
from moec.runtime.backends import select
from moec.runtime.backends.torch import torch_backend
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert select("cpu") is torch_backend and not caught
    assert select("cuda") is torch_backend and select("cuda") is torch_backend
print(*(warning.message for warning in caught))
"""


def test_without_triton_plain_torch_serves_all_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEC_BACKEND", raising=False)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    said = "moec runs its operators in plain torch, which is slow on this device: Triton is not installed\n"
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


@pytest.mark.parametrize(
    "backend", [torch_backend, triton_backend], ids=lambda backend: backend.__name__.split(".")[-1]
)
def test_a_backend_has_one_function_per_operator_with_its_arguments(backend: ModuleType):
    # These get the capacity in force.
    decide_capacity = {"permute_padded", "keep_choices", "keep_first", "keep_best", "reroute"}
    of_all_ranks = {"assign_slots"}  # the operator gathers the counts of all ranks, which the backend gets
    functions = {name for name, value in vars(backend).items() if inspect.isfunction(value)}
    split = {
        f"{name}_backward_split" for name in ("expert_linear", "expert_mlp", "mixture_mlp")
    }  # give the operators' results in two parts
    names = functions - split
    assert split < functions
    assert names == {*BACKEND_OPERATORS, *decide_capacity, *of_all_ranks}
    assert len(names) > 20
    for name in names - of_all_ranks:
        wanted = [argument.name for argument in getattr(torch.ops.moec, name).default._schema.arguments]
        taken = [p.name for p in inspect.signature(getattr(backend, name)).parameters.values()]
        if taken[-1] == "parameters":
            taken[-1:] = PARAMETERS  # variadic: of an activation, mostly none
        if name in decide_capacity:
            assert taken[-1] == "how"
            taken, wanted = taken[:-1], wanted[: len(taken) - 1]
        assert taken == wanted, name
