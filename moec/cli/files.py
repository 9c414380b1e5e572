"""Commands on `.moe` files: `check`, `fmt`, `explain`, `init`, `import hf`. None of them imports torch."""

from __future__ import annotations

from pathlib import Path

import click

from moec.cli.command import Command, Group, argument, lets, output_format, path
from moec.cli.completing import FileOrPlan, LibraryModel, Subject


@click.command(
    cls=Command,
    examples={
        "moec check first.moe": "every error and warning; nothing for a good file where stderr is no terminal",
        "moec check --fix first.moe": "typos with one correction are corrected in the file",
        "moec check --let experts=16 first.moe": "with another value of a `let`",
        "moec check - --stdin-name first.moe --json < draft": "for an editor: a text that is not saved",
    },
    fails="a file has errors; warnings alone exit with 0",
    documents=("diagnostics",),
)
@argument("files", "Files; `-` is stdin.", nargs=-1, required=True, type=FileOrPlan(files=True), metavar="FILES…")
@lets
@output_format
@click.option("--fix", is_flag=True, help="First apply unambiguous fixes to the files.")
@click.option("--stdin-name", metavar="FILE", help="With `-`: the file whose text it is, for messages and `use`.")
def check(files: tuple[Path, ...], lets: dict[str, str], style: str, fix: bool, stdin_name: str | None) -> None:
    """Report every error in files. Needs no torch. `moec compile` checks that a step fits the memory."""
    from moec.commands.check import STDIN, run

    stdin = any(str(file) == "-" for file in files)
    if stdin_name is not None and not stdin:
        raise click.UsageError("--stdin-name needs the file `-`")
    if fix and stdin:
        raise click.UsageError("--fix writes files, and `-` is stdin: leave out one of them")
    raise SystemExit(run(files, lets, style, fix, stdin_name or STDIN))


@click.command(
    cls=Command,
    examples={
        "moec fmt first.moe": "in place, only if something changes",
        "moec fmt --check --diff first.moe": "for CI: what would change, and exit code 1",
        "moec fmt - < first.moe": "to stdout",
    },
    fails="a file does not parse, or with --check or --diff would change",
    documents=("fmt",),
)
@argument(
    "files",
    "`.moe` files; `-` reads stdin and writes stdout.",
    nargs=-1,
    required=True,
    type=FileOrPlan(files=True),
    metavar="FILES…",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file would change.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change.")
@output_format
def fmt(files: tuple[Path, ...], check: bool, diff: bool, style: str) -> None:
    """Format files in the standard layout. Keeps comments and meaning."""
    from moec.commands.fmt import run

    raise SystemExit(run(files, check, diff, style))


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True},  # `--num-experts` is a word
    examples={
        "moec explain topk": "a word of the language",
        "moec explain MOE0311": "an error",
        "moec explain num_experts_per_tok": "another system's word",
        "moec explain h200": "a device, cluster or model of the library",
    },
    fails="there is no such word or code",
    documents=("explain",),
)
@argument(
    "subject",
    "MOE0311, topk, kv_heads, or another system's word such as hidden_size.",
    metavar="CODE|WORD",
    type=Subject(),
)
@output_format
def explain(subject: str, style: str) -> None:
    """Explain a diagnostic and its fix, or a word of the language and its arguments.

    A misspelt word shows the page of the word that was meant, and says so on stderr. A word that is only near has
    none.
    """
    from moec.commands.explain import run

    run(subject, style)


@click.command(
    cls=Command,
    examples={
        "moec init": "writes model.moe, with comments",
        "moec init --from qwen3_30b_a3b": "starts from a model of the library",
        "moec init --list": "the library",
    },
    fails="there is a file already, or no such model",
    documents=("init", "init-list"),
)
@argument("file", "The file to write; it must not exist. Default: model.moe, or NAME.moe.", required=False, type=path())
@click.option("-o", "--output", type=path(), help="FILE, as other commands call it.")
@click.option("--from", "model", metavar="NAME", type=LibraryModel(), help="Start from this model of the library.")
@click.option("--list", "show_list", is_flag=True, help="Write nothing; list the library's models.")
@output_format
def init(file: Path | None, output: Path | None, model: str | None, show_list: bool, style: str) -> None:
    """Write a commented starter file, or a file that starts from a model of the library."""
    if show_list:
        from moec.commands.console.output import emit
        from moec.commands.library import listing, models

        if file or output or model:
            raise click.UsageError("--list writes nothing: leave out FILE and --from")
        listed = models()
        emit(style, lambda: listing(listed), lambda: listed)
        return
    from moec.commands.init import run

    if file and output:
        raise click.UsageError("give the file once: FILE and -o are the same")
    run(file or output, model, style)


@click.group("import", cls=Group)
def imports() -> None:
    """Make a `.moe` file of a model described elsewhere."""


@imports.command(
    "hf",
    examples={
        "moec import hf Mixtral-8x7B-v0.1 -o mixtral.moe": "the file of a folder with config.json",
    },
    fails="moec cannot express the model, or the file exists",
    documents=("import-hf",),
)
@argument("source", "A model's folder, or its config.json.", metavar="DIR|config.json", type=path())
@click.option("-o", "--output", type=path(), help="The file to write; default: stdout.")
@output_format
def import_hf(source: Path, output: Path | None, style: str) -> None:
    """Write a model of Hugging Face as a `.moe` file. Executes nothing of the folder, and needs no torch."""
    from moec.commands.import_hf import run

    run(source, output, style)
