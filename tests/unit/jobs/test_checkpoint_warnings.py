"""What a script is told of a checkpoint that loads, but not as the script may think."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan

import moec
from moec.runtime.checkpoint.format.index import ModelFields
from moec.runtime.checkpoint.model_fields import differences, fields_of

TEXT = """
model "m" {
  vocab = 32; dim = 16; depth = 4; dtype = fp32
  layers { attention = mha(heads = 2, rope = rope()); ffn = gelu(16) }
  layers 1..3 step 2 { moe { experts = 4 * gelu(16); gate = topk(2) } }
}
cluster "c" { device = cpu; level "process" { size = 1 } }
train { batch = 8; sequence = 8 }
"""


def said_by(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    assert all(warning.filename == __file__ for warning in caught)
    return result, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("topk(2)", "topk(1)", ["moe.gate of layers [1, 3] is topk(2) in the checkpoint, topk(1) here"]),
        (
            "topk(2)",
            "topk(2, normalize = true)",
            ["moe.gate of layers [1, 3] is topk(2) in the checkpoint, topk(2, normalize = true) here"],
        ),
        ("gelu(16) }", "relu(16) }", ["ffn of layers [0, 2] is gelu(16) in the checkpoint, relu(16) here"]),
        (
            "rope()",
            "rope(theta = 500)",
            [
                "attention is mha(heads = 2, rope = rope) in the checkpoint, "
                "mha(heads = 2, rope = rope(theta = 500)) here"
            ],
        ),
        (
            "depth = 4",
            "depth = 4; norm = rms(eps = 0.001)",
            ["norm is not given (rms) in the checkpoint, rms(eps = 1e-3) here"],
        ),
        (
            "gate = topk(2)",
            "gate = topk(2); capacity = factor(1.5)",
            ["moe.capacity of layers [1, 3] is not given (dropless) in the checkpoint, factor(1.5) here"],
        ),
        ("batch = 8; sequence = 8", "batch = 16; sequence = 8; optimizer = sgd(lr = 1)", []),
        ("size = 1", "size = 4", []),
        ("layers 1..3 step 2 {", "layers [1, 3] {", []),
        ('"m"', '"another"', []),
    ],
)
def test_models_of_equal_shapes_differ_in_what_they_compute_and_in_nothing_else(
    old: str, new: str, said: list[str]
) -> None:
    saved, here = (moec.driver.to_spec(text) for text in (TEXT, TEXT.replace(old, new)))
    assert TEXT.replace(old, new) != TEXT
    assert differences(ModelFields(**fields_of(saved)), here) == said


def test_other_mathematics_of_equal_shapes_is_warned_of(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1, gate="topk(2)"), device="cpu") as job:
        job.save(tmp_path / "1", job.build())
    with moec.launch(moe_plan(ranks=1, ep=1, gate="topk(1)"), device="cpu") as job:
        model = job.build()
        _, (said,) = said_by(lambda: job.load(tmp_path / "1", model))
        assert "same shapes, but computes something else: moe.gate" in said
        assert "is topk(2) in the checkpoint, topk(1) here" in said
        assert said_by(lambda: job.resume(tmp_path, model))[1] == [said]
        job.save(tmp_path / "2", model).wait()
        assert said_by(lambda: job.load(tmp_path / "2", model))[1] == []


def test_extras_and_an_optimizer_that_are_not_asked_for_are_named(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        progress = {"epoch": 1}
        job.save(tmp_path / "1", model, optimizer, scheduler=scheduler, progress=progress).wait()

        def load(**extras: Any) -> Any:
            return said_by(lambda: job.load(tmp_path / "1", model, optimizer, **extras))

        def resume(*optimizers: Any, **extras: Any) -> list[str]:
            return said_by(lambda: job.resume(tmp_path, model, *optimizers, **extras))[1]

        values, (said,) = load()
        assert values == {"progress": progress}
        assert "1: not loaded: scheduler; give job.load an object for each" in said
        assert load(scheduler=scheduler)[1] == []
        (said,) = resume(optimizer)
        assert "not loaded: progress, scheduler; give job.resume" in said
        assert resume(optimizer, scheduler=scheduler, progress={}) == []
        (said,) = resume(scheduler=scheduler, progress={})
        assert "its optimizer, a torch.optim.AdamW, was not loaded" in said


def test_a_scheduler_beside_groups_in_another_order_is_warned_of(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        first, *others = model.parameters()

        def optimizer_of(*groups: list[torch.nn.Parameter]) -> tuple[Any, Any]:
            made = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
            return made, torch.optim.lr_scheduler.StepLR(made, 10)

        saved, scheduler = optimizer_of([first], others, [])
        job.save(tmp_path / "1", model, saved, scheduler=scheduler, progress={"epoch": 1}).wait()

        def said(*groups: list[torch.nn.Parameter], beside: bool = True) -> list[str]:
            here, scheduler = optimizer_of(*groups)
            extras = {"scheduler": scheduler} if beside else {}
            return said_by(lambda: job.load(tmp_path / "1", model, here, progress={}, **extras))[1]

        assert said([first], others[::-1], []) == []
        (words,) = said(others, [first], [])
        name = next(name for name, parameter in model.named_parameters() if parameter is others[0])
        assert f"whose group 1 is group 0 here, that of {name}; group 0 is group 1 here. " in words
        assert "a scheduler counts groups by number (scheduler): make the groups in the checkpoint's order" in words
        (words,) = said(others, [first], [], beside=False)
        assert "not loaded: scheduler" in words


def test_the_model_alone_loads_without_a_word_and_with_its_settings(tmp_path: Path) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        model.set(step=7)
        job.steps, job.total_tokens = 9, 1000
        job.save(tmp_path / "1", model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10)).wait()
        drawn = torch.rand(4)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        other = job.build(seed=2)
        _, said = said_by(lambda: job.load(tmp_path / "1", other))
        assert said == []
        assert other.settings == {"seed": 1, "step": 7}
        assert (job.steps, job.total_tokens) == (9, 1000)
        assert torch.equal(torch.rand(4), drawn)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
