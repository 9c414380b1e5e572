"""docs/models.md: its table has the library's models with their counts, and its file is good."""

from __future__ import annotations

import re
from pathlib import Path

from support.published_counts import PUBLISHED, Published, counts_of

from moec.commands.library import title
from moec.driver import run_passes, to_spec
from moec.grammar.resolve.library import library_names
from moec.passes.cost.parameter_counts import count_parameters

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
MARK = "<!-- generated -->\n"
HEAD = """\
| `use "models/…"` | model | parameters | of a token | notation | published | source | published counts are |
| --- | --- | --: | --: | --- | --- | --- | --- |
"""


def row(name: str) -> str:
    counts = counts_of(name)
    published = PUBLISHED.get(name) or Published(total="", source="")
    both = " and ".join(filter(None, (published.total, published.active and f"{published.active} active")))
    cells = [f"`{name}`", title(name), f"{counts.whole.total:,}", f"{counts.whole.active:,}", counts.notation]
    return f"| {' | '.join([*cells, both, published.source, published.note])} |"


def table() -> str:
    return HEAD + "".join(f"{row(name)}\n" for name in library_names("models"))


def test_the_table_is_current(update_golden: bool) -> None:
    written, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    generated, end, left_out = rest.partition("\n## ")
    assert (mark, bool(end)) == (MARK, True)
    if update_golden:
        PAGE.write_text(f"{written}{MARK}\n{table()}{end}{left_out}", encoding="utf-8")
    else:
        assert generated == f"\n{table()}", "run the tests with --update-golden"


def test_its_file_and_notation_are_good() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (file,) = re.findall(r"```moe\n(.*?)```", text, re.DOTALL)
    spec = to_spec(file)
    assert count_parameters(run_passes(spec).program, spec).whole.per_rank < counts_of("qwen3_30b_a3b").whole.total
    assert counts_of("deepseek_v3").notation == "671B-37.6B-256E-8K-1S"
    assert f"`{counts_of('deepseek_v3').notation}`" in text


def test_no_model_that_is_left_out_is_there() -> None:
    left_out = re.findall(r"^- \*\*(.*?)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert left_out
    titles = {title(name).lower() for name in library_names("models")}
    assert not titles & {name.lower() for name in left_out}
