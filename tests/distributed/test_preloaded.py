"""The interpreter that other tests start in place of Python, which is forked: it does what Python does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.preloaded import environment, preloaded

SCRIPTS = {
    "words": "import os, sys; print(__name__, __file__, sys.argv, sys.path[0], os.environ['MINE'], os.getcwd())",
    "status": "import sys; sys.exit(7)",
    "sentence": "import sys; sys.exit('no data')",
    "exception": "def inner():\n    raise KeyError('mine')\n\ntry:\n    inner()\nfinally:\n    print('last')",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "exit functions": "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(3)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
    "input": "import sys; print(sys.stdin.read().upper())",
}


def done(folder: Path, interpreter: str, *words: str) -> tuple[int, str, str]:
    variables = environment(MINE="set here")
    run = subprocess.run(
        [interpreter, *words], cwd=folder, env=variables, input="given", capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_and_ends_as_with_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name] + "\n")
    assert done(tmp_path, preloaded(), "script.py", "--lr=3", "-u") == done(
        tmp_path, sys.executable, "script.py", "--lr=3", "-u"
    )


@pytest.mark.parametrize(
    "words", [("-c", "import sys; print(sys.argv, repr(sys.path[0]))", "x"), ("-m", "calendar", "2026")]
)
def test_code_and_modules_run_as_with_python(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert done(tmp_path, preloaded(), *words) == done(tmp_path, sys.executable, *words)


def test_a_standard_file_that_is_closed_is_none(tmp_path: Path) -> None:
    code = "import sys; sys.exit(5 if sys.stderr is None and sys.stdout else 6)"
    run = subprocess.run(f'"{preloaded()}" -c "{code}" 2>&-', shell=True, cwd=tmp_path, check=False)
    assert run.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen([preloaded(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(600) == -number
    process.stdout.close()
    until = time.monotonic() + 600
    while os.path.exists(f"/proc/{started}"):
        assert time.monotonic() < until
        time.sleep(0.01)
