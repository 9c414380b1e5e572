"""The result of running a command in a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ran:
    """The exit code and output of a command."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
