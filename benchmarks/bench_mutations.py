"""How many wrong plans the rules of ops and `moec verify` find: random single changes to a right plan, each judged.

The rules refuse a Program that no pass makes; no plan folder with it is read. `moec verify` runs every plan all the
same, and those that pass it again with other weights and inputs: if that finds one, it was missed the first time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import torch
from mutations import KINDS, STATED, Change, broken_rule, mutate, name_of

import moec
from moec.codegen.plan import Plan
from moec.passes.ir.op import TypeRuleError
from moec.runtime.verify.verification import verify

FILE = Path(__file__).parents[1] / "examples" / "tiny.moe"
DEGREES = ("ep = 2", "tp = 2; ep = 4", "tp = 4; ep = 2; sequence_parallel = false")
"""Each change is made to a plan of one of these degrees, in turn."""
SEEDS = (1, 2, 3)

STOPS = (TypeRuleError, RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)
"""Exceptions of `verify`: a Program that breaks the rules may have no graph."""


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every change and what came of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[tuple[str, str, str]] = Counter()
    plans = [plan_of(degrees) for degrees in DEGREES]
    started = time.perf_counter()
    for number in range(options.count):
        change = mutate(plans[number % len(plans)], random.Random(f"{options.seed}/{number}"))
        rules, numbers = judge_in_child(change)
        outcomes[change.kind, rules, numbers] += 1
        if options.verbose or is_missed(rules, numbers) or numbers == "found":
            print(f"{rules}, {numbers}: {change.words}", flush=True)
    print_table(outcomes)
    print(f"in {time.perf_counter() - started:.0f} s")
    sys.exit(1 if any(is_missed(rules, numbers) for _, rules, numbers in outcomes) else 0)


def plan_of(degrees: str) -> Plan:
    """The plan of the example with other degrees."""
    text = FILE.read_text()
    start = text.index("parallel {")
    stop = text.index("}", start)
    return moec.compile(f"{text[:start]}parallel {{ {degrees} {text[stop:]}")


def judge_in_child(change: Change) -> tuple[str, str]:
    """`judge` in a forked process: a broken plan may crash it (attention without heads), and counts as stopped."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, json.dumps(judge(change)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    if found:
        rules, numbers = json.loads(found)
        return rules, numbers
    return "within the rules" if broken_rule(change.plan) is None else "refused", "stopped"


def judge(change: Change) -> tuple[str, str]:
    """What the rules say, `refused` or `within the rules`, and what `verify` does.

    `found and named`, `found`, `stopped`, `found later` or `the same`.
    """
    rules = "within the rules" if broken_rule(change.plan) is None else "refused"
    try:
        report = verify(change.plan, float32=False)
        if not report.ok:
            return rules, "found and named" if report.first_difference else "found"
        later = all(verify(change.plan, seed=seed, float32=False).ok for seed in SEEDS)
        return rules, "the same" if later else "found later"
    except STOPS:
        return rules, "stopped"


def is_missed(rules: str, numbers: str) -> bool:
    """Whether neither the rules nor the first run found a change of what a plan computes, or `verify` broke down."""
    return rules != "refused" and numbers in ("found later", "stopped")


COLUMNS = ("refused", "found and named", "found", "stopped", "found later", "the same", "missed")


def print_table(outcomes: Counter[tuple[str, str, str]]) -> None:
    """A line for each kind of change: how many the rules refuse, and what `verify` makes of all of them."""
    print("| change | count | refused by rules | " + " | ".join(f"verify: {c}" for c in COLUMNS[1:-1]) + " | missed |")
    print("|---|" + "---:|" * (len(COLUMNS) + 1))
    totals: Counter[str] = Counter()
    for kind in (*map(name_of, KINDS), None):
        row = totals if kind is None else Counter[str]()
        for (of, rules, numbers), count in outcomes.items():
            if of == kind:
                row.update({"count": count, numbers: count})
                row["refused"] += count * (rules == "refused")
                row["missed"] += count * is_missed(rules, numbers)
        if kind is not None:
            totals.update(row)
        print(f"| {kind or 'all'} | {row['count']} | " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    neutral = sum(n for (_, rules, numbers), n in outcomes.items() if rules != "refused" and numbers == "the same")
    stated = sum(n for (kind, *_), n in outcomes.items() if kind in map(name_of, STATED))
    found = totals["found and named"] + totals["found"]
    print(f"{totals['count']} random changes, {stated} of them to what a Program only states of its values:")
    print(f"  refused by the rules    {totals['refused']}")
    print(f"  found by moec verify    {found}, with an op named {totals['found and named']}")
    print(f"  neither, and neutral    {neutral}")
    print(f"  missed                  {totals['missed']}")


if __name__ == "__main__":
    main()
