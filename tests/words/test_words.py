"""The files beside this one use every word of the language, at odd sizes, and each plan equals the unsharded model."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest
from support.verified import require_equal
from words.uses import Use, known_uses, name_of, uses_of

from moec.grammar.spec.attention import Attention
from moec.grammar.spec.balance import Capacity, Loss
from moec.grammar.spec.experts import FeedForward, Mixture
from moec.grammar.spec.gates import Gate

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.moe"))
PAGE = HERE.parents[1] / "docs" / "internals" / "words.md"
ORACLES = sorted((HERE.parent / "oracles").glob("test_*.py"))
MARK = "<!-- generated -->\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_equals_the_unsharded_model(path: Path):
    require_equal(path, float32=False)


def test_every_word_is_in_a_file():
    assert sorted(set(known_uses()) - set(shown())) == []


def test_every_gate_attention_expert_capacity_and_balance_term_has_an_oracle():
    classes = [cls for kind in (Gate, Attention, FeedForward | Mixture, Capacity, Loss) for cls in get_args(kind)]
    named = {word for words in declared().values() for word in words}
    assert sorted({name_of(cls) for cls in classes if cls.implemented} - named) == []


def test_oracles_declare_words_that_there_are():
    uses = {(word, field) for word, field, _ in known_uses()}
    words = {(word, "") for word, _ in uses}
    said = {(word, field) for fields_of in declared().values() for word, names in fields_of.items() for field in names}
    assert sorted(said - uses - words) == []


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
    files, oracles, lines = shown(), declared(), ["", "| word | shown by | oracle |", "|---|---|---|"]
    for use in sorted(known_uses()):
        word, field, value = use
        name = f"`{word}`" if not field else f"`{word}`: `{field}`" + (f" = `{value}`" if value else "")
        compared = [oracle for oracle, words in oracles.items() if field in words.get(word, ())]
        lines.append(f"| {name} | {', '.join(files[use][:3])} | {', '.join(compared)} |")
    return "\n".join([*lines, ""])


def declared() -> dict[str, dict[str, set[str]]]:
    """By oracle: the words that its `ORACLE_OF` names, each with "" for itself and the fields that it compares too."""
    found = {}
    for path in ORACLES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORACLE_OF":
                words = ast.literal_eval(node.value)
                found[path.stem.removeprefix("test_")] = {word: {"", *names.split()} for word, names in words.items()}
    return found
