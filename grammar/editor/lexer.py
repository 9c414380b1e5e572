"""The Pygments lexer, which documentation tools find by its entry point."""

from __future__ import annotations

from pygments.lexer import RegexLexer
from pygments.token import string_to_tokentype

from moec.grammar.editor.token_table import table


class MoeLexer(RegexLexer):  # type: ignore[misc]
    """Colours `.moe` files."""

    name = "moe"
    aliases = ("moe",)
    filenames = ("*.moe",)
    url = ""
    tokens = {"root": [(token.pattern, string_to_tokentype(token.pygments)) for token in table()]}  # noqa: RUF012
