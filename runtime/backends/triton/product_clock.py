"""The one place where each product of a layer's experts is run, so that `moec tune` can time it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Call = Callable[[], object]


class SharesCopy(Protocol):
    """An operand whose copy products share."""

    def drop_copy(self) -> None:
        """Drops the copy: the next product makes it again."""


# Process-wide: `moec tune` calls forward and backward itself, in its own thread.
_timed: tuple[str, Callable[[Call], None]] | None = None


def run_product(kernel: str, call: Callable[[], Result], *operands: SharesCopy) -> Result:
    """Runs one product, with the passes that its way launches around it.

    A timed product runs several times: `call` must not overwrite its inputs. Its time includes copies of `operands`.
    """
    if _timed is not None and _timed[0] == kernel:

        def call_without_copies() -> None:
            for operand in operands:
                operand.drop_copy()
            call()

        _timed[1](call_without_copies)
    return call()


@contextmanager
def timed(kernel: str, clock: Callable[[Call], None]) -> Iterator[None]:
    """Inside the block, each call of this product is passed to `clock`, which may call it several times."""
    global _timed
    outer, _timed = _timed, (kernel, clock)
    try:
        yield
    finally:
        _timed = outer
