"""One command for a GPU that is lent for half an hour: ceilings and correctness, tiles, whole layers beside others',
steps of whole models and choices of slots.

    python benchmarks/gpu.py --part a --out rows.jsonl      # and b, c, d: at most nine minutes each
    python benchmarks/gpu.py --report rows.jsonl

Every row is written when it is measured; started again with the same file, it goes on behind the rows that are there.
What is measured runs in processes of their own, each with a time limit. Nothing is fetched: `gpu_carry.sh` collects
the packages that a machine without network may lack. `--device cpu` runs the same code, with tiny shapes in fp32 in
Triton's interpreter; such times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "a": ["gpu_part_a"],
    "b": ["gpu_part_b"],
    "c": ["gpu_part_c"],
    "d": ["gpu_part_d"],
}
"""The module of each part's measurements, which its processes import while they wait."""

BUDGET = 540.0
"""Seconds of a part."""


def link_moec(folder: Path) -> None:
    """Makes `moec` importable from this checkout: a machine that is lent has it as files alone."""
    root = HERE.parent
    of = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    (folder / "moec").mkdir()
    for file in (root / "moec").iterdir():
        (folder / "moec" / file.name).symlink_to(file)
    for package, path in of.items():
        if package != "moec":
            (folder / package.replace(".", "/")).symlink_to(root / path)


def is_installed() -> bool:
    """Whether moec is, as a whole: a checkout's own folder `moec` lacks the packages beside it."""
    try:
        return importlib.util.find_spec("moec.grammar") is not None
    except ModuleNotFoundError:
        return False
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "moec"]:
            del sys.modules[name]


def environment(device: str, folder: Path) -> None:
    """What this process and those it starts need to find moec, and to interpret kernels on CPU."""
    paths = [str(HERE)]
    if not is_installed():
        link_moec(folder)
        paths.append(str(folder))
        os.environ["PYTHONSAFEPATH"] = "1"  # or `python -c` would find the folder `moec` of this checkout first
    sys.path[:0] = paths
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *map(os.path.abspath, given)])
    if device == "cpu":
        os.environ.update({"MOEC_BACKEND": "triton", "TRITON_INTERPRET": "1"})


def options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", choices=PARTS, help="only this one; else all, one after the other")
    made.add_argument("--out", type=Path, default=Path("gpu.jsonl"), metavar="FILE", help="JSON lines, appended to")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="of each part")
    made.add_argument("--only", metavar="TEXT", help="only measurements whose keys contain it")
    made.add_argument("--again", action="store_true", help="measure again what failed")
    made.add_argument("--list", action="store_true", help="print the keys, in order, and measure nothing")
    made.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="print tables of these files' rows")
    made.add_argument("--write-tuned", nargs="+", type=Path, metavar="FILE", help="store the fastest ways of part b")
    made.add_argument("--folder", type=Path, help="where --write-tuned writes, if not where moec ships them")
    return made


def main() -> int:
    started = time.monotonic()
    chosen = options().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment(chosen.device, Path(folder))
        if chosen.report or chosen.write_tuned:
            report = importlib.import_module("gpu_report")
            report.main(chosen.report or [], chosen.write_tuned or [], chosen.folder)
            return 0
        unfit = "" if chosen.list else no_device(chosen.device)
        if unfit:
            print(f"nothing was measured: {unfit}", file=sys.stderr)
            return 2
        left = 0
        for part in [chosen.part] if chosen.part else PARTS:
            left += run_part(part, chosen, started)
            started = time.monotonic()
    return 3 if left else 0


def no_device(device: str) -> str:
    """Why nothing can be measured on this kind of device here; empty where it can."""
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return ""
    return "torch finds no CUDA device here (`--device cpu` tries the same code in Triton's interpreter)"


def run_part(part: str, chosen: argparse.Namespace, started: float) -> int:
    """Measures one part. Returns how many of its measurements were left out."""
    from gpu_rows import RowFile
    from gpu_run import Run

    every = importlib.import_module(PARTS[part][0]).measurements(chosen.device)
    wanted = [one for one in every if not chosen.only or chosen.only in one.key]
    if chosen.list:
        print("\n".join(one.key for one in wanted))
        return 0
    rows = RowFile(chosen.out)
    run = Run(rows, chosen.device, started + chosen.budget, PARTS[part], say)
    left = run.run(wanted, again=chosen.again)
    keys = {one.key for one in wanted} - {one.key for one in left}
    failed = sum("failed" in row for row in rows.rows() if row["key"] in keys and row["on"] == chosen.device)
    measured, seconds = len(keys) - failed, time.monotonic() - started
    say(f"part {part}: {measured} of {len(wanted)} measured, {failed} failed, in {chosen.out}, {seconds:.0f} s")
    if left:
        say(f"left out: {', '.join(one.key for one in left)}; the same command goes on with these")
    return len(left)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
