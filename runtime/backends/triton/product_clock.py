"""The one place where each product of a layer's experts is run, so that `moec tune` can time it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Call = Callable[[], None]

# Process-wide: `moec tune` calls forward and backward itself, in its own thread.
_timed: tuple[str, Callable[[Call], None]] | None = None


def run_product(kernel: str, call: Call) -> None:
    """Runs one product, with all that its way launches around it.

    `call` may run several times: it must not write what it reads.
    """
    if _timed is not None and _timed[0] == kernel:
        _timed[1](call)
    else:
        call()


@contextmanager
def timed(kernel: str, clock: Callable[[Call], None]) -> Iterator[None]:
    """Until the block ends, `clock` gets each call of this product, and must make it at least once."""
    global _timed
    outer, _timed = _timed, (kernel, clock)
    try:
        yield
    finally:
        _timed = outer
