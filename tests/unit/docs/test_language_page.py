"""docs/language.md: its tables are generated from the schema, and its files are valid."""

from __future__ import annotations

import re
from pathlib import Path

from moec.driver import to_spec
from moec.grammar import load_text
from moec.grammar.checking.supported import unsupported
from moec.grammar.schema_in_words import markdown
from moec.passes.pipeline import compile_program

PAGE = Path(__file__).parents[3] / "docs" / "language.md"
MARK = "<!-- generated -->\n"
MODEL = 'model "m" {{ vocab = 8; dim = 64; depth = 24; context = 8\n{}}}\n'
TRAIN = "train { batch = 1; sequence = 8 }"


def test_the_tables_are_current(update_golden: bool) -> None:
    written, mark, generated = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    if update_golden:
        PAGE.write_text(f"{written}{MARK}\n{markdown()}", encoding="utf-8")
    else:
        assert generated == f"\n{markdown()}", "run the tests with --update-golden"


def test_the_examples_are_good() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    whole, layers, cluster, attentions = re.findall(r"```moe\n(.*?)```", written, re.DOTALL)
    assert unsupported(load_text(whole).unwrap()) == []
    assert compile_program(to_spec(MODEL.format(attentions) + TRAIN)).program.layer_blocks == {
        "layers[0..11]",
        "layers[12..23]",
    }
    assert load_text(f"{MODEL.format(layers)}\n{cluster}").unwrap().cluster.is_calibrated
    assert load_text(MODEL.format(layers)).unwrap().model.layers[21].moe.num_experts == 64
