"""All steps in one run, `make demo`: compile a `.moe` file, verify the plan, train it on four ranks, generate text.

Each step is a shell command, printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from text import TextError, load_text

from moec.driver import to_spec

EXAMPLES = Path(os.path.relpath(__file__)).parent
RANKS = 4
BOUND = 0.75
"""The demo's target: the model's bits per byte over the unigram entropy are at most this."""

SECONDS, STEPS = 130, 3000
"""Training stops at whichever comes first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a text file or a folder of them (default: Python's standard library)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="train for so long (default: %(default)s)")
    options = parser.parse_args()
    source, plan = EXAMPLES / "tiny.moe", Path("build", "tiny.plan")
    result = plan.with_name("demo.json")
    require_text(source, options.data)
    started = time.monotonic()
    run("moec", "compile", source, "-o", plan)
    run("moec", "verify", plan)
    data = ["--data", options.data] if options.data else []
    budget = ["--steps", STEPS, "--seconds", f"{options.seconds:g}"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", RANKS]
    run(*torchrun, EXAMPLES / "train.py", plan, *budget, "--result", result, *data)
    conclude(json.loads(result.read_text()), time.monotonic() - started)


def require_text(source: Path, data: str | None) -> None:
    """Reports errors in the data before any long step."""
    try:
        train = to_spec(source).train
        assert train is not None
        load_text(data, train.sequence)
    except TextError as error:
        sys.exit(f"--data: {error}")


MODULES = {"moec": "moec", "torchrun": "torch.distributed.run"}
"""The module of each command, which this interpreter runs: no PATH is needed."""


def run(command: str, *arguments: object) -> None:
    """Prints a command and runs it; a failure, which prints its own error, ends the demo."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ {shlex.join([command, *words])}\n", flush=True)
    # Without it each rank would use every core.
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    environment = os.environ | ({"OMP_NUM_THREADS": threads} if command == "torchrun" else {})
    finished = subprocess.run([sys.executable, "-m", MODULES[command], *words], env=environment, check=False)
    if finished.returncode:
        sys.exit(f"demo: `{command}` failed with exit code {finished.returncode}")


def conclude(result: dict[str, float], seconds: float) -> None:
    ratio = result["bits_per_byte"] / result["unigram_bits_per_byte"]
    print(f"\ndemo: {seconds:.0f} s in all; held-out bits per byte are {ratio:.2f} × the unigram entropy", end="")
    if ratio > BOUND:
        print(f", more than the {BOUND} that was to be reached")
        sys.exit("demo: too little training (`--seconds 300` trains for longer), or too little text to learn from")
    print(f", and {BOUND} was to be reached")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
