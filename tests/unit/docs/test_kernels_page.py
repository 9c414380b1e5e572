"""docs/kernels.md: its tables are the model's, and the model is as near to published figures as it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from support.kernel_tables import ANCHORS, Anchor, anchor_table, layer_tables
from support.tables import each_row

FILE = Path(__file__).parents[3] / "docs" / "kernels.md"


@each_row(("section", "lines"), [("anchors", anchor_table), ("layers", layer_tables)])
def test_the_tables_are_those_of_the_model(
    section: str, lines: Callable[[], Iterable[str]], update_golden: bool
) -> None:
    page = FILE.read_text(encoding="utf-8")
    found = re.search(rf"(<!-- {section}: [^\n]*-->\n)(.*?)(<!-- end of {section} -->\n)", page, re.DOTALL)
    assert found is not None
    expected = "".join(f"{line}\n" for line in lines())
    if update_golden:
        FILE.write_text(page[: found.start(2)] + expected + page[found.end(2) :], encoding="utf-8")
    else:
        assert found[2] == expected, "the tile rule or the model changed: --update-golden, and read the diff"


@each_row("anchor", ANCHORS)
def test_forward_is_within_a_factor_of_1_6_of_what_is_published(anchor: Anchor) -> None:
    forward, backward = anchor.ratios()
    assert 1 / 1.6 < forward < 1.6
    if backward is not None:
        assert 1 / 1.6 < backward < 2.0


def test_published_rates_are_predicted_in_their_order() -> None:
    """Where two published rates of forward differ by more than 1.5 times, the model has them in the same order."""
    found = [(each.published[0], each.predicted().tflops("forward")) for each in ANCHORS]
    wrong = [(a, b) for a in found for b in found if a[0] > 1.5 * b[0] and a[1] < b[1]]
    assert wrong == []
