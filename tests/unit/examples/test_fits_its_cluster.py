"""Every file that a reader copies fits the cluster that it claims: examples, whole files in docs, starters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moec.driver import compile as compile_source
from moec.grammar.load import load_text
from moec.passes.cost.memory import memory_of

ROOT = Path(__file__).parents[3]
EXAMPLES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "examples").rglob("*.moe"))}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def whole_files() -> dict[str, str]:
    """The blocks of docs that are a file with a subject and a cluster, by page and number."""
    found = {}
    for page in PAGES:
        for number, text in enumerate(re.findall(r"```moe\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if re.search(r'^(model|layer) "', text, re.MULTILINE) and re.search(
                r'^(cluster "|use ")', text, re.MULTILINE
            ):
                found[f"{page.relative_to(ROOT)}, block {number}"] = text
    return found


FILES = whole_files()


def require_fits(source: Path | str) -> None:
    plan = compile_source(source)
    if plan.spec.has_model:
        assert plan.spec.train is not None, "without `train` nothing says what a step is"
    peak = memory_of(plan.program, plan.spec).peak.bytes.total
    assert 0 < peak <= plan.spec.cluster.device.memory


def test_there_are_files_to_check() -> None:
    assert {"examples/mixtral_8x7b.moe", "examples/folded.moe"} <= EXAMPLES.keys()
    assert any(name.startswith("docs/language.md") for name in FILES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_its_cluster(name: str) -> None:
    require_fits(EXAMPLES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_of_the_docs_fits_its_cluster(name: str) -> None:
    if load_text(FILES[name]).spec is None:
        pytest.skip("it uses files beside it, or shows only a part")
    require_fits(FILES[name])
