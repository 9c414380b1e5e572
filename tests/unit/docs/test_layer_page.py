"""docs/layer.md: its code runs, and its lines for hosts are the example's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import moec

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "layer.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_examples_run_with_the_file_above_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ffn.moe").write_text(blocks("moe")[0])
    names: dict[str, object] = {}
    for code in blocks("python")[:3]:  # training, biases, and a gradient penalty
        exec(code, names)  # noqa: S102 - our own page
    assert names["y"].shape == (2, 10, 64)
    assert all(parameter.grad is not None for parameter in names["ffn"].parameters())
    assert names["biased"].get_buffer("gate.bias").any()


@pytest.mark.filterwarnings("ignore")  # of Dynamo while it compiles
def test_a_compiled_model_with_a_layer_gives_the_outputs_and_gradients_of_the_model() -> None:
    layer = moec.layer(blocks("moe")[0], seed=3)
    model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64))
    x = torch.randn(2, 10, 64)
    found = []
    for called in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        y = called(x)
        (y.square().mean() + layer.aux_loss).backward()
        found.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)
    torch.compiler.reset()  # else the code compiled above is taken
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_what_hosts_are_told_is_what_the_example_tells_them() -> None:
    example = (ROOT / "examples" / "drop_in.py").read_text(encoding="utf-8")
    assert "_set_params_and_buffers_to_ignore_for_model(model, " in example
    for line in ("fully_shard(block, ignored_params=", "fully_shard(model, ignored_params="):
        assert line in PAGE
        assert line in example
