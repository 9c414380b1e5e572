"""How many mutants of the source the tests kill: one change each, drawn from a seed, tried on the tests that cover it.

    python benchmarks/mutants.py record              # the tests of `make test`, with coverage; goes on where it stopped
    python benchmarks/mutants.py record --slow       # the others, for what survives those
    python benchmarks/mutants.py list --count 20     # what the seed draws
    python benchmarks/mutants.py run --count 120     # goes on where it was interrupted
    python benchmarks/mutants.py report

A mutant has five minutes of the tests of `make test`, those that cover the fewest lines first, and, if it survives,
five more of the slow tests, of those left over, and of others of the same files. A test that has begun is waited for.
Tests that fail without the mutant, or not twice, do not count. Everything happens in copies of the checkout under
`.mutants/`; `copy` takes new ones, for which recordings still hold. Outcomes hold for the tests that there were: to try
a mutant on those of now, take its line out of the results.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from mutation.copied_tree import CHECKOUT, FOLDER, copies, require_own_import
from mutation.coverage_database import CoverageDatabase
from mutation.drawing import draw
from mutation.pytest_run import arguments_for, run_pytest
from mutation.recording import record
from mutation.results import Results, diff, report, untried
from mutation.selection import Selector
from mutation.trial import Trials

RESULTS = CHECKOUT / "benchmarks" / "results" / "mutants.jsonl"


def main() -> None:
    options = _parser().parse_args()
    if options.command == "report":
        print(report(list(Results(options.results).rows.values())))
        return
    tree, mutated = copies(options.folder, again=options.command == "copy")
    if options.command == "record":
        with CoverageDatabase(options.folder / "coverage.sqlite") as database:
            record(tree, database, options.paths, "slow" if options.slow else "not slow", again=options.again)
    elif options.command == "list":
        for mutant in draw(tree, options.seed, options.count):
            print(f"{mutant.file}:{mutant.line} {mutant.kind}")
            print("\n".join(f"  {line}" for line in diff(mutant, (tree / mutant.file).read_bytes())))
    elif options.command == "run":
        run(options, tree, mutated)


def run(options: Namespace, tree: Path, mutated: Path) -> None:
    """Tries the drawn mutants that have no outcome yet, and appends each outcome."""
    for copy in (tree, mutated):
        require_own_import(copy)
    results = Results(options.results)
    drawn = draw(tree, options.seed, options.count)
    left = list(untried(drawn, results, tree))
    print(f"{len(left)} of {len(drawn)} mutants to try", flush=True)
    trials = Trials(tree, mutated, (options.seconds, options.more_seconds))
    with CoverageDatabase(options.folder / "coverage.sqlite") as database:
        if not database.tests():
            sys.exit("no test is recorded: `python benchmarks/mutants.py record` first, for what is to be tried")
        selector = Selector(tree, database, collected(tree))
        for number, mutant in enumerate(left, 1):
            source = (tree / mutant.file).read_bytes()
            outcome = trials.run(mutant, selector.select(mutant))
            results.add(mutant, source, outcome, options.seed)
            by = f" by {outcome.by}, {outcome.how}" if outcome.by else f", {outcome.tests} of {outcome.of} tests"
            print(f"{number}/{len(left)} {mutant.file}:{mutant.line} {mutant.kind}: {outcome.result}{by}", flush=True)


def collected(tree: Path) -> list[str]:
    """The node ids of the tests of a copy, collected once. Exits where some file cannot be collected."""
    file = tree / ".types" / "collected.json"
    if not file.exists():
        tests: list[str] = []
        for marks in ("not slow", "slow"):
            found = run_pytest(tree, ["--collect-only", *arguments_for(marks)])
            if found.status != "passed":
                sys.exit(f"the tests of {tree} are not collected:\n{found.output}")
            tests += found.slow
        file.write_text(json.dumps(tests))
    names: list[str] = json.loads(file.read_text())
    return names


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    folder = {"type": lambda name: Path(name).resolve(), "default": FOLDER}
    parser.add_argument("--folder", **folder, help="of the copies and the coverage")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("copy", help="take new copies of the checkout")
    recording = commands.add_parser("record", help="run tests, and record which lines each covers")
    recording.add_argument("paths", nargs="*", help="files or folders of tests, relative to the checkout; all")
    recording.add_argument("--slow", action="store_true", help="the slow tests, not those of `make test`")
    recording.add_argument("--again", action="store_true", help="files that are recorded already, too")
    for name, help in (("list", "show mutants"), ("run", "try mutants on the tests")):
        command = commands.add_parser(name, help=help)
        command.add_argument("--count", type=int, default=120)
        command.add_argument("--seed", type=int, default=0)
    commands.add_parser("report", help="tables, and the survivors")
    trying = commands.choices["run"]
    trying.add_argument("--seconds", type=float, default=300.0, help="of the tests of `make test`, for each mutant")
    trying.add_argument("--more-seconds", type=float, default=300.0, help="of the other tests, for a survivor")
    for name, help in (("run", "append to this file"), ("report", "of this file")):
        commands.choices[name].add_argument("--results", type=Path, default=RESULTS, help=help)
    return parser


if __name__ == "__main__":
    main()
