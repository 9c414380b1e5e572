"""Scripts, configs and folders in the place of a plan or a `.moe` file: one diagnostic, with the command to use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Run
from support.tables import each_row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan, a script, configs and a checkpoint, as far as their kinds are known by."""
    (tmp_path / "train.py").write_text("import moec\n")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "hidden_size": 64}')
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name, file in (("first.plan", "plan.json"), ("100", "checkpoint.json"), ("hf", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    return tmp_path


GIVEN = {
    ("check", "config.json"): (
        "this is a config of Hugging Face, and `moec check` wants",
        "`moec import hf config.json -o model.moe`",
    ),
    ("check", "ds_config.json"): ("this is a config of DeepSpeed, and", "docs/from/deepspeed.md has the words"),
    ("check", "train.py"): ("this is a Python script, and", "`moec launch first.plan train.py --run` starts it"),
    ("compile", "config.json"): ("and `moec compile` wants a `.moe` file", "`moec import hf config.json"),
    ("fmt", "config.json"): ("and `moec fmt` wants a `.moe` file", "`moec import hf config.json"),
    ("inspect", "train.py"): ("and `moec inspect` wants a `.moe` file", "`moec launch first.plan train.py --run`"),
    ("inspect", "100"): ("`100` is a checkpoint, and `moec inspect` wants a plan", "`moec checkpoint inspect 100`"),
    ("inspect", "hf"): ("`hf` is a folder of Hugging Face, and", "`moec import hf hf`"),
    ("verify", "train.py"): ("`train.py` is a Python script, and `moec verify` wants", "`moec verify first.plan`"),
    ("load", "train.py"): ("`train.py` is a Python script, and `moec load` wants", "`moec load first.plan`"),
    ("tune", "config.json"): ("`config.json` is a config of Hugging Face, and", "`moec import hf config.json"),
    ("launch", "train.py"): ("and `moec launch` wants a plan", "`moec launch first.plan train.py`"),
    ("launch", "train.py", "none.plan"): ("and `moec launch` wants a plan", "`moec launch first.plan train.py`"),
    ("checkpoint", "inspect", "first.plan"): ("`first.plan` is a plan", "`moec inspect first.plan`"),
    ("checkpoint", "verify", "hf"): ("`hf` is a folder of Hugging Face", "`moec import hf hf`"),
}


@each_row("arguments", GIVEN)
def test_something_else_is_named_with_its_command(
    moec: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ran = moec(*arguments)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.count("error[") == 1
    for text in GIVEN[arguments]:
        assert text in ran.err


LAUNCHED = {
    ("train.py", "first.plan"): "did you mean `moec launch first.plan train.py`?",
    ("train.py", "first.plan", "a", "--run"): "did you mean `moec launch first.plan train.py a --run`?",
}


@each_row("arguments", LAUNCHED)
def test_a_plan_behind_the_script_is_put_before_it(moec: Run, folder: Path, arguments: tuple[str, ...]) -> None:
    ran = moec("launch", *arguments)
    assert (ran.status, ran.out) == (2, "")
    said = "error[MOE0017]: `train.py` is no plan, and the plan comes before the script; "
    assert ran.err == f"{said}{LAUNCHED[arguments]}\n"


def test_a_file_to_compile_first_keeps_its_script(moec: Run, starter: Path) -> None:
    ran = moec("launch", "model.moe", "a.py", "{x}", "--slurm", "--json")
    (found,) = json.loads(ran.err)
    then = "`moec launch model.plan a.py '{x}' --slurm`"
    assert found["help"] == f"compile it first: `moec compile model.moe`, then {then}"


@each_row("name", ["first.plan", "train.py", "100", "config.json"])
def test_a_name_without_a_command_gets_one(moec: Run, folder: Path, name: str) -> None:
    ran = moec(name)
    assert ran.status == 2
    words = {"first.plan": "verify", "train.py": "launch first.plan", "100": "checkpoint inspect"}
    assert f"`moec {words.get(name, 'import hf')} {name}" in ran.err


def test_other_json_is_the_language_s_to_judge(moec: Run, folder: Path) -> None:
    assert "MOE0109" in moec("check", "other.json").err


def test_a_name_of_a_file_cannot_move_the_cursor(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m.moe").write_text("model")
    for style in ("full", "concise", "github"):
        said = moec("check", "--format", style, "a\x1b[31m.moe").err
        assert "\x1b" not in said
        assert style == "github" or "a\\x1b[31m.moe:1:6" in said
    assert "`\\x1b[31m`" in moec("\x1b[31m").err


def test_a_missing_file_has_no_line(moec: Run) -> None:
    assert moec("check", "none.moe").err.startswith("error[MOE0001]: cannot read the file\n --> none.moe\n")
    assert moec("check", "--format", "concise", "none.moe").err.startswith("none.moe: error[MOE0001]")
    assert moec("check", "--format", "github", "none.moe").err.startswith("::error file=none.moe,title=MOE0001::")


def test_a_name_without_end_is_cut(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("gqa(", f"{'q' * 1_000_000}("))
    for style in ("full", "concise"):
        assert 0 < len(moec("check", "--format", style, "model.moe").err) < 5_000
    assert f"`{'q' * 60}…`" in moec("check", "--format", "concise", "model.moe").err
