"""How many wrong plans `moec verify` finds: random single changes to a right one, each verified.

A plan that passes is verified again with other weights and inputs. If that finds it, it was missed the first time; if
not, the change changes no number (a constant that nothing depends on, a sum over one rank).
"""

from __future__ import annotations

import random
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import torch
from mutations import mutate

import moec
from moec.codegen.plan import Plan
from moec.runtime.verify import verify

FILE = Path(__file__).parents[1] / "examples" / "tiny.moe"
DEGREES = ("ep = 2", "tp = 2; ep = 4", "tp = 4; ep = 2; sequence_parallel = false")
"""Each change is made to a plan of one of these degrees, in turn."""
SEEDS = (1, 2, 3)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every change and what came of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    plans = [plan_of(degrees) for degrees in DEGREES]
    started = time.perf_counter()
    for number in range(options.count):
        outcome, words = judge(plans[number % len(plans)], random.Random(f"{options.seed}/{number}"))
        outcomes[outcome] += 1
        if outcome in ("missed", "caught") or options.verbose:
            print(f"{outcome}: {words}", flush=True)
    named = outcomes["caught and named"]
    caught = named + outcomes["caught"]
    changing = caught + outcomes["missed"]
    print(f"{options.count} random changes, {changing} of which change a number:")
    print(f"  caught  {caught} ({100 * caught / changing:.1f} %), with an op named {named}")
    print(f"  missed  {outcomes['missed']}")
    print(f"in {time.perf_counter() - started:.0f} s")
    sys.exit(1 if outcomes["missed"] else 0)


def plan_of(degrees: str) -> Plan:
    """The plan of the example with other degrees."""
    text = FILE.read_text()
    start = text.index("parallel {")
    stop = text.index("}", start)
    return moec.compile(f"{text[:start]}parallel {{ {degrees} {text[stop:]}")


def judge(right: Plan, draw: random.Random) -> tuple[str, str]:
    """`caught and named`, `caught`, `missed` or `the same`, and what was changed."""
    words, plan = mutate(right, draw)
    report = verify(plan, float32=False)
    if not report.ok:
        return ("caught and named" if report.first_difference else "caught"), words
    if all(verify(plan, seed=seed, float32=False).ok for seed in SEEDS):
        return "the same", words
    return "missed", words


if __name__ == "__main__":
    main()
