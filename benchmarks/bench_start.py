"""How long short commands take, from the interpreter's start to its exit: help, check, explain, completion."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_check import FILE, LAYER
from commands import Ran, run_moec, run_python
from report import Row, median, parser, report

LIMITS_MS = {"--help": 130, "--version": 130, "check": 130, "explain": 400, "completion": 200}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=25)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sixty.moe")
        file.write_text(FILE % (LAYER % ("", 128, 64)))
        commands = {
            "--help": ["--help"],
            "--version": ["--version"],
            "check": ["check", str(file)],
            "check, --json": ["check", "--json", str(file)],
            "explain, a word": ["explain", "topk"],
            "explain, a code": ["explain", "MOE0311"],
        }
        rows = rows_of("python, doing nothing", lambda: run_python("-c", "pass"), chosen.repeat, None)
        for name, arguments in commands.items():
            limit = LIMITS_MS[name.partition(",")[0]]
            rows += rows_of(f"moec {name}", lambda arguments=arguments: run_moec(*arguments), chosen.repeat, limit)
        os.environ["FORCE_COLOR"] = "1"
        rows += rows_of(
            "moec explain, in a terminal", lambda: run_moec("explain", "topk"), chosen.repeat, LIMITS_MS["explain"]
        )
        del os.environ["FORCE_COLOR"]
        os.environ |= {"_MOEC_COMPLETE": "bash_complete", "COMP_WORDS": "moec compile --e", "COMP_CWORD": "2"}
        rows += rows_of("completion in bash", run_moec, chosen.repeat, LIMITS_MS["completion"])
    report("short commands", rows, chosen.json)


def rows_of(name: str, run: Callable[[], Ran], repeat: int, limit: float | None) -> list[Row]:
    """The fastest run and the median, and the processor's time, which other work slows less."""
    run()  # writes bytecode
    runs = [run() for _ in range(repeat)]
    wall, cpu = [1e3 * one.seconds for one in runs], [1e3 * one.cpu_seconds for one in runs]
    return [
        Row(f"{name}, fastest", min(wall), "ms", limit),
        Row(f"{name}, median", median(wall), "ms", limit),
        Row("  of the processor, median", median(cpu), "ms"),
    ]


if __name__ == "__main__":
    main()
