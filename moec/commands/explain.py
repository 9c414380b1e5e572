"""`moec explain`: the page of a code, of a word of the language, of a file of the library, or of another system's
word."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from moec.commands.console.output import document, emit
from moec.commands.console.terminal import PIPE_WIDTH, colored, known_columns
from moec.grammar.diagnostics import CODES, DiagnosticError, diagnose

if TYPE_CHECKING:
    from moec.grammar.foreign.lookup import Alias, Meaning

CODE = re.compile(r"(?:MOE)?0*(\d{1,4})", re.IGNORECASE)


@document
class Explanation:
    """A page of Markdown on `subject`. `asked` differs from it where the nearest word is shown."""

    asked: str
    subject: str
    """The code, word or file that the page is of."""
    kind: Literal["code", "word", "word of another system", "file of the library"]
    markdown: str


def run(word: str, style: str) -> None:
    """Prints the page: rendered for a terminal or a stated width, else as Markdown. Raises MOE0015."""
    page = explain(word)
    if page.kind != "code" and style != "json" and _plain(page.subject) != _plain(word):
        print(f"there is no word `{word}`; this is the page of `{page.subject}`", file=sys.stderr)
    emit(style, lambda: [_shown(page.markdown).rstrip("\n")], lambda: page)


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def _shown(markdown: str) -> str:
    width, has_colors = known_columns(sys.stdout), colored(sys.stdout)
    if width is None and not has_colors:
        return markdown
    from moec.commands.console.markdown import rendered

    return rendered(markdown, width or PIPE_WIDTH, colors=has_colors)


def explain(word: str) -> Explanation:
    """The page of a code (`MOE0311`, `moe311`, `311`), of a word, or of the only word that `word` misspells.

    A name that only resembles another has no page: it may be another system's option with other values. Raises
    `DiagnosticError` for anything else.
    """
    if (number := CODE.fullmatch(word)) and (code := f"MOE{int(number[1]):04d}") in CODES:
        page = (files("moec.pages") / f"{code}.md").read_text(encoding="utf-8")
        return Explanation(asked=word, subject=code, kind="code", markdown=page)
    return _explain_word(word)


def _explain_word(word: str) -> Explanation:
    from moec.grammar.foreign.lookup import aliases, elsewhere, near, synonym
    from moec.grammar.suggest import meant, nearest
    from moec.grammar.words_in_words import page, words

    known = words()
    alias = elsewhere(word)
    written = word if word in known else _plain(word)  # `--weight-decay` is `weight_decay`
    leads_here = not word.startswith("-") or (alias is not None and alias.heads)  # a flag is another system's
    if written in known and leads_here:
        text = page(written) + (f"\n# `{written}` in other systems\n\n{_meanings(alias)}" if alias else "")
        return Explanation(asked=word, subject=written, kind="word", markdown=text)
    if (file := _explain_library_file(word, written)) is not None:
        return file
    if alias is not None:
        pages = [f"# `{alias.word}`\n\n{_meanings(alias)}"]
        places = dict.fromkeys((meaning.name, meaning.path[-2]) for meaning in alias.meanings if meaning.name in known)
        pages += [page(name, inside=inside) for name, inside in places]
        return Explanation(asked=word, subject=alias.word, kind="word of another system", markdown="\n".join(pages))
    if (help := near(word)) is not None:
        text = f"# `{word}`\n\nA value of other systems: {help}.\n"
        return Explanation(asked=word, subject=word, kind="word of another system", markdown=text)
    synonym_word = synonym(word) or meant(word, known)
    if synonym_word is None and (aliased := meant(_plain(word), aliases())):
        return _explain_word(aliased)
    if synonym_word is not None and synonym_word in known:
        return Explanation(asked=word, subject=synonym_word, kind="word", markdown=page(synonym_word))
    similar = (nearest(word.upper(), CODES) or nearest(word, known)) if word else None
    advice = f"did you mean `{similar}`? " if similar else ""
    example = "a word of the language (topk, kv_heads), or of Hugging Face, Megatron or DeepSpeed (hidden_size)"
    places_to_look = "docs/language.md lists all words, and docs/training.md has the calls of a script"
    help = f"{advice}give the code of a diagnostic (MOE0311), {example}; {places_to_look}"
    raise DiagnosticError([diagnose("MOE0015", None, f"`{word}`", help=help)])


def _meanings(alias: Alias) -> str:
    """A paragraph for each set of systems in which the name has one meaning, with the source."""
    from moec.grammar.foreign.row import SYSTEMS

    parts = []
    for meaning in alias.meanings:
        read = [f"{SYSTEMS[key].read_at}, {place}" for key, place in meaning.read.items() if place]
        source = f" Read in {'; '.join(read)}." if read else ""
        sentence = f"A word of {meaning.named}: {meaning.said()}.{source}\n"
        parts.append(_cases(meaning, source) if meaning.row.cases else sentence)
    return "\n".join(parts)


def _cases(meaning: Meaning, source: str) -> str:
    """A list of the other system's settings with the equal form of each."""
    forms = [(meaning.row.when or "by default", meaning.written()), *meaning.cases()]
    introduction = "There is no equal. Nearest is" if meaning.row.differs else "Here it is"
    notes = [f"{text[:1].upper()}{text[1:]}." for text in (meaning.row.differs, meaning.row.note) if text]
    note = " ".join(notes).replace("{}", meaning.row.example)
    lines = "".join(f"- {condition}: `{form}`\n" for condition, form in forms)
    return f"A word of {meaning.named}. {introduction}, in {meaning.block}:\n\n{lines}\n{f'{note}{source}'.lstrip()}\n"


USES = {
    "devices": "A device of the library: `device = {}` in a `cluster` block.",
    "clusters": 'A cluster of the library: `use "clusters/{0}"`. Your own block changes it: `from = {0}; nodes = 2`.',
    "models": 'A model of the library: `use "models/{0}"`. `moec init --from {0}` writes a whole file.',
}
"""The use of the files in each folder of the library. The braces stand for a file's name."""


def _explain_library_file(word: str, name: str) -> Explanation | None:
    """The text of the library's file of that name, and an example of its use."""
    from moec.grammar.resolve.library import library_names, library_text

    for folder, use in USES.items():
        if name in library_names(folder):
            text = f"# `{name}`\n\n{use.format(name)}\n\n```moe\n{library_text(f'{folder}/{name}')}```\n"
            return Explanation(asked=word, subject=name, kind="file of the library", markdown=text)
    return None
