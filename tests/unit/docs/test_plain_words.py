"""Phrases that were taken out stay out: no message, help text, heading or page has one of `BANNED`.

docs/internals/decisions is history, and not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.tables import each_row

ROOT = Path(__file__).parents[3]
SOURCES = ("grammar", "passes", "codegen", "runtime", "moec")
PAGES = (
    "README.md",
    "docs/*.md",
    "docs/internals/*.md",
    "docs/from/*.md",
    "docs/commands/*.md",
    "tests/diagnostics/*.md",
    "examples/*.md",
)
FILES = ("grammar/library/**/*.moe", "examples/*.moe")

BANNED = {
    r"\bfurthest\b": "write `largest difference`",
    r"\bevery other 1\b": "write which degrees are 1, or leave them out",
    r"\bfor information\b": "say what decides and what does not",
    r"\bnames? says? so\b": "a name says nothing: write what it shows",
    r"\banew\b": "write `again`, `from 0` or `from new values`",
    r"^serves$": "a heading names what the column has, such as `.moe line`",
    r"\bit serves\b": "an op belongs to a line of the file",
    r"\d G (?:parameters|active)\b|\d G$": "10^9 parameters are `B`; G is for FLOP and bytes",
    r"\b1 (?:layers|ranks|parameters|steps|tokens|experts|nodes|errors|tensors|shards)\b": "singular",
    r"\b(?:say|says) MOEC_|\bsay \{VARIABLE\}": "a variable is set, not said",
    r"\bis no (?:int64|torch|safetensors|model of|index of|file of|dict|list|whole|architecture)\b": "write `is not a`",
    r"\b(?:model|file|plan|checkpoint) has not\b": "write `does not have`",
    r"\blooks? at nothing\b": "write what is turned off",
    r"\b(?:wants a gradient|job\.\w+ wants)\b": "functions need or take, parameters have `requires_grad`",
    r"\bdoes not know of\b": "write what goes wrong",
    r"\b\w+ is a number (?:of \w+ )?(?:from|above)\b": "write `must be`, where a value was refused",
    r"\b(?:behavior|neighbor|quantized|honor|favor)\b": "the spelling is British",
}


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring, f-strings with `{}` for their values."""
    inner = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(part) for part in ast.walk(node) if part is not node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_part(value) for value in node.values)


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "{}"


def readable(path: Path) -> Iterator[tuple[int, str]]:
    """What a user may read of a file: the literals of Python, every line of others."""
    text = path.read_text(encoding="utf-8")
    return literals(ast.parse(text)) if path.suffix == ".py" else enumerate(text.splitlines(), 1)


def faults(path: Path) -> list[str]:
    found = []
    for line, text in readable(path):
        for pattern, reason in BANNED.items():
            if hit := re.search(pattern, text, re.MULTILINE):
                found.append(f"{path}:{line}: `{hit[0]}`: {reason}")
    return found


def every_file() -> list[Path]:
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return sources + [path for pattern in (*PAGES, *FILES) for path in ROOT.glob(pattern)]


def test_no_text_for_users_has_a_banned_phrase() -> None:
    files = every_file()
    assert len(files) > 400
    assert [fault for path in files for fault in faults(path)] == []


@each_row(
    ("name", "text"),
    [
        ("message.py", 'raise JobError("MOE0905", f"{path} is no safetensors file")'),
        ("split.py", 'help = ("move them away to begin "\n    "anew")'),
        ("heading.py", 'HEAD = ("op", "serves")'),
        ("page.md", "# A page\n\nThe column is 12.9 G active.\n"),
        ("number.py", 'message = f"{steps!r}: keep is a number of checkpoints from 1, not {steps}"'),
        ("one.py", 'line = "1 layers"'),
    ],
)
def test_a_planted_phrase_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert len(faults(path)) == 1


def test_comments_and_docstrings_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "inside.py"
    path.write_text('"""The furthest first."""\n\nFIRST = 1  # gathered anew\n', encoding="utf-8")
    assert faults(path) == []
