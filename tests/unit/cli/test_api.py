"""`import moec`: its names, and which imports are lazy."""

import copy
import subprocess
import sys

import pytest
import torch
from support.plans import moe_spec, moe_text

import moec


def test_importing_moec_imports_neither_torch_nor_pydantic():
    code = "import moec, sys; print([m for m in ('torch', 'pydantic', 'lark', 'click') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_every_name_it_lists_is_there():
    assert set(moec.__all__) <= set(dir(moec))
    for name in moec.__all__:
        assert getattr(moec, name) is not None
    with pytest.raises(AttributeError, match=r"there is no `moec.frobnicate`"):
        moec.frobnicate  # noqa: B018


def test_a_name_that_a_plan_or_a_job_lacks_is_an_attribute_error_that_says_what_it_is_called():
    plan = moec.compile(moe_text(ranks=1, ep=1))
    job = moec.launch(plan, device="cpu")
    for owner, name, help in (
        (plan, "graph", "`plan.program`"),
        (plan, "world_sise", "did you mean `plan.world_size`?"),
        (job, "local_rank", "LOCAL_RANK"),
        (job, "load_checkpoint", "`job.resume(folder, model, optimizer)`"),
        (job, "frobnicate", "it has accumulate, "),
    ):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"MOE0750.*there is no `(plan|job).{name}`") as caught:
            getattr(owner, name)
        assert isinstance(caught.value, moec.DiagnosticError)
        assert help in caught.value.diagnostics[0].help
    with pytest.raises(AttributeError, match="'Plan' object has no attribute '_frobnicate'"):
        plan._frobnicate  # noqa: B018
    assert copy.copy(plan) == plan


def test_an_attribute_error_inside_of_a_property_is_not_hidden(monkeypatch):
    plan = moec.compile(moe_text(ranks=1, ep=1))
    monkeypatch.setattr(type(plan), "data_size", property(lambda self: (1).size))
    with pytest.raises(AttributeError, match="'int' object has no attribute 'size'"):
        plan.data_size  # noqa: B018


def test_a_path_a_text_and_a_spec_compile_to_the_same_plan(tmp_path):
    file = tmp_path / "tiny.moe"
    file.write_text(moe_text())
    plans = [moec.compile(source) for source in (file, str(file), moe_text(), moe_spec())]
    assert all(plan == plans[0] for plan in plans)


def test_lets_are_keyword_arguments():
    text = "let n = 8\n" + moe_text().replace("experts = 8 *", "experts = n *")
    assert moec.compile(text).parameters["layers.1.moe.gate.weight"].shape[0] == 8
    assert moec.compile(text, n=16).parameters["layers.1.moe.gate.weight"].shape[0] == 16


def test_a_wrong_file_raises_all_its_diagnostics():
    with pytest.raises(moec.DiagnosticError) as caught:
        moec.compile(moe_text(dp=3, batch=6))
    assert {d.code for d in caught.value.diagnostics} == {"MOE0310", "MOE0313"}


def test_the_road_in_five_lines(tmp_path):
    plan = moec.compile(moe_text())
    plan.save(tmp_path / "tiny.plan")
    assert moec.verify(moec.load(tmp_path / "tiny.plan")).ok
    model = moec.reference(moe_text())
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert model(tokens).logits.shape == (1, 8, 32)
    assert model(tokens, tokens).loss.requires_grad
