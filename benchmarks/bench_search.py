"""The search for degrees: how long it takes, how near its estimates come, and where published layouts stand.

With `--rows FOLDER`, as `bench_published.py`, also the last.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench_published import FOLDER
from planning.searched import layouts, near, open_file, place_of
from planning.sources import read

from moec.passes.search.choose import choose

SIZES = ((32, 2048), (256, 2048), (2048, 16_384))
"""Nodes of 8, and sequences of a step of DeepSeek-V3."""

MODELS = (("deepseek_v3", 32), ("mixtral_8x22b", 16), ("qwen3_30b_a3b", 4))
BEST = "mcore+folding"
"""The method whose layout is the best of its model in the Folding paper."""


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FOLDER", default=os.environ.get(FOLDER))
    options.add_argument("--time", metavar="NODES,BATCH", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.time:
        print_time(*map(int, given.time.split(",")))
        return
    for nodes, batch in SIZES:  # each in a process of its own, whose memory counts
        subprocess.run([sys.executable, __file__, "--time", f"{nodes},{batch}"], check=True)
    for model, nodes in MODELS:
        print_near(model, nodes)
    if given.rows is not None:
        print_layouts(given.rows)


def print_time(nodes: int, batch: int) -> None:
    spec, started = open_file("deepseek_v3", nodes, batch), time.process_time()
    found = choose(spec)
    seconds, memory = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"deepseek_v3 on {8 * nodes:,} ranks: {seconds:.1f} s of a core, {memory:.0f} MB at most, {found.candidates:,} "
        f"plans; step {found.chosen.prediction.step.total:.3g} s by {dict(found.chosen.words)}"
    )


def print_near(model: str, nodes: int) -> None:
    found = list(near(open_file(model, nodes, 2048), 60, seed=0))
    for what, is_it in (("pp 1", True), ("pipelines", False)):
        of = [each for each in found if (each.words["pp"] == 1) == is_it]
        if of:
            seconds, memory = _spread([each.seconds for each in of]), _spread([each.memory for each in of])
            print(f"{model} on {8 * nodes} ranks, {len(of)} plans, {what}: estimated over exact, least, median, most")
            print(f"  seconds {seconds}; memory {memory}")


def print_layouts(folder: Path) -> None:
    for row in read(folder)[0].stated:
        if BEST in row.name:
            found = layouts(row)
            place, times = place_of(row, found)
            print(f"{row.name}: place {place} of {len(found)}, {times:.3f} of the best's step")
            for candidate in found[:3]:
                print(f"  {candidate.prediction.step.total:.3f} s {dict(candidate.words)}")


def _spread(values: list[float]) -> str:
    return f"{min(values):.3f}, {statistics.median(values):.3f}, {max(values):.3f}"


if __name__ == "__main__":
    main()
