"""`moec compile` of a 61-layer, 256-expert model for 256 ranks: the whole command, its time and its memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from commands import run_moec
from report import Row, median, parser, report

FILE = Path(__file__).with_name("deepseek_v3_sized.moe")
LIMIT_SECONDS, LIMIT_BYTES = 6, 1e9


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=5)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "model.plan")
        runs = [run_moec("compile", str(FILE), "-o", str(plan)) for _ in range(chosen.repeat)]
        size = sum(file.stat().st_size for file in plan.rglob("*") if file.is_file())
    print(runs[-1].output)
    rows = [
        Row("wall time, median", median([run.seconds for run in runs]), "s", LIMIT_SECONDS),
        Row("wall time, slowest", max(run.seconds for run in runs), "s", LIMIT_SECONDS),
        Row("peak memory", max(run.peak_bytes for run in runs) / 1e6, "MB", LIMIT_BYTES / 1e6),
        Row("the plan on disk", size / 1e6, "MB"),
    ]
    report("moec compile, 61 layers × 256 experts, 256 ranks", rows, chosen.json)


if __name__ == "__main__":
    main()
