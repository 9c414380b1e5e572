"""One test for all rows of a table, where a row takes less time than a test of its own would."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but one test, which tries every row and raises what fails, with its row.

    The rows share the test's fixtures: none may depend on what an earlier one leaves in `tmp_path`, for example.
    """
    listed = list(table)
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    assert listed, "a table without rows proves nothing"

    def decorate(claim: Test) -> Test:
        @functools.wraps(claim)
        def test(**fixtures: Any) -> None:
            failed = list[BaseException]()
            for row in listed:
                values = dict(zip(arguments, [row] if len(arguments) == 1 else row, strict=True))
                try:
                    assert claim(**fixtures, **values) is None, "a test returns nothing, and does not yield"
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - raised below
                    error.add_note(f"of the row {values!s:.500}")
                    failed.append(error)
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(listed)} rows", failed)

        signature = inspect.signature(claim)
        left = [each for name, each in signature.parameters.items() if name not in arguments]
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # what pytest reads
        return test

    return decorate
