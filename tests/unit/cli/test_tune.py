"""`moec tune` without anything to measure; `tests/kernels/interpreted_tuning.py` tests its search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.plans import moe_plan

from moec.cli import app
from moec.driver import compile as compile_source
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.backends.triton.triton_tiles import short_name
from moec.runtime.tune.tuning import require_fit, tune

MIXTRAL = Path(__file__).parents[3] / "examples" / "mixtral_8x7b.moe"


def test_on_processors_there_is_nothing_to_tune_and_the_plan_stays(tmp_path: Path) -> None:
    folder = moe_plan().save(tmp_path / "tiny.plan")
    before = (folder / "plan.json").read_bytes()
    done = CliRunner().invoke(app, ["tune", str(folder)])
    assert done.exit_code == 0, done.output
    assert done.stdout == "tiny: on cpu plain torch runs everything; there is nothing to tune\n"
    assert (folder / "plan.json").read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_where_to_go() -> None:
    with pytest.raises(DiagnosticError, match=r"MOE0706.*the plan is for h100 \(cuda\), but torch finds no GPU"):
        tune(compile_source(MIXTRAL))


def test_a_backend_that_does_not_exist_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MOEC_BACKEND", "grouped-mm")
    with pytest.raises(DiagnosticError, match=r"MOE0707.*must be one of torch, triton, .*, not 'grouped-mm'"):
        tune(compile_source(MIXTRAL))


def test_the_device_must_be_of_the_plans_kind_and_not_another_of_the_library() -> None:
    h100 = compile_source(MIXTRAL).spec.cluster.device
    require_fit(h100, "cuda", "NVIDIA H100 80GB HBM3")
    require_fit(h100, "cuda", "NVIDIA GH200 480GB")  # not in moec's library, so not known to be another device
    for kind, name in (("cuda", "NVIDIA A100-SXM4-80GB"), ("hip", "AMD Instinct MI300X"), ("hip", "AMD H100")):
        with pytest.raises(DiagnosticError, match=f"this machine has {name}"):
            require_fit(h100, kind, name)


def test_devices_go_by_their_names_in_the_library() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GH200 480GB": "nvidia_gh200_480gb",
        "NVIDIA GB200": "gb200",
        "NVIDIA L40S": "nvidia_l40s",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {name: short_name(name) for name in names} == names


def test_a_plan_without_experts_has_nothing_to_tune(tmp_path: Path) -> None:
    dense = """
    model "dense" { vocab = 64; dim = 64; depth = 1; layers { attention = mha(heads = 4); ffn = geglu(96) } }
    use "devices/h100"
    cluster "one" { device = "h100"; level "gpu" { size = 1 } }
    train { batch = 2; sequence = 64; optimizer = adamw(lr = 1e-2) }
    """
    done = CliRunner().invoke(app, ["tune", str(compile_source(dense).save(tmp_path / "dense.plan"))])
    assert done.exit_code == 0, done.output
    assert "no kernel runs its experts" in done.stdout
