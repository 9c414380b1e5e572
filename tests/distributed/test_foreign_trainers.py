"""`moec.layer` under DDP, `fully_shard`, accelerate and the Trainer of transformers: right, or refused with a code.

Each host makes its layers before and after the process group, clips in every way, and saves in every way.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks.foreign_cells import cells
from support.ranks.foreign_trainers import CLIPS, HOSTS, MAX_NORM, RATE, STEPS, TEXT, Regressor, as_under_torchrun
from support.ranks.gloo_pool import GlooPool
from torch import Tensor, nn

import moec

FP32 = 2e-5
"""Sums in another order; a step with another norm is off by 1e-2."""
REFUSED = {
    "torch.save": "MOE0746",
    "torch.save of the model": "MOE0746",
    "safetensors": "MOE0746",
    "Trainer.save_model": "MOE0746",
    "accelerator.save_model": "MOE0746",
    "accelerator.save_state": "MOE0746",
}
"""What each way to save gives on the rank that saves; all others give the whole model back."""
ON_EVERY_RANK = ("safetensors", "accelerator.save_model", "accelerator.save_state")
"""Ways that every rank goes; the others save on rank 0 alone."""


def unsharded(seen: list[list[tuple[Tensor, Tensor]]]) -> tuple[list[float], dict[str, Tensor]]:
    """The norms and the parameters of one process over the batches that all ranks have seen together."""
    model = Regressor(lambda number: moec.reference(TEXT, seed=number))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    norms = []
    for of_ranks in zip(*seen, strict=True):
        x, labels = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
        model(x, labels)["loss"].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def require_equal(whole: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert whole.keys() == expected.keys()
    errors = {name: float((whole[name] - each).abs().max() / each.abs().max()) for name, each in expected.items()}
    assert max(errors.values()) < FP32, errors


@pytest.mark.parametrize("host", HOSTS)
def test_a_layer_in_a_foreign_trainer_is_right_or_refused_with_a_code(
    gloo: GlooPool, tmp_path: Path, host: str
) -> None:
    ranks: list[dict[str, Any]] = gloo.run(2, cells, host, str(tmp_path), initialize=False)
    first = ranks[0]
    assert [each["early"] for each in ranks] == ["MOE0745", "MOE0745"]
    assert all(each["group"] for each in ranks)
    for name in CLIPS:
        clipped = [each["clip"][name] for each in ranks]
        norms, expected = unsharded([each["seen"] for each in clipped])
        assert len(norms) == STEPS
        assert min(norms) > 2 * MAX_NORM
        for each in clipped:
            assert each["norms"] == pytest.approx(norms, rel=1e-4), name
        assert clipped[0]["norms"] == clipped[1]["norms"]
        require_equal(clipped[0]["whole"], expected)
    trained = first["clip"][name]["whole"]
    for name in first["save"]:
        codes = [each["save"][name] for each in ranks]
        if name not in REFUSED:
            require_equal(codes[0], trained)
        else:
            assert codes == [REFUSED[name], REFUSED[name] if name in ON_EVERY_RANK else "none"], name


PAGE = (Path(__file__).parents[2] / "docs" / "layer.md").read_text(encoding="utf-8")


class MyModel(nn.Module):
    """What the page's scripts have: a mixture with a head, and its loss."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ffn, self.head = make(3), nn.Linear(64, 64)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.head(self.ffn(x)) - labels).square().mean() + self.ffn.aux_loss}


def as_on_the_page(folder: str) -> list[dict[str, Tensor]]:
    """What the page's scripts for the Trainer and for accelerate have as `whole` on this rank."""
    scripts = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "MyModel(lambda" in block]
    of_hosts = [script for script in scripts if "Trainer(" in script or "Accelerator()" in script]
    x, labels = torch.randn(2, 80, 5, 64).unbind(0)
    dataset = [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]
    names: dict[str, Any] = {"MyModel": MyModel, "dataset": dataset, "torch": torch}
    found = []
    with as_under_torchrun(), chdir(folder):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        for script in of_hosts:
            names["loader"] = torch.utils.data.DataLoader(dataset, batch_size=4)
            exec(script, names)  # noqa: S102 - our own page
            found.append(names["whole"])
    return found


def test_the_pages_scripts_for_trainer_and_accelerate_train_and_save_the_whole_model(
    gloo: GlooPool, tmp_path: Path
) -> None:
    file = tmp_path / "ffn.moe"
    file.write_text(re.findall(r"```moe\n(.*?)```", PAGE, re.DOTALL)[0])
    saved, others = gloo.run(2, as_on_the_page, str(tmp_path), initialize=False)
    assert [len(each) for each in others] == [0, 0]
    saved.append(load_file(tmp_path / "trained.safetensors"))
    new = MyModel(lambda number: moec.reference(file, seed=number))
    for whole in saved:
        trained = copy.deepcopy(new)
        trained.load_state_dict(whole)
        pairs = zip(new.parameters(), trained.parameters(), strict=True)
        assert not any(torch.equal(before, after) for before, after in pairs)
    assert all(torch.equal(saved[0][name], saved[2][name]) for name in saved[0])
