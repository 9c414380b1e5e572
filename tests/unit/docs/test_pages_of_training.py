"""docs/step.md, docs/metrics.md and docs/launch.md: their Python runs, and their commands print what they show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor

import moec
from moec import entry

FOLDER = Path(__file__).parents[3] / "docs"
ONLINE = "topk(2, normalize = true, bias = online(1e-3))"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (FOLDER / page).read_text(encoding="utf-8"), re.DOTALL)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets take for granted: a model with states, its job, and batches."""
    monkeypatch.chdir(tmp_path)
    (tokens, labels), batches = batch(0), [batch(step) for step in range(1, 11)]
    return {"moec": moec, "torch": torch, "tokens": tokens, "labels": labels, "batches": batches}


def run(snippet: str, names: dict[str, Any]) -> None:
    with moec.launch(moe_plan(ranks=1, ep=1, gate=ONLINE), device="cpu") as job:
        model = job.build()
        names |= {"job": job, "model": model, "optimizer": job.optimizer(model)}
        exec(snippet, names)  # noqa: S102 - our own page


def test_every_snippet_of_these_pages_is_run_below() -> None:
    assert len(blocks("step.md", "python")) == 2
    assert len(blocks("metrics.md", "python")) == 3
    assert len(blocks("launch.md", "console")) == 2
    assert not blocks("model.md", "python")


def test_settings_are_set_as_they_were_saved(names: dict[str, Any]) -> None:
    saving, _ = blocks("step.md", "python")
    run(f"model.set(seed=3, step=1000)\n{saving}", names)
    assert names["saved"] == names["model"].settings == {"seed": 3, "step": 1000}


def test_states_change_at_the_end_of_a_step_of_ones_own(names: dict[str, Any]) -> None:
    _, updating = blocks("step.md", "python")
    run(updating, names)
    biases = [buffer for name, buffer in names["model"].named_buffers() if name.endswith("gate.bias")]
    assert biases
    assert all(0 < float(bias.abs().max()) < 2e-3 for bias in biases)


def test_progress_shows_every_batch(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    showing, _, _ = blocks("metrics.md", "python")
    body = "loss = job.step(model, *batch); norm = job.clip_grad_norm_(model, 1.0); optimizer.step()"
    assert "    ...\n" in showing
    run(showing.replace("    ...\n", f"    {body}\n"), names | {"loader": names["batches"]})
    shown = capsys.readouterr().out
    assert re.search(r"100% +step +10 of 10 ", shown)
    assert "loss" in shown
    assert "grad_norm" in shown


def test_progress_of_a_run_that_goes_on_counts_to_its_end(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, resuming, _ = blocks("metrics.md", "python")
    body = "job.step(model, tokens, labels); optimizer.step(); job.checkpoint('checkpoints', model, optimizer, every=1)"
    resuming = resuming.replace("    ...\n", f"    {body}\n")
    run(resuming, names | {"steps": 3})
    assert "step 3 of 3" in re.sub(" +", " ", capsys.readouterr().out)
    run(resuming, names | {"steps": 4})
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "step 4 of 4" in shown
    assert "step 3 of 4" not in shown


def test_metrics_write_every_tenth_step(names: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    _, _, writing = blocks("metrics.md", "python")
    run(writing, names)
    (line,) = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert line["step"] == 10
    assert list((tmp_path / "runs" / "1").iterdir())


CLUSTERS = {
    "first.plan": 'level "process" { size = 4 }',
    "big.plan": 'level "node" { size = 8; bandwidth = 450GB/s }; level "rail" { size = 4; bandwidth = 50GB/s }',
}
"""The levels of the plans of launch.md."""


@pytest.mark.parametrize("block", blocks("launch.md", "console"))
def test_launch_prints_what_the_page_shows(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, shown = block.removeprefix("$ moec ").partition("\n")
    words = command.split()
    moec.compile(
        'model "m" { vocab = 32; dim = 8; depth = 1; layers { attention = mha(heads = 2); ffn = gelu(8) } }\n'
        f'cluster "c" {{ device = cpu; {CLUSTERS[words[1]]} }}\ntrain {{ batch = 32; sequence = 8 }}'
    ).save(tmp_path / words[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["moec", *words])
    with pytest.raises(SystemExit):
        entry.main()
    assert capsys.readouterr().out == shown
