"""Errors at run time, raised on every rank and printed once."""

from __future__ import annotations

from typing import TypeGuard

from moec.grammar.diagnostics import DiagnosticError, diagnose


class JobError(DiagnosticError):
    """An error in a training script, its launch or its numbers, raised on every rank and before any gradient."""

    elsewhere = False
    """Whether another rank made the mistake, at another line of the script than this rank's."""

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__([diagnose(code, None, message, help=help)])


class RankError(JobError):
    """Another rank has died or stalled. One rank has printed the error already."""

    def __init__(self, text: str) -> None:
        super().__init__("MOE0705", text)


class CallError(JobError, ValueError, TypeError):
    """A call of moec with arguments that it does not take (MOE0750, MOE0751, MOE0752).

    Also a `ValueError` and a `TypeError`, as which Python's own functions raise such mistakes. Ranks do not agree on
    it: the rank that makes the call raises it.
    """


def wrong_argument(message: str, help: str) -> CallError:
    """The error for an argument that a function does not take."""
    return CallError("MOE0750", message, help)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_one_of(call: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `CallError` unless `value`, the argument `name` of `call`, is one of the words `allowed`."""
    from moec.grammar.suggest import nearest

    if isinstance(value, str) and value in allowed:
        return
    meant = nearest(value, allowed) if isinstance(value, str) else None
    *first_words, last_word = map(repr, allowed)
    listed = f"{', '.join(first_words)} or {last_word}"
    help = (
        f"did you mean `{name}={meant!r}`?" if meant else f"`{call}` takes one of these; leave it out for its default"
    )
    raise wrong_argument(f"{name} must be {listed}, not {value!r}", help)
