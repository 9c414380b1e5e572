"""Blocks: the statements between braces, against the fields that their model has."""

from __future__ import annotations

from moec.grammar.diagnostics.diagnostic import Edit, Label
from moec.grammar.resolve.part_rules import one_slot
from moec.grammar.resolve.parts import Part, Stated, report_twice
from moec.grammar.resolve.scope import BROKEN, Scope
from moec.grammar.resolve.values import resolve
from moec.grammar.schema import CallKind, fields
from moec.grammar.source import Span
from moec.grammar.spec import Layer
from moec.grammar.spec.base import Node
from moec.grammar.syntax.tree import Assignment, Bad, Block, Let, Name, Number, Use


def read_block(scope: Scope, cls: type[Node], block: Block) -> Part | None:
    """Reads the fields of `cls` from `block`; None where a required label is missing."""
    if not _head_is_right(scope, cls, block):
        return None
    reader = _Reader(scope, cls, block)
    for statement in block.body:
        match statement:
            case Assignment():
                reader.assignment(statement)
            case Block():
                reader.block(statement)
            case Bad():
                reader.incomplete = True
            case Use() | Let():
                word = "use" if isinstance(statement, Use) else "let"
                scope.error("MOE0211", statement.span, f"`{word}` is outside of all blocks")
    part = reader.part(block)
    for diagnostic in one_slot(part):
        scope.diagnostics.append(diagnostic)
    return part


_DEPTH = "depth"
_MODELS = "library:models/"
"""The beginning of the names of the library's models."""


def report_blocks_twice(scope: Scope, word: str, again: Block, first: Part) -> None:
    """Reports a block that is declared twice, such as a model beside a model of the library."""
    what = f'`{word} "{first.label.value}"`' if first.label else f"`{word}`"
    label = Label(span=first.span, message="first declared here")
    sources = [span.source.name for span in (first.span, again.head)]
    used = next((name for name in sources if name.startswith(_MODELS)), None)
    same_name = first.label is not None and again.label is not None and first.label.value == again.label.value
    help = "keep one of them, or give one another name" if same_name else "keep one of them"
    if used is not None and not all(name.startswith(_MODELS) for name in sources):
        name = used.removeprefix(_MODELS).removesuffix(".moe")
        help = f"a model of the library is used whole; `moec init --from {name}` writes a file with it to edit"
    scope.error("MOE0205", again.head, f"there is a {what} already", label, help=help)


def _head_is_right(scope: Scope, cls: type[Node], block: Block) -> bool:
    word = block.kind.text
    if cls.labelled and not block.label and isinstance(block.selector, Name):
        label = f'"{block.selector.text}"'
        fix = [Edit(block.selector.span, label)]
        scope.error("MOE0212", block.selector.span, "a label is written in quotes", help=f"write `{label}`", fix=fix)
        return False
    if block.selector and not cls.selects:
        scope.error("MOE0212", block.selector.span, f"a `{word}` block takes no selector")
    if block.label and not cls.labelled:
        scope.error("MOE0212", block.label.span, f"a `{word}` block takes no label")
    if cls.labelled and not block.label:
        help = f'write `{word} "name" {{ … }}`, with a name of your choice'
        scope.error("MOE0212", block.kind.span, "a label is missing", help=help)
        return False
    return True


def _named(statement: Assignment | Block) -> tuple[str, Span]:
    name = statement.name if isinstance(statement, Assignment) else statement.kind
    return name.text, name.span


class _Reader:
    """Collects the values of one block."""

    def __init__(self, scope: Scope, cls: type[Node], block: Block) -> None:
        self.scope = scope
        self.beside = dict(_named(statement) for statement in block.body if isinstance(statement, Assignment | Block))
        self.body = block.body
        self.texts: dict[str, str] | None = None
        """The plain values of the block's names, read at the first unknown name."""
        self.cls = cls
        self.known = fields(cls)
        self.stated: dict[str, Stated] = {}
        self.blocks: dict[str, list[Part]] = {}
        self.meant: dict[str, Stated] = {}
        self.incomplete = False

    def part(self, block: Block) -> Part:
        """Reads the block. A misspelt name counts as the suggested one, which is then not reported as missing."""
        absent = {word: stated for word, stated in self.meant.items() if word not in self.blocks}
        stated = absent | self.stated
        return Part(
            self.cls,
            block.head,
            block.label,
            block.selector,
            stated=stated,
            blocks=self.blocks,
            incomplete=self.incomplete,
        )

    def assignment(self, statement: Assignment) -> None:
        word = statement.name.text
        if word not in self.known:
            self._unknown(statement)
            return
        if word in self.stated:
            report_twice(self.scope, word, statement.name.span, self.stated[word].name)
            return
        known = self.known[word]
        if known.block:
            self.incomplete = True
            self._block_assigned(statement)
            return
        value = resolve(self.scope, known.kinds, statement.value, known)
        self.stated[word] = Stated(value, statement.value.span, statement.name.span)

    def _block_assigned(self, statement: Assignment) -> None:
        """Reports `layers = 4`, which is meant as the model's depth, or a value where a block is expected."""
        word, number = statement.name.text, statement.value
        help, fix = f"write `{word} {{ … }}`", []
        if word == Layer.word and _DEPTH in self.known and isinstance(number, Number):
            help = f"their number is `{_DEPTH} = {number.text}`; {help} for what they are"
            if _DEPTH in self.beside:
                help = f"their number is `{_DEPTH}`, which is given already; {help} for what they are"
            else:
                fix = [Edit(statement.name.span, _DEPTH)]
        self.scope.error("MOE0211", statement.name.span, f"`{word}` is a block", help=help, fix=fix)

    def block(self, block: Block) -> None:
        word = block.kind.text
        if word not in self.known:
            self._unknown(block)
            return
        kind = self.known[word].block
        if kind is None:
            self.incomplete = True
            calls = [cls for one in self.known[word].kinds if isinstance(one, CallKind) for cls in one.classes]
            help = f"write `{word} = {calls[0]}(…)`" if calls else f"write `{word} = …`"
            self.scope.error("MOE0211", block.kind.span, f"`{word}` is a name, not a block", help=help)
            return
        part = read_block(self.scope, kind.cls, block)
        earlier = self.blocks.setdefault(word, [])
        if part is None:
            self.incomplete = True
            return
        for other in earlier:
            if not kind.many or (other.label is not None and other.label == part.label):
                report_blocks_twice(self.scope, word, block, other)
                return
        earlier.append(part)

    def _unknown(self, statement: Assignment | Block) -> None:
        from moec.grammar.resolve.unknown import plain, unknown_name  # good files do without it

        assigned = isinstance(statement, Assignment)
        name = statement.name if isinstance(statement, Assignment) else statement.kind
        value = statement.value if isinstance(statement, Assignment) else None
        if self.texts is None:
            assignments = (inner for inner in self.body if isinstance(inner, Assignment))
            self.texts = {inner.name.text: plain(inner.value) for inner in assignments}
        meant = unknown_name(self.scope, self.cls, name, value, self.beside, self.meant, self.texts)
        if meant is None:
            return
        word, value_here = meant
        known = self.known[word]
        if isinstance(statement, Block) and known.block:  # what is in it is checked too
            kind = Name(word, name.span)
            self.block(Block(kind, statement.label, statement.selector, statement.body, statement.span))
        else:
            self.incomplete = self.incomplete or bool(known.block)
            self.meant.setdefault(word, Stated(value_here if assigned else BROKEN, name.span, name.span))
