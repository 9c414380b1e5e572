"""`moec compile` of a 61-layer, 256-expert model for 256 ranks, and loading its plan without torch.

Times are of the processor, of whole processes from the interpreter's start to its exit: other work slows them less.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from commands import run_moec, run_python
from report import Row, median, parser, report

FILE = Path(__file__).with_name("deepseek_v3_sized.moe")
COMPILE_SECONDS, LOAD_SECONDS, LIMIT_BYTES = 0.35, 0.25, 1e9
LOAD = """
import sys
from moec.codegen.reading import read_plan
read_plan(sys.argv[1])
assert "torch" not in sys.modules
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=15)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "model.plan")
        runs = [run_moec("compile", str(FILE), "-o", str(plan)) for _ in range(chosen.repeat)]
        loads = [run_python("-c", LOAD, str(plan)).cpu_seconds for _ in range(chosen.repeat)]
        size = sum(file.stat().st_size for file in plan.rglob("*") if file.is_file())
    print(runs[-1].output)
    rows = [
        Row("moec compile, fastest", min(run.cpu_seconds for run in runs), "s", COMPILE_SECONDS),
        Row("moec compile, median", median([run.cpu_seconds for run in runs]), "s", COMPILE_SECONDS),
        Row("reading the plan, fastest", min(loads), "s", LOAD_SECONDS),
        Row("reading the plan, median", median(loads), "s", LOAD_SECONDS),
        Row("peak memory of moec compile", max(run.peak_bytes for run in runs) / 1e6, "MB", LIMIT_BYTES / 1e6),
        Row("the plan on disk", size / 1e6, "MB"),
    ]
    report("moec compile, 61 layers × 256 experts, 256 ranks", rows, chosen.json)


if __name__ == "__main__":
    main()
