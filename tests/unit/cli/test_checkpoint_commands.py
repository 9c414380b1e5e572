"""`moec checkpoint inspect|verify|convert`: what they print, and a model through one file and back."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_drafts import WEIGHT, Draft
from support.plans import moe_plan

import moec
from moec import entry
from moec.commands.checkpoints import checkpoint_list
from moec.runtime.checkpoint import convert, folders
from moec.runtime.checkpoint.format import index, reading
from moec.runtime.checkpoint.format.index import Head

Outcome = tuple[int, str, str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["moec", "checkpoint", *arguments])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command


def test_inspect_shows_tensors_and_who_saved(run: Callable[..., Outcome]) -> None:
    Draft(Path("100")).write()
    code, out, _ = run("inspect", "100")
    assert code == 0
    assert (
        out
        == """\
100: toy, step 1, saved by moec 0.1.0

  saved on   2 ranks; dense: tp 2
  optimizer  none
  extras     none
  total      2 tensors, 3 pieces, 344 B in 2 shards

  tensor        dtype  shape  pieces  bytes
  model/count   I64    3           1     24
  model/weight  F32    4 × 6       2     96
"""
    )
    as_json = json.loads(run("inspect", "100", "--json")[1])
    assert as_json["tensors"]["model/weight"] == {"dtype": "F32", "shape": [4, 6], "pieces": 2, "bytes": 96}
    assert (as_json["step"], as_json["world_size"], as_json["degrees"]) == (1, 2, {"dense": {"tp": 2}})


def test_inspect_lists_the_checkpoints_of_a_folder(run: Callable[..., Outcome]) -> None:
    for step in (5, 20, 100):
        draft = Draft(Path(str(step)))
        draft.head["step"] = step
        os.utime(draft.write() / "checkpoint.json", (0, 86400.0 * 365))
    shard = Path("100", "rank-00001.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    Path("20", "index.json").unlink()
    size = sum(path.stat().st_size for path in Path("5").iterdir())
    code, out, _ = run("inspect", ".")
    head, _, titles, *rows = out.splitlines()
    assert (code, head, titles.split()) == (0, ".: 3 checkpoints", ["checkpoint", "model", "step", "saved", "size"])
    assert [row.split()[:3] for row in rows] == [["100", "toy", "100"], ["20", "toy", "20"], ["5", "toy", "5"]]
    assert rows[0].endswith(f"MOE0801: {shard}: it has 215 bytes, but 216 were written")
    assert rows[1].endswith("MOE0801: 20/index.json: it is missing")
    assert rows[2].endswith("complete, latest")
    assert "1971-01-01 " in rows[2]
    found = json.loads(run("inspect", ".", "--json")[1])["checkpoints"]
    assert [(each["name"], each["step"], each["latest"]) for each in found] == [
        ("100", 100, False), ("20", 20, False), ("5", 5, True),
    ]  # fmt: skip
    assert found[2]["bytes"] == size
    assert found[2]["fault"] is None
    Path("empty").mkdir()
    code, _, err = run("inspect", "empty")
    assert code == 1
    assert "MOE0800" in err


def test_a_list_of_checkpoints_reads_each_head_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        Draft(tmp_path / str(step)).write()
    read, reads = folders.read_head, list[str]()

    def note(path: Path) -> Head:
        reads.append(path.name)
        return read(path)

    monkeypatch.setattr(folders, "read_head", note)
    assert [each.latest for each in checkpoint_list.checkpoints_of(tmp_path)] == [True, False]
    assert sorted(reads) == ["1", "2"]


def test_verify_names_every_damaged_tensor(run: Callable[..., Outcome]) -> None:
    shards = [Draft(Path("100")).write() / f"rank-0000{rank}.safetensors" for rank in range(1, 2)]
    code, out, _ = run("verify", "100")
    assert (code, out) == (0, "100: 2 tensors, 344 B, every digest matches\n")
    content = bytearray(shards[0].read_bytes())
    for place in (-1, -49):  # of `weight` and of `count`
        content[place] ^= 1
    shards[0].write_bytes(content)
    code, out, _ = run("verify", "100")
    assert code == 1
    assert [line.split(": ")[1] for line in out.splitlines()] == ["model/count", "model/weight", "damaged"]
    code, out, _ = run("verify", "100", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert len(json.loads(out)["damages"]) == 2


def test_convert_joins_the_pieces_of_a_tensor(run: Callable[..., Outcome]) -> None:
    Draft(Path("100")).write()
    assert run("convert", "100", "-o", "whole.safetensors")[0] == 0
    assert (load_file("whole.safetensors")["weight"].numpy() == WEIGHT).all()
    assert sorted(path.name for path in Path().iterdir()) == ["100", "whole.safetensors"]
    code, _, err = run("convert", "100", "-o", "whole.safetensors")
    assert code == 1
    assert "MOE0803" in err


def test_a_model_goes_to_one_file_and_back_bit_for_bit(run: Callable[..., Outcome]) -> None:
    plan = moe_plan(ranks=1, ep=1, gate="topk(2, score = sigmoid, bias = online(0.1))")
    plan.save(Path("tiny.plan"))
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        job.save("1", model, job.optimizer(model), epoch=3)
    state = dict(model.state_dict())
    code, out, _ = run("convert", "1", "-o", "m.safetensors")
    assert code == 0
    assert "\nleft out: step 0, seed 1, random states, optimizer (torch.optim.AdamW), extras (epoch)\n" in out
    loaded = load_file("m.safetensors")
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    save_file(changed, "changed.safetensors")
    assert run("convert", "changed.safetensors", "-o", "2", "--plan", "tiny.plan")[0] == 0
    assert run("verify", "2")[0] == 0
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=2)
        model.set(step=5)
        job.load("2", model)
        assert model.settings == {"seed": 2, "step": 0}
        with pytest.raises(moec.DiagnosticError, match=r"MOE0806.*the checkpoint has no optimizer"):
            job.load("2", model, job.optimizer(model))
    assert all(torch.equal(tensor, changed[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm.weight"), r"norm.weight is missing in the file, F32 \[16\] in the plan"),
        (lambda state: state.update(more=torch.zeros(1)), r"more is F32 \[1\] in the file, missing in the plan"),
        (lambda state: state.update({"norm.weight": torch.zeros(16).double()}), r"norm.weight is F64 \[16\]"),
        (lambda state: state.update({"norm.weight": torch.zeros(17).half()}), r"norm.weight is F16 \[17\]"),
    ],
)
def test_a_file_of_another_model_is_refused(
    run: Callable[..., Outcome], change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    plan = moe_plan(ranks=1, ep=1)
    plan.save(Path("tiny.plan"))
    state = {name: torch.zeros(data.shape) for name, data in plan.parameters.items()}
    change(state)
    save_file(state, "m.safetensors")
    code, _, err = run("convert", "m.safetensors", "-o", "1", "--plan", "tiny.plan")
    assert code == 1
    assert "MOE0805" in err
    assert re.search(message, err)
    assert not Path("1").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_become_fp32_exactly(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(convert, "BLOCK_BYTES", 512)  # several blocks per tensor
    monkeypatch.setattr(index, "BLOCK_BYTES", 512)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 512)
    plan = moe_plan(ranks=1, ep=1)
    plan.save(Path("tiny.plan"))
    state = {name: torch.randn(data.shape).to(dtype) for name, data in plan.parameters.items()}
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 6e-8, -1e-7, 65504.0, 1 / 3], dtype=dtype)
    state["norm.weight"] = odd.repeat(2)
    state["head.weight"] = state["head.weight"].float()
    save_file(state, "m.safetensors")
    assert run("convert", "m.safetensors", "-o", "1", "--plan", "tiny.plan")[0] == 0
    assert run("verify", "1")[0] == 0
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        job.load("1", model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), state[name].float().view(torch.int32))


@pytest.mark.parametrize("kind", ["pickle", "text"])
def test_a_file_of_another_format_is_not_called_damaged(run: Callable[..., Outcome], kind: str) -> None:
    moe_plan(ranks=1, ep=1).save(Path("tiny.plan"))
    if kind == "pickle":
        torch.save({"a": torch.ones(2)}, "m")
    else:
        Path("m").write_text("{")
    code, _, err = run("convert", "m", "-o", "1", "--plan", "tiny.plan")
    assert code == 1
    assert "MOE0800" in err
    assert "m is not a safetensors file" in err
    assert "safetensors.torch.save_file" in err


def test_a_file_that_is_cut_off_is_damaged(run: Callable[..., Outcome]) -> None:
    moe_plan(ranks=1, ep=1).save(Path("tiny.plan"))
    save_file({"a": torch.ones(2)}, "m")
    Path("m").write_bytes(Path("m").read_bytes()[:-1])
    code, _, err = run("convert", "m", "-o", "1", "--plan", "tiny.plan")
    assert code == 1
    assert "MOE0801" in err
    assert "write or copy this file again" in err


def test_verify_says_what_is_no_checkpoint(run: Callable[..., Outcome]) -> None:
    save_file({"a": torch.ones(2)}, "m.safetensors")
    Path("dcp").mkdir()
    Path("dcp", ".metadata").write_bytes(b"")
    for path, words in (("m.safetensors", "is a file, and a checkpoint is a folder"), ("dcp", "torch.distributed.ch")):
        code, _, err = run("verify", path)
        assert code == 1
        assert f"{path} is a" in err
        assert words in err
        assert "moec.latest" not in err


def test_a_file_that_makes_an_index_beyond_the_limit_is_refused(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = moe_plan(ranks=1, ep=1)
    plan.save(Path("tiny.plan"))
    save_file({name: torch.zeros(data.shape) for name, data in plan.parameters.items()}, "m.safetensors")
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 1000)
    code, _, err = run("convert", "m.safetensors", "-o", "1", "--plan", "tiny.plan")
    assert code == 1
    assert "MOE0804" in err
    assert "limit is 1000" in err
    assert not list(Path().glob("*1*"))


def test_usage_errors(run: Callable[..., Outcome]) -> None:
    Draft(Path("100")).write()
    assert run("convert", "100", "-o", "x", "--plan", "y")[0] == 2
    Path("m.safetensors").write_text("")
    assert run("convert", "m.safetensors", "-o", "x")[0] == 2
    assert run("inspect", "nowhere")[0] == 1
    code, _, err = run("convert", "nowhere", "-o", "x")
    assert code == 1
    assert "MOE0800" in err
