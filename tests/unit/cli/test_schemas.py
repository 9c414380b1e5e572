"""The JSON Schemas in docs/schemas are those of the documents that commands print."""

from __future__ import annotations

import json
from pathlib import Path

from support.tables import each_row

from moec.commands.schemas import DOCUMENTS, schema

FOLDER = Path(__file__).parents[3] / "docs" / "schemas"


@each_row("name", DOCUMENTS)
def test_the_schema_is_current(name: str, update_golden: bool) -> None:
    file = FOLDER / f"{name}.json"
    text = json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n"
    if update_golden:
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, "run the tests with --update-golden"


def test_there_is_no_schema_of_nothing() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(DOCUMENTS)
