"""Tables of commands."""

from __future__ import annotations

from moec.commands.console.table import without_empty_columns


def test_a_column_with_one_filled_cell_stays_and_one_without_goes() -> None:
    rows = [["name", "first", "last", "none"], ["x", "1", "0", "-"], ["y", "-", "2", ""]]
    assert without_empty_columns(rows) == [("name", "first", "last"), ("x", "1", "0"), ("y", "-", "2")]
