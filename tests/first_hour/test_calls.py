"""Mistakes in calls of moec, as a script makes them, with the message that is printed and what a person has to do.

Each page has the script and what stands on stderr. The scripts run in this process; distributed/test_uncaught.py
starts processes, under torchrun too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moec
from moec.grammar import render
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.uncaught import in_script

PAGES = sorted((Path(__file__).parent / "calls").glob("*.md"))

FIRST = """let ranks = 1
let experts = 8
model "first" {
  vocab = 256
  dim   = 64
  depth = 2
  dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = experts * swiglu(128); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = ranks } }
train { batch = 8; sequence = 64; optimizer = adamw(lr = 3e-3) }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, its plans for 1 and 4 ranks, and a file without `let`s."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "first.moe").write_text(FIRST)
    without = re.sub(r"^let .*\n", "", FIRST, flags=re.M).replace("experts *", "8 *").replace("= ranks", "= 1")
    (folder / "nolets.moe").write_text(without)
    moec.compile(folder / "first.moe").save(folder / "first.plan")
    moec.compile(folder / "first.moe", ranks=4).save(folder / "four.plan")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_mistake_in_a_call_is_one_message_at_its_line_with_a_way_out(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    text = page.read_text()
    script, expected = re.findall(r"```\w+\n(.*?)```", text, re.S)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shown = said(script, folder / f"{page.stem}.py")
    if update_golden:
        page.write_text(text.replace(f"```text\n{expected}```", f"```text\n{shown}```"))
    else:
        assert shown == expected
    assert re.search(r"^help: |did you mean", shown, re.M), "a way out"
    assert "Way out: " in text


def test_the_text_of_an_error_that_a_script_catches_has_name_and_way_out(folder: Path) -> None:
    with pytest.raises(DiagnosticError) as raised:
        moec.compile(folder / "first.moe", ep=4)
    first, second = str(raised.value).splitlines()
    assert first.endswith("error[MOE0213]: no such `let`: no file that was read declares `ep`")
    assert second.startswith("help: write `ep` in the file, in `parallel { … }`: only its `let`s can be given here")


def said(script: str, path: Path) -> str:
    """What a script ends with; it must raise."""
    path.write_text(script)
    try:
        exec(compile(script, path.name, "exec"), {"__name__": "__main__"})  # noqa: S102
    except DiagnosticError as error:
        return render(in_script(error, error.__traceback__), "full")
    except AttributeError as error:
        return f"AttributeError: {error}\n"
    raise AssertionError("the script raises nothing")
