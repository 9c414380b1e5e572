"""`moec check` and `--fix`: both entry points print the same, and fixes fix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import Run
from support.tables import each_row

SLIPS = {
    "let experts": "lett experts",
    "attention = gqa(heads": "atention = gqaa(heds",
    "normalize = true": 'normalize = "true"',
    "topk(2": "tokp(2",
    "experts * swiglu": "expers * swigl",
    "batch     =": "batch     :",
    "device = cpu": "device = cpuu",
    "ep = 4 ": "ep = 4) ",
}


def test_a_good_file_says_nothing(moec: Run, starter: Path) -> None:
    ran = moec("check", "model.moe")
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_a_terminal_gets_a_verdict_for_each_file(starter: Path) -> None:
    """Pipes get none: `test_a_good_file_says_nothing`."""
    text = starter.read_text()
    starter.with_name("bad.moe").write_text(text.replace("topk", "tokp"))
    terminal, side = os.openpty()
    command = [sys.executable, "-m", "moec", "check", "model.moe", "bad.moe"]
    environment = os.environ | {"NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(command, cwd=starter.parent, env=environment, stdout=subprocess.PIPE, stderr=side)
    os.close(side)
    lines = os.read(terminal, 1 << 16).decode().splitlines()
    os.close(terminal)
    assert (ran.returncode, ran.stdout) == (1, b"")
    assert lines[-2] == "✓ model.moe"
    assert re.fullmatch(r"✗ \d+ errors? in bad\.moe", lines[-1]), lines


def test_the_plain_form_and_the_parsed_one_say_the_same(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("topk", "tokp"))
    plain, parsed = moec("check", "model.moe"), moec("check", "--format", "full", "model.moe")
    assert plain == parsed
    assert plain.status == 1
    assert "did you mean `topk`" in plain.err


def test_check_imports_nothing_heavy(starter: Path) -> None:
    """`dataclasses` imports `inspect`, and compiles each class's methods at every start."""
    code = (
        "import sys; sys.argv = ['moec', 'check', 'model.moe']\n"
        "from moec.entry import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert not exit.code\n"
        "heavy = {'torch', 'pydantic', 'click', 'rich', 'lark', 'numpy', 'dataclasses', 'inspect', 'json'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=starter.parent, check=True)


def test_fix_mends_what_has_one_remedy(moec: Run, starter: Path) -> None:
    good = starter.read_text()
    bad = good
    for right, wrong in SLIPS.items():
        assert right in bad
        bad = bad.replace(right, wrong, 1)
    starter.write_text(bad)
    ran = moec("check", "--fix", "model.moe")
    assert (ran.status, starter.read_text()) == (0, good)
    lines = ran.err.splitlines()
    assert re.fullmatch(r"fixed model\.moe:\d+: `lett` → `let`", lines[0])
    assert len(lines) == 11  # in some slips two names were misspelt


def test_fix_says_that_there_is_none(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("depth   = 4 ", "depth   = 0 "))
    assert "model.moe: nothing has a fix that is sure" in moec("check", "--fix", "model.moe").err


def test_fix_keeps_comments_of_other_languages_inside_of_what_it_cannot_mend(moec: Run, starter: Path) -> None:
    text = starter.read_text()
    (gate,) = re.findall(r"topk\([^)]*\)", text)
    starter.write_text(text.replace(gate, "{\n  type: topk,\n  k: 2,  // two\n  normalize: true }"))
    moec("check", "--fix", "model.moe")
    assert "k: 2,  # two" in starter.read_text()


def test_fix_leaves_what_it_cannot_mend(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("depth   = 4 ", "depth   = 0 ").replace("topk", "tokp"))
    ran = moec("check", "--fix", "model.moe")
    assert ran.status == 1
    assert "MOE0207" in ran.err
    assert "topk(2" in starter.read_text()


def test_fix_never_edits_the_library(moec: Run, tmp_path: Path) -> None:
    (tmp_path / "a.moe").write_text('use "clusters/dgx_h10"\nuse "clusters/dxg_h100"\n')
    moec("check", "--fix", "a.moe")
    assert (tmp_path / "a.moe").read_text() == 'use "clusters/dgx_h10"\nuse "clusters/dgx_h100"\n'


def test_fix_takes_away_marks_tabs_and_carriage_returns(moec: Run, starter: Path) -> None:
    text = starter.read_text()
    starter.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").replace("  vocab", "\tvocab").encode())
    assert moec("check", "--fix", "model.moe").status == 0
    assert starter.read_bytes() == text.encode()


def test_the_json_style_carries_the_fix(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("topk", "tokp"))
    found = json.loads(moec("check", "--format=json", "model.moe").out)
    assert found[0]["fix"][0]["text"] == "topk"


TERMINALS = [
    (True, {}, True),
    (True, {"NO_COLOR": "1"}, False),
    (True, {"NO_COLOR": ""}, True),
    (True, {"TERM": "dumb"}, False),
    (False, {}, False),
    (False, {"FORCE_COLOR": "1"}, True),
    (False, {"FORCE_COLOR": "0"}, False),
    (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
]


@each_row(("terminal", "settings", "colored"), TERMINALS)
def test_colours_are_for_terminals_that_want_them(
    moec: Run, starter: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, settings: dict[str, str], colored: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | settings).items():
        monkeypatch.setenv(name, value)
    starter.write_text("model")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: terminal, raising=False)
    assert ("\x1b[" in moec("check", "model.moe").err) is colored
