"""`support.tables.each_row`: no row is left out, and every one that fails is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tables import each_row


def test_every_row_is_tried_with_the_fixtures_and_all_that_fail_are_raised_with_their_rows(tmp_path: Path) -> None:
    tried = []

    @each_row("wrong, raises", [(1, ValueError), (2, None), (3, AssertionError)])
    @each_row("inner", "ab")
    def test(tmp_path: Path, wrong: int, raises: type[Exception] | None, inner: str) -> None:
        tried.append((tmp_path, wrong, inner))
        if raises is not None and inner == "b":
            raise raises

    with pytest.raises(BaseExceptionGroup, match="2 of 3 rows") as raised:
        test(tmp_path=tmp_path)
    assert tried == [(tmp_path, wrong, inner) for wrong in (1, 2, 3) for inner in "ab"]
    assert [type(error) for error in raised.value.exceptions] == [ValueError, AssertionError]
    inner, outer = raised.value.exceptions[0].__notes__
    assert inner == "of the row {'inner': 'b'}"
    assert outer.startswith("of the row {'wrong': 1, ")


def test_a_row_that_raises_nothing_where_it_must_fails_alone() -> None:
    @each_row("text", ["x", "1"])
    def test(text: str) -> None:
        with pytest.raises(ValueError, match="invalid"):
            int(text)

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as raised:
        test()
    assert raised.value.__notes__ == ["of the row {'text': '1'}"]


def test_a_row_that_skips_hides_no_row_that_fails() -> None:
    @each_row("number", [1, 2])
    def test(number: int) -> None:
        if number == 2:
            pytest.skip("later")
        raise ValueError

    with pytest.raises(BaseExceptionGroup, match="2 of 2 rows"):
        test()


def test_a_claim_that_yields_or_returns_is_no_test() -> None:
    @each_row("number", [1])
    def test(number: int) -> object:
        return number > 0

    with pytest.raises(AssertionError, match="returns nothing"):
        test()


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="proves nothing"):
        each_row("text", [])
