"""The files beside this one use every word of the language, at odd sizes, and each plan equals the unsharded model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from words.uses import Use, known_uses, uses_of

from moec.driver import compile as compile_file
from moec.runtime.verify.verification import verify

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.moe"))
PAGE = HERE.parents[1] / "docs" / "words.md"
ORACLES = sorted((HERE.parent / "oracles").glob("test_*.py"))
MARK = "<!-- generated -->\n"

ELSEWHERE: dict[Use, str] = {}
"""Words that no plan on a virtual cluster can show, and the test that does."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_equals_the_unsharded_model(path: Path):
    report = verify(compile_file(path), float32=False)
    assert report.ok, report


def test_every_word_is_in_a_file():
    assert sorted(set(known_uses()) - set(shown()) - set(ELSEWHERE)) == []


def test_the_page_of_words_is_current(update_golden: bool):
    written, mark, generated = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    if update_golden:
        PAGE.write_text(f"{written}{MARK}{page()}", encoding="utf-8")
    else:
        assert generated == page(), "run the tests with --update-golden"


def shown() -> dict[Use, list[str]]:
    """The files that use each word."""
    found: dict[Use, list[str]] = {}
    for path in FILES:
        for use in uses_of(path):
            found.setdefault(use, []).append(path.stem)
    return found


def page() -> str:
    files, lines = shown(), ["", "| word | shown by | oracle |", "|---|---|---|"]
    texts = {path.stem.removeprefix("test_"): path.read_text(encoding="utf-8") for path in ORACLES}
    for use in sorted(known_uses()):
        word, field, value = use
        name = f"`{word}`" if not field else f"`{word}`: `{field}`" + (f" = `{value}`" if value else "")
        by = ", ".join(files.get(use, [])[:3]) or ELSEWHERE.get(use, "")
        lines.append(f"| {name} | {by} | {', '.join(_oracles(use, texts)[:2])} |")
    return "\n".join([*lines, ""])


def _oracles(use: Use, texts: dict[str, str]) -> list[str]:
    """The oracles whose text writes the word: a call by its name, an option with its value."""
    word, field, value = use
    name = word.split(" ")[0]
    pattern = rf"\b{field}\s*=\s*{value}" if field else rf"\b{name}\b\s*[({{]|[= ]{name}\b"
    return [stem for stem, text in texts.items() if re.search(pattern, text) and (not field or name_in(name, text))]


def name_in(name: str, text: str) -> bool:
    """Whether the text writes the word; names of bases stand for several words, so every text does."""
    return name in ("attention", "feedforward") or re.search(rf"\b{name}\b", text) is not None
