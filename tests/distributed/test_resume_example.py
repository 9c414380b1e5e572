"""examples/resume.py under torchrun: a rank is killed, and the losses are those of a run without a kill."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.plans import moe_plan
from support.preloaded import environment, python
from support.ranks.gloo_pool import GlooPool
from test_examples import EXAMPLES, run

import moec

PAGE = EXAMPLES / "resume.md"


def losses_in(text: str) -> dict[int, str]:
    """The losses by step. A step that was computed again must have the same."""
    found: dict[int, str] = {}
    for step, loss in re.findall(r"step (\d+): loss (\S+)", text):
        assert found.setdefault(int(step), loss) == loss, f"step {step} has another loss the second time"
    return found


def test_a_killed_run_restarts_by_itself_and_has_the_losses_of_one_that_was_not(gloo: GlooPool, tmp_path: Path) -> None:
    arguments = ["--steps", "12", "--every", "4"]
    whole, _ = gloo.run(2, run, "resume", *arguments, "--folder", str(tmp_path / "whole"), initialize=False)
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += [str(EXAMPLES / "resume.py"), *arguments, "--folder", str(tmp_path / "killed"), "--kill-at", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"attempt (\d) on 2 ranks begins at step (\d+)", done.stdout)
    assert first == ("0", "0")
    assert second in {("1", "8"), ("1", "4")}, "step 8 may not be durable yet where the disk is slow"
    expected = losses_in("\n".join(whole))
    found = losses_in(done.stdout)
    assert {step: found[step] for step in expected} == expected
    assert sorted(os.listdir(tmp_path / "killed")) == ["12", "8"]


def test_the_page_shows_the_same_losses_before_and_after_the_kill() -> None:
    text = PAGE.read_text(encoding="utf-8")
    killed, whole = (losses_in(block) for block in re.findall(r"```text\n(.*?)```", text, re.S)[:2])
    assert {step: killed[step] for step in whole} == whole


@pytest.mark.parametrize(("ranks", "wanted"), [(2, 2), (4, 4), (8, 8)])
def test_the_first_plan_for_as_many_ranks_is_taken_and_files_are_compiled(
    tmp_path: Path, ranks: int, wanted: int
) -> None:
    two = moe_plan(ranks=2, ep=2)
    moe_plan(ranks=4, ep=4).save(tmp_path / "four.plan")
    found = moec.load_for(ranks, two, tmp_path / "four.plan", moe_plan(ranks=8, ep=1).spec)
    assert found.world_size == wanted
    assert (found is two) == (ranks == 2)
    with pytest.raises(moec.DiagnosticError, match=r"MOE0810.*no plan is for 3 ranks \(tiny is for 2; .*four.plan is "):
        moec.load_for(3, two, tmp_path / "four.plan")
    with pytest.raises(moec.DiagnosticError, match=r"MOE0810.*none was given"):
        moec.load_for(3)


def test_a_script_without_a_plan_for_its_ranks_ends_with_a_diagnostic_and_no_traceback() -> None:
    command = [python(), "-c", "import moec; moec.load_for(3)"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error[MOE0810]: no plan fits this number of ranks\n  no plan is for 3 ranks")
    assert "\nhelp: compile one for a cluster of 3" in done.stderr
    assert "Traceback" not in done.stderr
