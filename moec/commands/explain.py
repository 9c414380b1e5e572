"""`moec explain`: the page of a code, of a word of the language or of a file of the library, or what another system's
word is here."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from typing import Literal

from moec.commands.output import document, emit
from moec.commands.terminal import PIPE_WIDTH, colored, known_columns
from moec.grammar.diagnostics import CODES, DiagnosticError, diagnose

CODE = re.compile(r"(?:MOE)?0*(\d{1,4})", re.IGNORECASE)


@document
class Explanation:
    """A page of Markdown on `subject`. `asked` differs from it where the nearest word is shown."""

    asked: str
    subject: str
    """The code, word or file that the page is of."""
    kind: Literal["code", "word", "word of another system", "file of the library"]
    markdown: str


def run(asked: str, style: str) -> None:
    """Prints the page: rendered for a terminal or a stated width, else as Markdown. Raises MOE0015."""
    found = explain(asked)
    if found.kind != "code" and style != "json" and _plain(found.subject) != _plain(asked):
        print(f"there is no word `{asked}`; this is the page of `{found.subject}`", file=sys.stderr)
    emit(style, lambda: [_shown(found.markdown).rstrip("\n")], lambda: found)


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def _shown(markdown: str) -> str:
    width, has_colors = known_columns(sys.stdout), colored(sys.stdout)
    if width is None and not has_colors:
        return markdown
    from moec.commands.inline_markdown import without_colors
    from moec.commands.markdown import rendered

    page = rendered(markdown, width or PIPE_WIDTH)
    return page if has_colors else without_colors(page)


def explain(asked: str) -> Explanation:
    """The page of a code (`MOE0311`, `moe311`, `311`), of a word, or of the only word that is near.

    Raises `DiagnosticError` for anything else.
    """
    if (number := CODE.fullmatch(asked)) and (code := f"MOE{int(number[1]):04d}") in CODES:
        page = (files("moec.pages") / f"{code}.md").read_text(encoding="utf-8")
        return Explanation(asked=asked, subject=code, kind="code", markdown=page)
    return _of_word(asked)


def _of_word(asked: str) -> Explanation:
    from moec.grammar.aliases import alias, aliases, synonym
    from moec.grammar.suggest import nearest
    from moec.grammar.words_in_words import page, words

    known = words()
    written = asked if asked in known else _plain(asked)  # `--weight-decay` is `weight_decay`
    if written in known:
        return Explanation(asked=asked, subject=written, kind="word", markdown=page(written))
    if (file := _of_library(asked, written)) is not None:
        return file
    other = alias(asked)
    if other is not None:
        text = f"# `{other.word}`\n\nA word of {_listed(other.systems)}: {other.said()}.\n"
        pages = [text, page(other.name, inside=other.path[-2])] if other.name in known else [text]
        return Explanation(asked=asked, subject=other.word, kind="word of another system", markdown="\n".join(pages))
    near = synonym(asked) or nearest(asked, known)
    if near is None and (there := nearest(_plain(asked), aliases())):
        return _of_word(there)
    if near is not None and near in known:
        return Explanation(asked=asked, subject=near, kind="word", markdown=page(near))
    code = nearest(asked.upper(), CODES) if asked else None
    advice = f"did you mean `{code}`? " if code else ""
    example = "a word of the language (topk, kv_heads), or of Hugging Face, Megatron or DeepSpeed (hidden_size)"
    places = "docs/language.md lists all words, and docs/training.md has the calls of a script"
    help = f"{advice}give the code of a diagnostic (MOE0311), {example}; {places}"
    raise DiagnosticError([diagnose("MOE0015", None, f"`{asked}`", help=help)])


USES = {
    "devices": "A device of the library: `device = {}` in a `cluster` block.",
    "clusters": 'A cluster of the library: `use "clusters/{0}"`. Your own block changes it: `from = {0}; nodes = 2`.',
    "models": 'A model of the library: `use "models/{0}"`. `moec init --from {0}` writes a whole file.',
}
"""What the files of each folder are for; the name goes into the braces."""


def _of_library(asked: str, name: str) -> Explanation | None:
    """The text of the file of that name, and how a file uses it."""
    from moec.grammar.resolve.library import library_names, library_text

    for folder, use in USES.items():
        if name in library_names(folder):
            text = f"# `{name}`\n\n{use.format(name)}\n\n```moe\n{library_text(f'{folder}/{name}')}```\n"
            return Explanation(asked=asked, subject=name, kind="file of the library", markdown=text)
    return None


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
