"""The line that says how far a command is: drawn in a terminal, gone at the end, and never in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoint_drafts import Draft
from support.tables import each_row

from moec.commands.console.progress import progress

CLEARED = "\x1b[2K"
CONTROL = r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]"


def drawn(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it wrote to its stderr, a terminal."""
    terminal, side = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "moec", *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=side, check=False)
    os.close(side)
    data = bytearray()
    try:
        while part := os.read(terminal, 1 << 16):
            data += part
    except OSError:  # the end: nobody has the other side open
        pass
    os.close(terminal)
    return ran.returncode, data.decode()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    Draft(tmp_path / "100").write()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("checkpoint", "verify", "100"), "reading the checkpoint"),
        (("checkpoint", "convert", "100", "-o", "one.safetensors"), "converting"),
    ],
    ids=["verify", "convert"],
)
def test_a_terminal_sees_a_line_that_is_gone_at_the_end(
    checkpoint: Path, arguments: tuple[str, ...], what: str
) -> None:
    status, text = drawn(checkpoint, *arguments)
    assert status == 0
    assert what in text
    assert re.sub(CONTROL, "", text.rpartition(CLEARED)[2]) == ""


def test_a_pipe_sees_nothing(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "moec", "checkpoint", "verify", "100"]
    ran = subprocess.run(command, cwd=checkpoint, capture_output=True, check=True)
    assert ran.stderr == b""


@each_row("width", [40, 60, 89, 100, 200])
@each_row("of_bytes", [False, True])
def test_the_line_never_wraps(
    width: int, of_bytes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    with progress("verifying 32 ranks", counts_bytes=of_bytes) as bar:
        bar.at("float64, the unsharded model: backward, layer 12 of 32", 1 << 30, 1 << 32)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    assert any(line.startswith("float64, the unsharded ") for line in lines)
    assert max(map(len, lines)) <= width
    assert sum(bool(line.strip()) for line in lines) <= 2  # drawn at the start, and at the end
