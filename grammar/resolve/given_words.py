"""Words of `parallel` that a command line gives: `ep = 8, pp = 4`."""

from __future__ import annotations

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import DiagnosticError
from moec.grammar.resolve.blocks import read_block
from moec.grammar.resolve.parts import build
from moec.grammar.resolve.scope import Broken, Scope
from moec.grammar.source import Source, Span
from moec.grammar.spec import Parallel
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Assignment, Block, Name


def given_words(option: str, text: str) -> dict[str, object]:
    """The values of the words of `parallel` in `text`, the value of the command line's `option`.

    Raises `DiagnosticError` for what could not stand in `parallel`, and for blocks.
    """
    source = Source(option, _with_separators(text))
    whole = Span(source, 0, len(source.text))
    tree, diagnostics = parse(source)
    if diagnostics or tree is None:
        raise DiagnosticError(diagnostics)
    if not tree.body or not all(isinstance(statement, Assignment) for statement in tree.body):
        help = "such as 'ep = 8, pp = 4'"
        raise DiagnosticError([diagnose("MOE0101", whole, "expected words of `parallel` and their values", help=help)])
    scope = Scope()
    kind = Name(Parallel.word, whole)
    part = read_block(scope, Parallel, Block(kind, None, None, tree.body, whole))
    parallel = build(scope, part) if part is not None else None
    if scope.diagnostics or part is None or parallel is None or isinstance(parallel, Broken):
        raise DiagnosticError(scope.diagnostics)
    return {word: getattr(parallel, word) for word in part.stated}


def _with_separators(text: str) -> str:
    """`text` with `;` for the commas outside of brackets."""
    depth, characters = 0, list[str]()
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        characters.append(";" if character == "," and depth == 0 else character)
    return "".join(characters)
