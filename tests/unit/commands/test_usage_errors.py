"""Wrong usage: one line on stderr that names what is meant, and exit code 2. And `check -`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import Run
from support.tables import each_row

WRONG = {
    ("complie", "a.moe"): "`moec` has no command `complie`; did you mean `moec compile`?",
    ("first.moe",): "`moec` has no command `first.moe`; `moec check first.moe` checks the file, ",
    ("checkpoint", "verifi"): "`moec checkpoint` has no command `verifi`; did you mean `moec checkpoint verify`?",
    ("compile", "a.moe", "--lets", "a=1"): "`moec compile` has no option --lets; did you mean --let?",
    ("train", "first.plan"): "`moec` has no command `train`; your script trains, and "
    "`moec launch first.plan train.py --run` starts it on this machine",
    ("run", "pretrain.py"): "`moec` has no command `run`; your script trains, and "
    "`moec launch PLAN pretrain.py --run` starts it on this machine",
    ("run", "a.moe", "b.py"): "`moec` has no command `run`; `moec compile a.moe` makes the plan, and "
    "`moec launch a.plan b.py --run` starts your script with it",
    ("build", "a.moe"): "`moec` has no command `build`; did you mean `moec compile a.moe`?",
    ("help", "compile"): "`moec` has no command `help`; did you mean `moec compile --help`?",
    ("compile", "a.moe", "b.moe"): "`moec compile` takes FILE, and `b.moe` is too much; "
    "run it for each: `moec compile a.moe`, `moec compile b.moe`",
    ("compile", "a.moe", "a.plan"): "`moec compile` takes FILE, and `a.plan` is too much; "
    "the output is an option: `moec compile a.moe -o a.plan`",
    ("doctor", "a"): "`moec doctor` takes no argument, and `a` is too much; `moec doctor --help` shows its usage",
    ("init", "qwen3-30b"): "`qwen3-30b` is like a model of the library, and this would write the starter file; "
    "`moec init --from qwen3_30b_a3b` writes qwen3_30b_a3b.moe, `moec init qwen3-30b.moe` the starter file",
    ("compile",): "`moec compile` needs FILE; `moec compile --help` shows its usage",
    ("compile", "a.moe", "--let", "x"): "--let: expected NAME=VALUE, found 'x'; `moec compile --help` shows its usage",
    ("compile", "a.moe", "--stop-after", "fuse"): "--stop-after needs --emit=ir or --emit=placed: ",
    ("weights", "export", "a"): "`moec weights export` needs DIR",
    ("check", "a.moe", "--stdin-name", "b.moe"): "--stdin-name needs the file `-`",
    ("check", "-", "--fix"): "--fix writes files, and `-` is stdin",
}


@each_row("arguments", WRONG)
def test_wrong_usage_is_one_line(moec: Run, arguments: tuple[str, ...]) -> None:
    ran = moec(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"error[MOE0017]: {WRONG[arguments]}")
    assert ran.err.count("\n") == 1


def test_wrong_usage_is_folded_where_the_width_is_known(moec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = moec("run", "train.py").err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_wrong_usage_as_json(moec: Run) -> None:
    ran = moec("complie", "--json")
    assert (ran.status, ran.out) == (2, "")
    (found,) = json.loads(ran.err)
    assert (found["code"], found["help"]) == ("MOE0017", "did you mean `moec compile`?")


@each_row("format", ["concise", "github"])
def test_wrong_usage_in_the_formats_of_logs(moec: Run, format: str) -> None:
    ran = moec("compile", "--format", format)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith({"concise": "error[MOE0017]: ", "github": "::error title=MOE0017"}[format])


def test_options_after_two_dashes_are_the_scripts(moec: Run) -> None:
    ran = moec("launch", "nope.plan", "train.py", "--", "--json")
    assert ran.status == 1
    assert ran.err.startswith("error[MOE0600]")
    ran = moec("launch", "nope.plan", "train.py", "--json")  # an option of moec, wherever it is
    assert json.loads(ran.err)[0]["code"] == "MOE0600"


def test_a_rank_that_the_plan_does_not_have_is_wrong_usage(moec: Run, starter: Path) -> None:
    assert moec("compile", "model.moe").status == 0
    ran = moec("inspect", "model.plan", "--rank", "9")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == "error[MOE0017]: --rank must be 0 to 3, not 9; the plan is for 4 ranks\n"


@each_row("group", [(), ("checkpoint",), ("weights",), ("import",)])
def test_a_group_alone_prints_its_help(moec: Run, group: tuple[str, ...]) -> None:
    ran = moec(*group)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == moec(*group, "--help").out


def test_the_module_calls_itself_moec() -> None:
    ran = subprocess.run([sys.executable, "-m", "moec", "checkpoint", "-h"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("Usage: moec checkpoint [OPTIONS] COMMAND [ARGS]...")


def test_check_reads_stdin(moec: Run, starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stdin(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    stdin(starter.read_text())
    assert moec("check", "-").status == 0
    stdin("model")
    ran = moec("check", "-")
    assert ran.status == 1
    assert "--> <stdin>:1" in ran.err
    stdin("model")
    (found, *_) = json.loads(moec("check", "-", "--json", "--stdin-name", "sub/mine.moe").out)
    assert found["span"]["file"] == "sub/mine.moe"


def test_stdin_uses_the_files_beside_the_named_one(
    moec: Run, starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    starter.rename(folder / "base.moe")
    for name, status in (("sub/mine.moe", 0), ("mine.moe", 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'use "base.moe"\n')))
        assert moec("check", "-", "--stdin-name", name).status == status
