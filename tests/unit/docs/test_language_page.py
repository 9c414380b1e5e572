"""docs/language.md: its tables are the schema's, and its files are good."""

from __future__ import annotations

import re
from pathlib import Path

from moec.grammar import load_text
from moec.grammar.reference import markdown
from moec.grammar.supported import unsupported

PAGE = Path(__file__).parents[3] / "docs" / "language.md"
MARK = "<!-- generated -->\n"
MODEL = 'model "m" {{ vocab = 8; dim = 64; depth = 24; context = 8\n{}}}\n'


def test_the_tables_are_current(update_golden: bool) -> None:
    written, mark, generated = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    if update_golden:
        PAGE.write_text(f"{written}{MARK}\n{markdown()}", encoding="utf-8")
    else:
        assert generated == f"\n{markdown()}", "run the tests with --update-golden"


def test_the_examples_are_good() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    whole, layers = re.findall(r"```moe\n(.*?)```", written, re.DOTALL)
    assert unsupported(load_text(whole).unwrap()) == []
    assert load_text(MODEL.format(layers)).unwrap().model.layers[21].moe.num_experts == 64
