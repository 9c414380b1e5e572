"""Every link of a page leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

from support.tables import each_row

ROOT = Path(__file__).parents[3]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md", "tests/diagnostics/*.md")
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page: lower case, no punctuation, hyphens for spaces."""
    found = set[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = next(n for n in range(1000) if (f"{name}-{n}" if n else name) not in found)
        found.add(f"{name}-{number}" if number else name)
    return found


def dead(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Those to other hosts are not followed."""
    found = []
    for target in LINK.findall(INLINE.sub("", CODE.sub("", page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists():
            found.append(f"{page}: {target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            found.append(f"{page}: {target}: no such heading")
    return found


def test_every_link_leads_somewhere() -> None:
    found = pages()
    assert len(found) > 150
    assert [each for page in found for each in dead(page)] == []


@each_row(
    ("link", "complaint"),
    [
        ("[a](missing.md)", "no such file"),
        ("[a](#missing)", "no such heading"),
        ("[a](other.md#missing)", "no such heading"),
    ],
)
def test_a_dead_link_is_found(tmp_path: Path, link: str, complaint: str) -> None:
    (tmp_path / "other.md").write_text("# Other\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{link}\n", encoding="utf-8")
    (found,) = dead(page)
    assert complaint in found


def test_links_to_headings_are_named_as_on_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `fully_shard` (FSDP2)\n\n## Twice\n\n## Twice\n\n[a](#fully_shard-fsdp2) [b](#twice-1) `[c](none.md)`\n",
        encoding="utf-8",
    )
    assert dead(page) == []
