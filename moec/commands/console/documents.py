"""The JSON documents of commands on files, of diagnostics, and of what a command wrote."""

from __future__ import annotations

from typing import Literal

from moec.commands.console.output import document


@document
class Place:
    """A range of a file. Lines and columns count from 1; the end is exclusive."""

    file: str
    """The path as given, `<stdin>`, or `library:NAME`."""
    line: int
    column: int
    end_line: int
    end_column: int


@document
class Edit:
    """Replaces `span` by `text`."""

    text: str
    span: Place


@document
class Label:
    """A further place that a diagnostic points at, with the reason."""

    message: str
    span: Place


@document
class DiagnosticDocument:
    """One diagnostic. Commands that fail print a list of them to stderr; `moec check` prints its list to stdout."""

    # `moec.grammar.diagnostics.render.as_json` writes it, and test_json_documents.py holds both together.

    code: str
    """Stable: MOE0311."""
    severity: Literal["error", "warning"]
    title: str
    """The rule that is broken."""
    message: str
    """How this value breaks it."""
    help: str
    """A correction, or empty."""
    page: str
    """The command that explains the code."""
    span: Place | None
    """Null where the mistake is in no file."""
    fix: list[Edit]
    """The edits of `moec check --fix`, all or none; empty where there is more than one correction."""
    labels: list[Label]


@document
class FormattedFile:
    """What `moec fmt` did, or would do, to one file. A file with errors is not in the list."""

    file: str
    changed: bool
    """Whether the standard layout is another than the file's."""
    written: bool
    diff: str | None
    """With --diff: the unified difference."""
    text: str | None
    """Of stdin: the formatted text."""


@document
class WrittenFile:
    """A new `.moe` file."""

    file: str | None
    """Its path; null where none was written."""
    text: str
    """Its content."""
    next: list[str]
    """The commands to run next."""


@document
class ListedModel:
    """A model of the library. Parameters are counts."""

    name: str
    title: str
    total: int
    """All parameters."""
    active: int
    """Parameters that a token uses."""
    experts: str
    """Such as 8E-2K-0S: routed experts of a mixture, how many a token goes to, and shared experts."""


@document
class LoadedPlan:
    """A plan that is complete and valid."""

    plan: str
    name: str
    ranks: int
    parameters: int
    """How many named parameters it has."""


@document
class InspectedValue:
    """A value of a file, or the head of a block, as `moec inspect FILE --all` shows it."""

    text: str
    """`vocab = 256`, indented by its block."""
    origin: Literal["file", "default", "unknown"]
    """Whether a file, `file`, sets it."""
    file: str | None
    """`first.moe`, or `library:clusters/one_rank.moe` for a file of moec's library."""
    line: int | None
    """From 1."""
    column: int | None
    """From 1."""
    lets: list[str]
    """The `--let NAME=VALUE` that changed it, as `NAME=VALUE`."""
    equal_at: list[str]
    """Of layers with equal values, shown once: where the others are written (`first.moe:9`)."""


@document
class InspectedText:
    """A view of a plan that is a text."""

    view: Literal["graph", "fx", "source"]
    text: str


@document
class VersionDocument:
    """What `moec --version` found. Null: not installed."""

    moec: str
    python: str
    torch: str | None
    triton: str | None
    backends: list[str]
    """The backends that are installed: torch, triton, quack."""


@document
class WrittenWeights:
    """A new checkpoint, file or folder with weights."""

    output: str
    tensors: int | None
    """How many tensors; null where the command does not count them."""
    bytes: int
    left_out: list[str]
    """What the source has and the output does not."""
