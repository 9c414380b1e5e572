"""The one place where each product of a layer's experts is run, so that `moec tune` can time it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Call = Callable[[], object]


class Copied(Protocol):
    """An operand of which products share a copy."""

    def forget(self) -> None:
        """Drops the copy: the next product makes it again."""


# Process-wide: `moec tune` calls forward and backward itself, in its own thread.
_timed: tuple[str, Callable[[Call], None]] | None = None


def run_product(kernel: str, call: Callable[[], Result], *operands: Copied) -> Result:
    """Runs one product, with all that its way launches around it.

    When it is timed, `call` runs several times: it must not write what it reads. Copies of `operands` are part of it.
    """
    if _timed is not None and _timed[0] == kernel:

        def afresh() -> None:
            for operand in operands:
                operand.forget()
            call()

        _timed[1](afresh)
    return call()


@contextmanager
def timed(kernel: str, clock: Callable[[Call], None]) -> Iterator[None]:
    """Until the block ends, `clock` gets each call of this product, to make as often as it likes."""
    global _timed
    outer, _timed = _timed, (kernel, clock)
    try:
        yield
    finally:
        _timed = outer
