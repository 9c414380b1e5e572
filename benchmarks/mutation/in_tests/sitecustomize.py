"""Python imports this on its start: while tests are recorded, it tells coverage which test runs.

pytest puts the test into `PYTEST_CURRENT_TEST`, and so do workers of the gloo pool for each task and interpreters that
are forked. Other processes have the test that started them, as coverage's static context. A pytest that a test starts
is marked `nested`, because session fixtures start some for all tests of a file; the process that others are forked
from, which only imports, `import`. Templates that are opened are written down beside it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FOLDER = os.environ.get("MOEC_MUTANTS_RECORDING")
VARIABLE = "PYTEST_CURRENT_TEST"


def _follow(folder: str) -> None:
    started_by = os.environ.get(VARIABLE)
    nested = started_by is not None and any("pytest" in word for word in sys.orig_argv[1:3])
    forks = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
    follows = started_by is None or forks or any("multiprocessing.spawn" in word for word in sys.orig_argv)
    now = {"test": "import" if forks else f"{started_by}|nested" if nested else started_by or "import"}
    if forks:
        _switch("import")
        os.register_at_fork(after_in_child=lambda: _switch("import"))  # after coverage's own, which begins again
    elif nested:
        _switch("nested")

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.putenv" and follows and arguments[0] == VARIABLE.encode():
            now["test"] = arguments[1].decode()
            _switch(now["test"])
        elif event == "open" and str(arguments[0]).endswith(".j2"):
            file = os.open(f"{folder}/templates-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, (json.dumps([now["test"], os.path.realpath(str(arguments[0]))]) + "\n").encode())
            os.close(file)

    sys.addaudithook(hear)


def _switch(context: str) -> None:
    coverage = sys.modules.get("coverage")
    measured = coverage and coverage.Coverage.current()
    if measured:
        measured.switch_context(context)


if FOLDER:
    _follow(FOLDER)
