"""Names of extras that are misspelt options of `job.save`, `job.load`, `job.checkpoint` and `job.resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.tables import each_row

import moec
from moec.runtime.checkpoint.options import SCHEDULE, require_extras
from moec.runtime.errors import CallError, JobError

OPTIONS = (*SCHEDULE, "keep")


class Receiver:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


@each_row(
    ("name", "option"),
    [
        ("kep", "keep"),
        ("Keep", "keep"),
        ("keeps", "keep"),
        ("evry", "every"),
        ("second", "seconds"),
        ("onsignal", "on_signal"),
    ],
)
def test_a_number_by_a_misspelt_name_is_no_extra(name: str, option: str) -> None:
    with pytest.raises(CallError, match=f"MOE0750.*`job.checkpoint` has no argument `{name}`") as raised:
        require_extras("job.checkpoint", {name: 2}, OPTIONS, object())
    assert f"did you mean `{option}`?" in raised.value.diagnostics[0].help


@each_row(
    "extras",
    [
        {"second": Receiver()},
        {"optimizer2": Receiver()},
        {"step": 1, "epoch": 2, "seed": 3, "best": 0.5, "steps": 4, "progress": {}, "seen": 5, "scheduler": Receiver()},
    ],
)
@each_row("optimizer", [None, object()])
def test_extras_of_other_names_and_objects_are_extras(extras: dict[str, Any], optimizer: object) -> None:
    require_extras("job.checkpoint", extras, OPTIONS, optimizer)


def test_a_misspelt_optimizer_is_refused_by_all_four(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        optimizer = torch.optim.SGD(model.parameters())
        for call in (job.save, job.load, job.resume, lambda *args, **extras: job.checkpoint(*args, every=1, **extras)):
            with pytest.raises(CallError, match="has no argument `optimizr`"):
                call(tmp_path / "1", model, optimizr=optimizer)
        job.save(tmp_path / "1", model, optimizer, optimizers=Receiver()).wait()  # the optimizer is given
        job.load(tmp_path / "1", model, optimizer, optimizers=Receiver())


def test_a_part_of_a_model_is_not_saved(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        layers = model.get_submodule("layers")
        assert isinstance(layers, torch.nn.ModuleList)
        del layers[1:]
        with pytest.raises(JobError, match=r"MOE0710.*the model no longer has layers\.1\..* and \d+ more"):
            job.save(tmp_path / "1", model)
    assert not (tmp_path / "1").exists()
