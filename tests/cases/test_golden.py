"""Golden Programs: the text of the Program of each `.moe` file here and of the examples (`--update-golden`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.driver import run_passes, to_spec
from moec.grammar.format import formatted
from moec.grammar.source import Source
from moec.open_words import stated
from moec.passes.ir.texts.text import print_program

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
BENCHMARKS = HERE.parents[1] / "benchmarks"
FILES = [*sorted(HERE.glob("*.moe")), *sorted(EXAMPLES.glob("*.moe"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_placed_program_is_the_one_on_record(file: Path, update_golden: bool):
    text = print_program(run_passes(stated(to_spec(file))).program)
    golden = HERE / ("examples" if file.parent == EXAMPLES else "") / f"{file.stem}.ir"
    if update_golden:
        golden.write_text(text)
    written = golden.read_text() if golden.exists() else ""
    assert text == written, "compare, and run pytest --update-golden if the change is meant"


@pytest.mark.parametrize("file", [*FILES, *sorted(BENCHMARKS.glob("*.moe"))], ids=lambda file: file.stem)
def test_our_own_files_are_laid_out_as_moec_fmt_does(file: Path):
    text = file.read_text()
    assert formatted(Source(file.name, text)) == text
