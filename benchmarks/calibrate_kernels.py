"""Fits the model of the kernels to what `gpu.py` measured, and prints how far it is from each kernel.

    python benchmarks/calibrate_kernels.py RESULTS.jsonl --device h200 [--write]

`--write` stores the fitted constants beside moec's tiles, where `moec inspect PLAN --kernels` and the rules read them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kernel_fit import calibrate, read_measurements, report, stored

from moec.codegen.kernels.model.model_calibration import model_file
from moec.codegen.kernels.model.model_device import DEVICES, FREE

LEAST_ROWS = 2 * len(FREE)


def main(arguments: list[str]) -> int:
    """1 where there is too little to fit."""
    parser = argparse.ArgumentParser(description="Fits the model of the kernels to measured ones.")
    parser.add_argument("results", type=Path, help="JSON lines of `gpu.py`")
    parser.add_argument("--device", default="h200", choices=sorted(DEVICES))
    parser.add_argument("--write", action="store_true", help="store the constants")
    given = parser.parse_args(arguments)

    if not given.results.is_file():
        print(f"there is no file {given.results}", file=sys.stderr)
        return 1
    rows = read_measurements(given.results.read_text(encoding="utf-8"), given.device)
    if len(rows) < LEAST_ROWS:
        said = f"{len(rows)} timed kernels of {given.device}; {len(FREE)} constants are fitted to at least {LEAST_ROWS}"
        print(f"{given.results} has {said}", file=sys.stderr)
        return 1
    assumed = DEVICES[given.device]
    fitted = calibrate(assumed, rows)
    for model in (assumed, fitted):
        print("\n".join(report(model, rows)))
    if given.write:
        file = model_file(given.device)
        new = file.with_suffix(".new")
        file.parent.mkdir(exist_ok=True)
        new.write_text(stored(fitted, rows).model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(new, file)
        print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
