"""Commands and `moec.load` warn where the file has changed since its plan was compiled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from running import Run
from support.plans import moe_text
from support.traces import trace_of, write_traced

from moec import compile, load

SAID = (
    "warning[MOE0605]: the file no longer says what its plan has\n"
    "  `model.moe` has changed since `model.plan` was compiled"
)


def newer(file: Path) -> None:
    later = file.stat().st_mtime + 60
    os.utime(file, (later, later))


@pytest.fixture
def compiled(moec: Run, starter: Path) -> Path:
    assert moec("compile", "model.moe").status == 0
    return starter


def test_a_changed_file_warns_and_the_plan_is_used(moec: Run, compiled: Path) -> None:
    compiled.write_text(compiled.read_text().replace("topk(2", "topk(1"))
    newer(compiled)
    ran = moec("launch", "model.plan", "train.py")
    assert (ran.status, ran.err.startswith(SAID)) == (0, True)
    assert "`moec compile model.moe` compiles it again" in ran.err
    assert ran.out.startswith("torchrun ")
    for command in (["load"], ["inspect"], ["inspect", "--params"], ["inspect", "--graph", "dot"]):
        assert moec(*command, "model.plan").err.startswith(SAID), command


def test_a_file_that_it_uses_counts_and_so_does_an_older_one_put_in_its_place(moec: Run, compiled: Path) -> None:
    text, used, older = compiled.read_text(), compiled.with_name("part.moe"), compiled.with_name("older")
    used.write_text('device "spare" { kind = cpu; memory = 4GB; bandwidth = 10GB/s }\n')
    compiled.write_text(f'use "./part"\n{text}')
    older.write_text(text.replace("topk(2", "topk(1"))
    os.utime(older, (1, 1))
    assert moec("compile", "model.moe").status == 0
    used.write_text(used.read_text() + "model {")
    newer(used)
    assert moec("load", "model.plan").err.startswith(SAID)
    older.rename(compiled)
    assert moec("load", "model.plan").err.startswith(SAID)


def test_another_trace_of_loads_counts(tmp_path: Path) -> None:
    file, plan = write_traced(tmp_path, moe_text()), tmp_path / "traced.plan"
    compile(file).save(plan)
    newer(tmp_path / "loads.npz")
    load(plan)
    write_traced(tmp_path, moe_text(), trace_of(seed=1))
    newer(tmp_path / "loads.npz")
    with pytest.warns(UserWarning, match=r"MOE0605: .*the trace of `.*traced\.moe` has changed since"):
        load(plan)
    (tmp_path / "loads.npz").unlink()
    load(plan)


def test_a_script_is_told_on_rank_0(moec: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled.parent / "model.plan"
    newer(compiled)
    load(plan)
    compiled.write_text(compiled.read_text().replace("topk(2", "topk(1"))
    newer(compiled)
    with pytest.warns(UserWarning, match=r"MOE0605: .*has changed since.*`moec compile .*compiles it again"):
        load(plan)
    monkeypatch.setenv("RANK", "1")
    load(plan)


def test_a_file_that_no_longer_parses_warns_too(moec: Run, compiled: Path) -> None:
    for content in (b"model {", b"model \xff"):
        compiled.write_bytes(content)
        newer(compiled)
        assert moec("launch", "model.plan", "train.py").err.startswith(SAID)


@pytest.mark.parametrize("change", ["", "# a comment\n"])
def test_a_file_that_says_the_same_does_not(moec: Run, compiled: Path, change: str) -> None:
    compiled.write_text(change + compiled.read_text())
    newer(compiled)
    assert moec("launch", "model.plan", "train.py").err == ""


def test_json_gets_the_warning_as_json(moec: Run, compiled: Path) -> None:
    compiled.write_text("model {")
    newer(compiled)
    ran = moec("launch", "model.plan", "train.py", "--json")
    assert [found["code"] for found in json.loads(ran.err)] == ["MOE0605"]
    assert json.loads(ran.out)


def test_a_plan_without_a_name_of_its_own_is_not_compared(
    moec: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(compiled.parent / "model.plan")
    assert (moec("launch", ".", "train.py").status, moec("launch", ".", "train.py").err) == (0, "")


def test_none_does_not(moec: Run, compiled: Path) -> None:
    compiled.unlink()
    assert moec("launch", "model.plan", "train.py").err == ""
