"""Words of `parallel` that a command line gives: `ep = 8, pp = 4`."""

from __future__ import annotations

from collections.abc import Iterable

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, DiagnosticError
from moec.grammar.resolve.blocks import read_block
from moec.grammar.resolve.parts import build
from moec.grammar.resolve.scope import Broken, Scope
from moec.grammar.source import Source, Span
from moec.grammar.spec import Parallel
from moec.grammar.stated import GivenWords
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Assignment, Block, Name


def given_words(option: str, text: str) -> GivenWords:
    """The words of `parallel` in `text`, the value of the command line's `option`.

    Raises `DiagnosticError` for what could not stand in `parallel`, and for blocks.
    """
    argument, source = Source(option, text), Source(option, _with_separators(text))
    whole = Span(source, 0, len(text))
    tree, diagnostics = parse(source)
    if diagnostics or tree is None:
        raise _error(diagnostics, argument)
    if not tree.body or not all(isinstance(statement, Assignment) for statement in tree.body):
        help = "such as 'ep = 8, pp = 4'"
        problem = diagnose("MOE0101", whole, "expected words of `parallel` and their values", help=help)
        raise _error([problem], argument)
    scope = Scope()
    kind = Name(Parallel.word, whole)
    part = read_block(scope, Parallel, Block(kind, None, None, tree.body, whole))
    parallel = build(scope, part) if part is not None else None
    if scope.diagnostics or part is None or parallel is None or isinstance(parallel, Broken):
        raise _error(scope.diagnostics, argument)
    values = {word: getattr(parallel, word) for word in part.stated}
    spans = {word: stated.span._replace(source=argument) for word, stated in part.stated.items()}
    return GivenWords(values, spans, whole._replace(source=argument))


def _error(diagnostics: Iterable[Diagnostic], argument: Source) -> DiagnosticError:
    """The diagnostics at the same places of the argument, which has commas where the text that was parsed has `;`."""
    placed = []
    for diagnostic in diagnostics:
        labels = tuple(label._replace(span=label.span._replace(source=argument)) for label in diagnostic.labels)
        span = diagnostic.span and diagnostic.span._replace(source=argument)
        placed.append(diagnostic._replace(span=span, labels=labels, fix=()))
    return DiagnosticError(placed)


def _with_separators(text: str) -> str:
    """`text` with `;` for the commas outside of brackets."""
    depth, characters = 0, list[str]()
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        characters.append(";" if character == "," and depth == 0 else character)
    return "".join(characters)
