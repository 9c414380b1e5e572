"""Every code has a page, and every page is true: its wrong file renders as shown, its corrected file says nothing.

A page is `MOExxxx.md`: a title, why the rule is there and how to keep it, a wrong file, the exact output, and the
corrected file. Most files are checked by `check_file`. A code that needs another road (a later pass, another way
to save the file) has an entry in `CHECKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from moec.grammar import load_file, render
from moec.grammar.diagnostics import CODES, Diagnostic

FOLDER = Path(__file__).parent
PAGES = sorted(FOLDER.glob("MOE*.md"))

Check = Callable[[str, Path], Sequence[Diagnostic]]


def check_file(text: str, folder: Path) -> Sequence[Diagnostic]:
    """What the language says about `text`, saved as `example.moe` in `folder`."""
    return load_bytes(text.encode(), folder)


def load_bytes(data: bytes, folder: Path, **lets: str) -> Sequence[Diagnostic]:
    path = folder / "example.moe"
    path.write_bytes(data)
    return load_file(path, lets).diagnostics


def saved(convert: Callable[[str], bytes]) -> Check:
    """The file saved in another way than as plain UTF-8."""
    return lambda text, folder: load_bytes(convert(text), folder)


def missing(text: str, folder: Path) -> Sequence[Diagnostic]:
    return load_file(folder / "example.moe").diagnostics


def in_place_of_a_file(text: str, folder: Path) -> Sequence[Diagnostic]:
    (folder / "example.moe").mkdir()
    return load_file(folder / "example.moe").diagnostics


# How to come to the wrong file, by code; the corrected one is always checked as it stands, unless `EVERY` has it.
CHECKS: dict[str, Check] = {
    "MOE0001": missing,
    "MOE0002": in_place_of_a_file,
    "MOE0003": saved(lambda text: text.encode("latin-1")),
    "MOE0004": saved(lambda text: text.replace("␀", "\0").encode()),
    "MOE0005": saved(lambda text: text.encode("utf-8-sig")),
    "MOE0006": saved(lambda text: text.replace("\n", "\r\n").encode()),
    "MOE0008": saved(lambda text: text.encode() + b"#" * 4 * 1024**2),
}
# The same for the wrong and the corrected file: a later pass, or a command line.
EVERY: dict[str, Check] = {
    "MOE0213": lambda text, folder: load_bytes(text.encode(), folder, expert="8"),
}


@dataclass(frozen=True, slots=True)
class Page:
    """A page taken apart."""

    title: str
    wrong: str
    output: str
    corrected: str


_PAGE = re.compile(
    r"# (?P<title>[^\n]*)\n\n(?P<prose>.+?)\n\n```moe\n(?P<wrong>.*?)```\n\n"
    r"```text\n(?P<output>.*?)```\n\n## Corrected\n\n```moe\n(?P<corrected>.*?)```\n",
    re.DOTALL,
)


def read(path: Path) -> Page:
    match = _PAGE.fullmatch(path.read_text(encoding="utf-8"))
    assert match, f"{path.name} is not of the form of a page"
    return Page(match["title"], match["wrong"], match["output"], match["corrected"])


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert [path.stem for path in PAGES] == sorted(CODES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_shows_what_the_wrong_file_gives(path: Path, tmp_path: Path, update_golden: bool) -> None:
    page, code = read(path), path.stem
    check = CHECKS.get(code) or EVERY.get(code, check_file)
    diagnostics = check(page.wrong, tmp_path)
    output = render(diagnostics)
    assert code in {diagnostic.code for diagnostic in diagnostics}
    assert str(tmp_path) not in output
    if update_golden:
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"```text\n{page.output}```", f"```text\n{output}```"), encoding="utf-8")
    else:
        assert output == page.output


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_corrected_file_gives_no_diagnostic(path: Path, tmp_path: Path) -> None:
    page, code = read(path), path.stem
    assert page.title == f"{code}: {CODES[code]}"
    assert render(EVERY.get(code, check_file)(page.corrected, tmp_path)) == ""
