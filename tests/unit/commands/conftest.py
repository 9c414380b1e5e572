"""Commands as a user runs them, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from running import Ran, Run

from moec.commands.init import STARTER
from moec.entry import main


@pytest.fixture
def moec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `moec` with some arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["moec", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return Ran(int(exit.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    """A valid, formatted file."""
    path = tmp_path / "model.moe"
    path.write_text(STARTER, encoding="utf-8")
    return path
