"""A learned gate bias and that of `online` have one name and shape: state of the one is refused by the other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.weights.state_dict_signing import KEY, STATES

NAME = "layers.1.moe.gate.bias"
KINDS = {"learned": "learned", "online": "online(0.01)"}
PAIRS = [("learned", "online"), ("online", "learned")]


def plan_of(kind: str, **options: Any) -> Plan:
    return moe_plan(ranks=1, ep=1, gate=f"topk(2, bias = {KINDS[kind]})", balance="[]", **options)


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_checkpoint_of_the_other_kind_is_refused_and_changes_nothing(
    tmp_path: Path, saved: str, loaded: str, resumes: bool
) -> None:
    with moec.launch(plan_of(saved), device="cpu") as job:
        job.save(tmp_path / "1", job.build(seed=1)).wait()
    with moec.launch(moec.load_for(1, plan_of(loaded)), device="cpu") as job:
        model = job.build(seed=2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(JobError, match=rf"MOE0805.*{NAME} is `{saved}` in the checkpoint, `{loaded}` here"):
            job.resume(tmp_path, model) if resumes else job.load(tmp_path / "1", model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_same_kind_loads_with_another_rate(tmp_path: Path, kind: str) -> None:
    with moec.launch(plan_of(kind), device="cpu") as job:
        model = job.build(seed=1)
        with torch.no_grad():
            model.state_dict()[NAME].fill_(0.5)
        job.save(tmp_path / "1", model).wait()
    bias = "online(0.02)" if kind == "online" else kind
    other = moe_plan(ranks=1, ep=1, gate=f"topk(2, bias = {bias})", balance="[]")
    with moec.launch(other, device="cpu") as job:
        model = job.build(seed=2)
        if kind == "online":
            with pytest.warns(UserWarning, match="computes something else"):
                job.load(tmp_path / "1", model)
        else:
            job.load(tmp_path / "1", model)
        assert (model.state_dict()[NAME] == 0.5).all()


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.parametrize("of", ["model", "layer"])
def test_a_state_dict_of_the_other_kind_is_refused(saved: str, loaded: str, of: str) -> None:
    file = io.BytesIO()
    with moec.launch(plan_of(saved), device="cpu") as job:
        model = job.build(seed=1)
        torch.save((model if of == "model" else model.layers[1]).state_dict(), file)
    file.seek(0)
    state, words = torch.load(file), {"learned": "learned", "online": "a state"}
    with moec.launch(plan_of(loaded), device="cpu") as job:
        model = job.build(seed=2)
        target = model if of == "model" else model.layers[1]
        said = rf"MOE0712.*moe.gate.bias is {words[saved]} in this state_dict, and {words[loaded]} here"
        with pytest.raises(JobError, match=said):
            target.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_of_an_earlier_moec_or_without_its_metadata_loads(kind: str) -> None:
    with moec.launch(plan_of(kind), device="cpu") as job:
        saved, model = job.build(seed=1).state_dict(), job.build(seed=2)
        for metadata in saved._metadata.values():
            metadata.get(KEY, {}).pop(STATES, None)
        model.load_state_dict(saved)
        model.load_state_dict(dict(saved))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
