"""A pipe that is not UTF-8: what it cannot show is written as an escape, and no command fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = """model "m→é" { vocab = 64; dim = 32; depth = 1
  layers { attention = mha(heads = 2); moe { experts = 4 * gelu(32); gate = topk(2) } } }
train { batch = 2; sequence = 8; optimizer = adamw(lr = 1e-2) }
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_pipe_that_is_not_unicode_gets_escapes(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.moe").write_text(TEXT, encoding="utf-8")

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "moec", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode(encoding)

    assert "m\\u2192" in run("inspect", "a.moe")
    assert json.loads(run("inspect", "a.moe", "--json"))[0]["text"] == 'model "m→é":'
