"""Writes `moe.tmLanguage.json`: `python -m moec.grammar.editor.textmate`, after every change of the vocabulary.

Editors that read TextMate grammars (VS Code, Sublime Text, JetBrains, GitHub) colour `.moe` files with it.
"""

from __future__ import annotations

import json
from pathlib import Path

from moec.grammar.editor.token_table import table

FILE = Path(__file__).with_name("moe.tmLanguage.json")


def textmate() -> str:
    """The text of the grammar file."""
    patterns = [{"name": f"{token.textmate}.moe", "match": token.pattern} for token in table() if token.textmate]
    grammar = {"name": "moe", "scopeName": "source.moe", "fileTypes": ["moe"], "patterns": patterns}
    return json.dumps(grammar, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(textmate(), encoding="utf-8")
