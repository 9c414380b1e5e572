"""Diagnostics that a script does not catch: printed once, at the script's own line, without a traceback."""

from __future__ import annotations

import os
import sys
import time
from types import CodeType, TracebackType

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Label, render
from moec.grammar.source import Source, Span
from moec.runtime.errors import CallError, JobError, RankError
from moec.runtime.script import is_library_frame, shown_path

HEAD_START_SECONDS = 2.0
"""Delay after which a rank above 0 exits for an error that rank 0 prints."""
OWN_ERROR_SECONDS = 10.0
"""Delay after which a rank prints an error that ranks have not agreed on. If all ranks made the call, rank 0 has exited
by then, and the launcher has ended this rank. A rank that ended sooner could break a slow rank 0's connections."""

CLIP_HELP = (
    "help: parameters of experts lie on another mesh than those of other layers: call `job.clip_grad_norm_(model, "
    "max_norm)`, or `moec.clip_grad_norm_` for `moec.layer`"
)
"""Added to the error of `torch.nn.utils.clip_grad_norm_` on several ranks."""

DETACHED_HELP = "help: if this is the loss of `job.step`, leave `backward()` out: `job.step` has run it already"
"""Added to the error of `backward()` of a loss without a graph."""

FORWARD_HELP = "help: call it as `model(tokens, labels)`, or `model(tokens)` for logits alone"
"""Added to the error of a call of the model with other arguments, which `torch.nn.Module` passes on."""

_rank: int | None = None
_inner = sys.excepthook
_installed = False


def show_uncaught() -> None:
    """Installs the hook, once, unless there is another one, as of a debugger or a notebook."""
    if sys.excepthook is sys.__excepthook__:
        _install()


def show_uncaught_once(rank: int) -> None:
    """Installs the hook, also over another one: all ranks raise the same error, and rank 0 alone prints it."""
    global _rank
    _rank = rank
    if not _installed:
        _install()


def located(diagnostics: tuple[Diagnostic, ...], trace: TracebackType | None) -> tuple[Diagnostic, ...]:
    """Diagnostics with the script's call as their place, or as a further one of the first that is in a file."""
    place = _place(trace)
    if place is None or not diagnostics:
        return diagnostics
    first, *further = diagnostics
    if first.span is None:
        return first._replace(span=place), *further
    return first._replace(labels=(*first.labels, Label(span=place, message="from this call"))), *further


def in_script(error: DiagnosticError, trace: TracebackType | None) -> tuple[Diagnostic, ...]:
    """The error's diagnostics at the line of the script that it has called moec with.

    An error in a function that the script gave to moec is at the function's line, with the call as a further place.
    """
    function_trace = error.__cause__.__traceback__ if error.__cause__ is not None else None
    return located(located(error.diagnostics, function_trace), trace)


def _install() -> None:
    global _inner, _installed
    if sys.excepthook is not _hook:
        _inner, _installed = sys.excepthook, True
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, DiagnosticError):
        if help := _help_of_torch(error, trace):
            error.add_note(help)
        _inner(kind, error, trace)
    elif isinstance(error, RankError):
        pass
    elif (rank := _own_rank()) == 0:
        _print(error, trace)
    else:
        # The launcher kills all ranks when the first one exits: rank 0 must print before that.
        is_own = isinstance(error, CallError) or not isinstance(error, JobError)
        time.sleep(OWN_ERROR_SECONDS if is_own else HEAD_START_SECONDS)
        if is_own:
            print(f"rank {rank}:", file=sys.stderr)
            _print(error, trace)


def _own_rank() -> int:
    """The rank of the job; before a job, that of the launcher."""
    return int(os.environ.get("RANK") or "0") if _rank is None else _rank


def _help_of_torch(error: BaseException, trace: TracebackType | None) -> str:
    """The way out of an error of torch that parameters and losses of moec cause; empty where none is known."""
    if isinstance(error, TypeError) and str(error).startswith("PlanModule.forward()"):
        return FORWARD_HELP
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "clip_grad_norm_" and "mesh" in str(error):
            return CLIP_HELP
        if trace.tb_frame.f_code.co_name == "backward" and "does not require grad" in str(error):
            return DETACHED_HELP
        trace = trace.tb_next
    return ""


def _print(error: DiagnosticError, trace: TracebackType | None) -> None:
    elsewhere = isinstance(error, JobError) and error.elsewhere
    shown = error.diagnostics if elsewhere else in_script(error, trace)
    print(render(shown, width=_columns_of_terminal()).rstrip("\n"), file=sys.stderr, flush=True)


def _columns_of_terminal() -> int | None:
    """The width of stderr's terminal; None where there is none, and a log has each sentence in one line."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal; a stream without a file
        return None


def _place(trace: TracebackType | None) -> Span | None:
    """The innermost line of the user's script in a traceback; of a statement on several lines, the first."""
    script_trace = None
    while trace is not None:
        if not is_library_frame(trace.tb_frame):
            script_trace = trace
        trace = trace.tb_next
    if script_trace is None:
        return None
    import linecache

    code, path = script_trace.tb_frame.f_code, script_trace.tb_frame.f_code.co_filename
    lines = linecache.getlines(path, script_trace.tb_frame.f_globals)
    number = script_trace.tb_lineno
    if not 1 <= number <= len(lines):
        return None
    line = lines[number - 1]
    start, end = _columns(code, script_trace.tb_lasti, number, line)
    before = sum(map(len, lines[: number - 1]))
    return Span(Source(shown_path(path), "".join(lines)), before + start, before + end)


def _columns(code: CodeType, instruction: int, number: int, line: str) -> tuple[int, int]:
    """Start and end of the failing expression in its first line, in characters; all of the line if unknown."""
    text = line.rstrip("\n")
    line_columns = len(text) - len(text.lstrip()), max(len(text.rstrip()), 1)
    first, last, start, end = list(code.co_positions())[instruction // 2]
    if first != number or start is None or end is None:
        return line_columns
    encoded = text.encode()
    begin = len(encoded[:start].decode(errors="replace"))
    return begin, max(len(encoded[:end].decode(errors="replace")) if last == first else line_columns[1], begin + 1)
