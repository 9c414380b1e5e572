"""Every code has a page: its wrong file renders as shown, its corrected file has no diagnostics.

A page is `MOExxxx.md`: a title, the rule's reason and remedy, a wrong file, the exact output, and the
corrected file. `check_file` checks most files. A code that needs another check (a later pass, another encoding of the
file) has an entry in `CHECKS`. A diagnostic without a `.moe` file has an entry in `EVENTS`, and its page says what to
do instead of showing files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from page_events import EVENTS
from support.tables import each_row

from moec.driver import check as check_degrees
from moec.driver import compile as compile_source
from moec.grammar import load_file, render
from moec.grammar.diagnostics import CODES, Diagnostic, DiagnosticError, codes

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "diagnostics"
SOURCES = [ROOT / folder for folder in ("moec", "grammar", "passes", "codegen", "runtime")]
PAGES = sorted(FOLDER.glob("MOE*.md"))
FILE_PAGES = [path for path in PAGES if path.stem not in EVENTS]
EVENT_PAGES = [path for path in PAGES if path.stem in EVENTS]

Check = Callable[[str, Path], Sequence[Diagnostic]]


def check_file(text: str, folder: Path) -> Sequence[Diagnostic]:
    """The diagnostics of `text`, saved as `example.moe` in `folder`."""
    return load_bytes(text.encode(), folder)


def load_bytes(data: bytes, folder: Path, **lets: str) -> Sequence[Diagnostic]:
    path = folder / "example.moe"
    path.write_bytes(data)
    return load_file(path, lets).diagnostics


def saved(convert: Callable[[str], bytes]) -> Check:
    """Checks the file in another encoding than plain UTF-8."""
    return lambda text, folder: load_bytes(convert(text), folder)


def missing(text: str, folder: Path) -> Sequence[Diagnostic]:
    return load_file(folder / "example.moe").diagnostics


def in_place_of_a_file(text: str, folder: Path) -> Sequence[Diagnostic]:
    (folder / "example.moe").mkdir()
    return load_file(folder / "example.moe").diagnostics


def with_degrees(text: str, folder: Path) -> Sequence[Diagnostic]:
    """The diagnostics of `moec check`, which also runs the `place` pass for degrees."""
    path = folder / "example.moe"
    path.write_text(text, encoding="utf-8")
    return check_degrees(path)


def within_memory(text: str, folder: Path) -> Sequence[Diagnostic]:
    """The diagnostics of `moec compile`, whose last pass is the budget."""
    path = folder / "example.moe"
    path.write_text(text, encoding="utf-8")
    try:
        compile_source(path)
    except DiagnosticError as error:
        return error.diagnostics
    return ()


def chain_of_files(text: str, folder: Path) -> Sequence[Diagnostic]:
    for number in range(1, 41):
        (folder / f"part{number}.moe").write_text(f'use "part{number + 1}"\n')
    return load_bytes(text.encode(), folder)


# The check of the wrong file, by code; the corrected file is checked by `check_file`, unless `EVERY` has the code.
CHECKS: dict[str, Check] = {
    "MOE0001": missing,
    "MOE0002": in_place_of_a_file,
    "MOE0003": saved(lambda text: text.encode("latin-1")),
    "MOE0004": saved(lambda text: text.replace("␀", "\0").encode()),
    "MOE0005": saved(lambda text: text.encode("utf-8-sig")),
    "MOE0006": saved(lambda text: text.replace("\n", "\r\n").encode()),
    "MOE0404": chain_of_files,
    "MOE0008": saved(lambda text: text.encode() + b"#" * 4 * 1024**2),
}
# The same for the wrong and the corrected file: a later pass, or a command line.
EVERY: dict[str, Check] = {
    "MOE0213": lambda text, folder: load_bytes(text.encode(), folder, expert="8"),
    **dict.fromkeys(
        (
            *("MOE0202", "MOE0310", "MOE0311", "MOE0312", "MOE0313", "MOE0318", "MOE0319"),
            *("MOE0326", "MOE0327", "MOE0329", "MOE0330", "MOE0355"),
            *("MOE0376", "MOE0377", "MOE0378", "MOE0379", "MOE0380", "MOE0381"),
        ),
        with_degrees,
    ),
    "MOE0501": within_memory,
}


@dataclass(frozen=True, slots=True)
class Page:
    """A parsed page."""

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


def test_every_code_in_the_sources_is_registered_and_every_registered_code_is_used() -> None:
    registry = Path(str(codes.__file__)).resolve()
    texts = [p.read_text("utf-8") for folder in SOURCES for p in folder.rglob("*.py") if p.resolve() != registry]
    used = {code for text in texts for code in re.findall(r'"(MOE\d{4})"', text)}
    assert used == set(CODES)


@each_row("path", FILE_PAGES)
def test_page_shows_what_the_wrong_file_gives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    page, code = read(path), path.stem
    check = CHECKS.get(code) or EVERY.get(code, check_file)
    monkeypatch.chdir(new_folder(tmp_path, code))
    diagnostics = check(page.wrong, Path())
    output = render(diagnostics)
    assert code in {diagnostic.code for diagnostic in diagnostics}
    assert str(tmp_path) not in output
    assert_shown(path, page.output, output, update_golden)


@each_row("path", FILE_PAGES)
def test_corrected_file_gives_no_diagnostic(path: Path, tmp_path: Path) -> None:
    page, code = read(path), path.stem
    assert page.title == f"{code}: {CODES[code]}"
    assert render(EVERY.get(code, check_file)(page.corrected, new_folder(tmp_path, code))) == ""


_EVENT_PAGE = re.compile(
    r"# (?P<title>[^\n]*)\n\n(?P<prose>.+?)\n\n```text\n(?P<output>.*?)```\n\n## What to do\n\n(?P<advice>.+?)\n",
    re.DOTALL,
)


@each_row("path", EVENT_PAGES)
def test_page_shows_what_the_event_gives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    page, code = _EVENT_PAGE.fullmatch(path.read_text(encoding="utf-8")), path.stem
    assert page, f"{path.name} is not of the form of a page"
    monkeypatch.chdir(new_folder(tmp_path, code))
    diagnostics = EVENTS[code]()
    assert [diagnostic.code for diagnostic in diagnostics] == [code]
    assert page["title"] == f"{code}: {CODES[code]}"
    assert_shown(path, page["output"], render(diagnostics), update_golden)


def new_folder(tmp_path: Path, code: str) -> Path:
    folder = tmp_path / code
    folder.mkdir()
    return folder


def assert_shown(path: Path, shown: str, output: str, update_golden: bool) -> None:
    """Compares the page's output with `output`, or updates it."""
    if update_golden:
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"```text\n{shown}```", f"```text\n{output}```"), encoding="utf-8")
    else:
        assert shown == output
