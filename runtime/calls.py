"""Calls from scripts: a call that does not fit a function's signature raises a diagnostic with the signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from moec.runtime.errors import CallError
from moec.runtime.uncaught import show_uncaught

P = ParamSpec("P")
R = TypeVar("R")


def called(name: str, **hints: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that scripts call as `name`: a call that does not fit its signature raises `CallError`.

    `hints`: what to do, by the name of an argument that is missing or that the function does not have. An uncaught
    diagnostic shows the script's line (`moec.runtime.uncaught`). A call that fits costs nothing.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            show_uncaught()
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if isinstance(error, CallError):
                    raise
                from moec.runtime.call_complaints import complaint  # with `inspect`, which no right call needs

                call_error = complaint(function, name, args, kwargs, hints)
                if call_error is None:
                    raise
                raise call_error from None

        return call

    return decorate
