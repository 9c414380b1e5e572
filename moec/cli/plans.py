"""Commands that make and use plans: `compile`, `plan`, `verify`, `load`, `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from moec.cli.command import Command, argument, lets, output_format, path
from moec.cli.completing import FileOrPlan

if TYPE_CHECKING:
    from moec.commands.compile_document import Stage

STAGES = ("ast", "spec", "ir", "placed", "fx", "kernels")
"""The forms that `compile --emit` prints."""


class PassName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """The name of a pass, or one of `further_words`."""

    name = "pass"

    def __init__(self, *further_words: str) -> None:
        self.further_words = further_words

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name itself. Raises `BadParameter` for an unknown pass."""
        from moec.passes.pipeline import PASS_NAMES

        allowed = (*PASS_NAMES, *self.further_words)
        if value not in allowed:
            self.fail(f"{value!r} is not one of {', '.join(allowed)}", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The passes that begin with `incomplete`."""
        from moec.passes.pipeline import PASS_NAMES

        return [CompletionItem(name) for name in (*PASS_NAMES, *self.further_words) if name.startswith(incomplete)]


class PlacementWord(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """`contiguous`, `greedy` or `replicate=N`: the word and N, else 0."""

    name = "placement"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """The word and its number. Raises `BadParameter` for another one."""
        if isinstance(value, tuple):
            return value
        word, is_given, number = value.partition("=")
        is_number = number.isascii() and number.isdecimal() and len(number) < 7 and int(number) > 0
        if (word in ("contiguous", "greedy") and not is_given) or (word == "replicate" and is_number):
            return word, int(number or 0)
        return self.fail(f"{value!r} is not one of contiguous, greedy, replicate=N", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words that begin with `incomplete`."""
        words = ("contiguous", "greedy", "replicate=16")
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


@click.command(
    "compile",
    cls=Command,
    examples={
        "moec compile first.moe": "writes first.plan, prints a summary",
        "moec compile first.moe --emit ir": "the Program before placement; writes no plan",
        "moec compile first.moe --json": "the summary as numbers",
    },
    fails="the file has errors, a step does not fit the devices, or the plan cannot be written",
    documents=("compile", "compile-emit"),
)
@argument("file", "A `.moe` file.", type=FileOrPlan(files=True))
@click.option("-o", "--output", type=path(), help="Folder of the plan; default: FILE's name.plan.")
@lets
@output_format
@click.option(
    "--emit",
    type=click.Choice(STAGES),
    metavar="STAGE",
    help="Print ast, spec, ir, placed, fx or kernels, and write no plan.",
)
@click.option(
    "--stop-after", type=PassName(), metavar="PASS", help="With --emit=ir or --emit=placed: stop after this pass."
)
@click.option(
    "--print-ir-after",
    type=PassName("all", "changed"),
    metavar="PASS",
    help="Print the Program after a pass: its name, `all`, or `changed`.",
)
@click.option("--time-passes", is_flag=True, help="Print the time of each pass.")
def compile_(
    file: Path,
    output: Path | None,
    lets: dict[str, str],
    style: str,
    emit: Stage | None,
    stop_after: str | None,
    print_ir_after: str | None,
    time_passes: bool,
) -> None:
    """Turn a `.moe` file into a plan. Imports torch only for `--emit=fx`."""
    from moec.commands.compile import run
    from moec.commands.console.other_files import require_moe_file
    from moec.commands.console.output import show

    if stop_after and emit not in ("ir", "placed"):
        raise click.UsageError("--stop-after needs --emit=ir or --emit=placed: a stopped compilation has no plan")
    require_moe_file(file, "moec compile")
    show(run(file, output, lets, emit, stop_after, print_ir_after, time_passes, style), style)


@click.command(
    cls=Command,
    examples={
        "moec plan first.moe": "the step's time by what takes it, tokens per second, MFU, and memory",
        "moec plan first.moe --why-not 'ep = 2'": "what the best plan with these words would take, and why",
        "moec plan first.moe --against old.plan": "what differs from an earlier plan of the model",
        "moec plan traced.moe --placement greedy": "with experts placed by the loads of an earlier step of a trace",
        "moec plan first.moe --json": "the same as numbers",
    },
    fails="the step does not fit the devices (the prediction is on stdout), or the file has errors",
    documents=("plan",),
)
@argument("source", "A `.moe` file or a plan folder.", type=FileOrPlan(files=True, plans=True))
@click.option("--why-not", metavar="WORDS", help="Compare the best plan with these words of `parallel`.")
@click.option(
    "--against",
    metavar="PLAN",
    type=FileOrPlan(files=True, plans=True),
    help="Say what differs from this plan or file of the model, and what that costs or saves.",
)
@click.option(
    "--placement",
    type=PlacementWord(),
    default="contiguous",
    metavar="HOW",
    help="With a trace: contiguous (the default), greedy, or replicate=N: with N copies of experts in each layer.",
)
@click.option(
    "--age",
    type=click.IntRange(min=0),
    default=1,
    metavar="SAMPLES",
    help="Place experts by the loads so many samples ago, 0 for the step's own; default: 1.",
)
@lets
@output_format
def plan(
    source: Path,
    why_not: str | None,
    against: Path | None,
    placement: tuple[str, int],
    age: int,
    lets: dict[str, str],
    style: str,
) -> None:
    """Predict a step's time and memory, and say what takes them. Needs no torch."""
    from moec.commands.console.output import show
    from moec.commands.planning.loads import Placing
    from moec.commands.planning.plan import run
    from moec.subject import is_plan

    if lets and is_plan(source):
        raise click.UsageError("--let needs a file; a plan was compiled with values of its own")
    if age != 1 and placement == ("contiguous", 0):
        raise click.UsageError("--age is of a --placement that follows loads: greedy or replicate=N")
    fits, warnings = run(source, lets, style, why_not, against, Placing(*placement, age))
    show(warnings, style)
    if not fits:
        raise SystemExit(1)


@click.command(
    cls=Command,
    examples={
        "moec verify first.plan": "all ranks in one process, against the unsharded model",
        "moec verify --scale large.plan": "at toy widths",
    },
    fails="the plan does not equal the unsharded model (the report is on stdout), or cannot be loaded",
    documents=("verify",),
)
@argument("plan", "A plan folder.", type=FileOrPlan(plans=True))
@output_format
@click.option("--trust-nothing", is_flag=True, help="First compile the plan's Spec again and compare.")
@click.option("--scale", is_flag=True, help="Use toy widths; default: only for plans too large for this machine.")
def verify(plan: Path, style: str, trust_nothing: bool, scale: bool) -> None:
    """Prove a plan equal to the unsharded model or layer: all ranks in one process, forward, gradients, one step."""
    from moec.commands.console.other_files import require_plan
    from moec.commands.verify import run

    require_plan(plan, "moec verify")
    if not run(plan, style, trust_nothing=trust_nothing, scale=scale or None):
        raise SystemExit(1)


@click.command(
    cls=Command,
    examples={
        "moec load --trust-nothing first.plan": "also compiles the plan's Spec again",
    },
    documents=("load",),
)
@argument("plan", "A plan folder.", type=FileOrPlan(plans=True))
@output_format
@click.option("--trust-nothing", is_flag=True, help="Compile the plan's Spec again and compare.")
def load(plan: Path, style: str, trust_nothing: bool) -> None:
    """Check that a plan is complete and valid. Needs no torch."""
    from moec.commands.load import run

    run(plan, trust_nothing, style)


@click.command(
    cls=Command,
    examples={
        "moec tune first.plan -o tuned.plan": "measures on this machine's GPU",
    },
    documents=("tune",),
)
@argument("plan", "A plan folder.", type=FileOrPlan(plans=True))
@click.option("-o", "--output", type=path(), help="Folder of the tuned plan; default: PLAN itself.")
@click.option("--tries", type=click.IntRange(min=1), help="Tiles to try for each product and row height; default: 12.")
@output_format
def tune(plan: Path, output: Path | None, tries: int | None, style: str) -> None:
    """Measure the fastest tiles of a plan's kernels on this machine's device, and store them in the plan."""
    from moec.commands.tune import run

    run(plan, output, tries, style)
