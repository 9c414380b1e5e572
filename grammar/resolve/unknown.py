"""Diagnoses a name that its block or call does not have: moec's name for it, its block, or the nearest name.

Imported only after an error. It suggests no name that the block has already, and tries a fix before it offers it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from moec.grammar.diagnostics.diagnostic import Edit, Label
from moec.grammar.foreign.lookup import Alias, Meaning, alias
from moec.grammar.foreign.together import together
from moec.grammar.resolve.rewriting import has_value, rewritten, value_in, value_or_fixable
from moec.grammar.resolve.scope import BROKEN, Broken, Scope
from moec.grammar.schema import CallKind, Field, Kind, ListKind, ProductKind, fields
from moec.grammar.source import Span
from moec.grammar.spec import Adapt, ClusterText, Device, Layer, Level, Model, Moe, Parallel, Spec, Train
from moec.grammar.spec.base import Node
from moec.grammar.spec.experts import Activated
from moec.grammar.suggest import advice, meant, nearest
from moec.grammar.syntax.tree import Assignment, Block, Expression, Name, Negative, Number, Operation, Sequence, String

Meant = tuple[str, object]
"""The word that was probably meant, and its value, which may be BROKEN."""


def unknown_name(
    scope: Scope,
    cls: type[Node],
    name: Name,
    value: Expression | None,
    stated: Mapping[str, Span],
    meant_before: Collection[str] = (),
    texts: Mapping[str, str] | None = None,
) -> Meant | None:
    """Diagnose `name = value`, or a block `name`, which `cls` does not have.

    `stated` are the other names of the block or call, `texts` their plain values, and `meant_before` the names that
    other unknown names were taken for.
    """
    message = f"`{name.text}` is not known here"
    if scope.trial:
        scope.error("MOE0201", name.span, message)
        return None
    known = fields(cls)
    if foreign := alias(name.text, cls.word):
        return _other_system(scope, cls, name, value, stated, foreign, meant_before, texts or {})
    taken = {word for word in known if word in stated or word in meant_before}
    taken |= {word for slot in cls.exclusive if any(other in stated for other in slot) for word in slot}
    free = {word for word, field in known.items() if word not in taken or (field.block and field.block.many)}
    best, slip = nearest(name.text, free), meant(name.text, free)
    owner = "" if slip else belongs(cls, name.text, plain(value), stated)
    if best is not None and not owner:
        field = known[best]
        value_here: object = BROKEN
        is_certain = value is None and field.block is not None
        if value is not None and not field.block:
            value_here, is_certain = value_or_fixable(scope, field, value)
        scope.error("MOE0201", name.span, message, help=advice(name.text, free), instead=slip if is_certain else None)
        return best, value_here
    repeated = nearest(name.text, {word for word in known if word in stated})
    if repeated is not None and not owner:
        label = Label(span=stated[repeated], message="given here")
        scope.error(
            "MOE0201", name.span, message, label, help=f"leave `{name.text}` out: `{repeated}` is given already"
        )
        return None
    scope.error("MOE0201", name.span, message, help=f"it belongs in {owner}" if owner else advice(name.text, free))
    return None


def _other_system(
    scope: Scope,
    cls: type[Node],
    name: Name,
    value: Expression | None,
    stated: Mapping[str, Span],
    foreign: Alias,
    meant_before: Collection[str],
    texts: Mapping[str, str],
) -> Meant | None:
    """Diagnose a name of another system. There is a fix if every system with the name means the same by it."""
    known, message = fields(cls), f"`{name.text}` is not known here"
    words = {_here(cls, meaning) for meaning in foreign.meanings}
    word = words.pop() if len(words) == 1 else ""
    text = plain(value)
    scope.moved |= foreign.heads
    if isinstance(value, String) and _is_special(foreign, value.value):
        text = value.value
    if not word or _is_special(foreign, text):
        here = all(meaning.path[-2:-1] == (cls.word,) for meaning in foreign.meanings)
        scope.error("MOE0201", name.span, message, help=together(foreign, text, texts, here=here))
        return None
    is_same = foreign.renames if cls.form == "call" else foreign.plain
    renamed = is_same and all(meaning.name == word for meaning in foreign.meanings)
    if word in stated and (renamed or word in known):
        label = Label(span=stated[word], message="given here")
        help = f"here it is called `{word}`, which is given already: keep one of them"
        if not renamed:
            help = f"{together(foreign, text, texts, here=True)}; `{word}` is given already: say it there"
        scope.error("MOE0201", name.span, message, label, help=help)
        return None
    value_here: object = BROKEN
    fix: list[Edit] = []
    help = together(foreign, text, texts, here=True)
    first = foreign.meanings[0]
    if value is not None and renamed:
        value_here = value_in(scope, known[word], value)
        right = None if not isinstance(value_here, Broken) else rewritten(scope, known[word], value)
        is_one = "{}" in first.row.form or right is not None  # else `betas` is several words here
        if word not in meant_before and is_one and (not isinstance(value_here, Broken) or right):
            fix = [Edit(name.span, word), *([Edit(value.span, right[0])] if right else [])]
        if right or (not foreign.plain and "{}" in first.row.form):
            help = f"here it is called `{word}`: `{word} = {right[0] if right else text or first.row.example}`"
    elif value is not None and foreign.one is not None and first.row.convert and text and word not in meant_before:
        written = first.written(text)
        if has_value(scope, known[word], written.partition(" = ")[2]):
            fix = [Edit(name.span.to(value.span), written)]
    mark = known[word].not_yet
    if mark and not mark.words:
        help = f"leave it out: `{word}` is not supported yet"
    scope.error("MOE0201", name.span, message, help=help, fix=fix)
    return word, value_here


def _is_special(foreign: Alias, text: str) -> bool:
    """Whether a system's name has another form for this value."""
    return any(text.lower() in meaning.row.but for meaning in foreign.meanings)


def _here(cls: type[Node], meaning: Meaning) -> str:
    """The name of `cls` with this meaning: the one with the same value, or the one that its form gives."""
    known = fields(cls)
    if not meaning.path:
        return ""
    direct = meaning.row.form.startswith(f"{meaning.name} = ")
    if meaning.name in known and (direct if cls.form == "block" else meaning.head != meaning.name):
        return meaning.name
    return meaning.head if meaning.head in known else ""


def plain(value: Expression | None) -> str:
    """The text of a number or word, which an example can show."""
    if not isinstance(value, Number | Name | Negative | Operation):
        return ""
    text = value.span.source.text[value.span.start : value.span.end]
    return {"True": "true", "False": "false"}.get(text, text)


def outside(scope: Scope, statement: Assignment, blocks: list[str]) -> str:
    """Help for a name at the top level."""
    word = statement.name.text
    if foreign := alias(word):
        scope.moved |= foreign.heads
        return foreign.said(plain(statement.value))
    owner = belongs(Spec, word)
    return f"it belongs in {owner}" if owner else f"blocks: {', '.join(sorted(blocks))}; a constant: `let {word} = …`"


def unknown_block(
    scope: Scope, block: Block, singles: Mapping[str, type[Node]], allowed: list[str], stated: Collection[str]
) -> str | None:
    """Diagnose an unknown top-level block; returns the word that was probably meant."""
    word = block.kind.text
    owner = next((owner for owner, cls in singles.items() if word in fields(cls)), None)
    if owner:
        scope.error("MOE0211", block.kind.span, f"`{word}` belongs in `{owner}`")
        return None
    free = sorted(set(allowed) - set(stated))
    foreign = alias(word)
    best = nearest(word, free)
    help = foreign.said() if foreign else advice(word, free)
    scope.error("MOE0201", block.kind.span, f"`{word}` is not known here", help=help, instead=meant(word, free))
    return best


def betas(scope: Scope, name: Name, value: Expression, known: Collection[str]) -> bool:
    """Diagnose `betas = [0.9, 0.95]`, for which moec has two names; returns whether the assignment is that."""
    if name.text != "betas" or "beta1" not in known or not isinstance(value, Sequence) or len(value.items) != 2:
        return False
    source = value.span.source.text
    first, second = (source[item.span.start : item.span.end] for item in value.items)
    written = f"beta1 = {first}, beta2 = {second}"
    fix = [Edit(name.span.to(value.span), written)]
    scope.error("MOE0201", name.span, "`betas` is not known here", help=f"each has a name: `{written}`", fix=fix)
    return True


def belongs(cls: type[Node], word: str, value: str = "", stated: Collection[str] = ()) -> str:
    """Where `word` belongs: a block in this one, a block elsewhere, or a call of this block or of the blocks in it.

    The call may be the value of one of the names that are `stated`.
    """
    blocks = _blocks()
    inside = [known.block.cls for known in fields(cls).values() if known.block]
    owners = [owner for owner in inside if word in fields(owner)] or [
        owner for owner in blocks if word in fields(owner)
    ]
    if owners:
        return " or ".join(dict.fromkeys(f"`{owner.word} {{ … }}`" for owner in owners))
    return _owner(cls, word, value or "…", stated) or _as_call(cls, word, value or "…", stated) or ""


def _already(known: Field, stated: Collection[str]) -> str:
    return f"; `{known.word}` is given already: say it there" if known.word in stated else ""


def _owner(block: type[Node], word: str, value: str, stated: Collection[str]) -> str | None:
    """The calls that have `word`, of this block or of those in it: `` `attention = gqa(clip = …)` (or `mha(…)`) ``."""
    for known in fields(block).values():
        classes = [cls for kind in known.kinds if isinstance(kind, CallKind) for cls in kind.classes.values()]
        if owners := [cls.word for cls in classes if word in fields(cls)]:
            others = f" (or {', '.join(f'`{owner}(…)`' for owner in owners[1:5])})" if owners[1:] else ""
            return f"`{known.word} = {owners[0]}({word} = {value})`{others}{_already(known, stated)}"
        if known.block and (inner := _owner(known.block.cls, word, value, ())):
            return inner
    return None


def _as_call(block: type[Node], word: str, value: str, stated: Collection[str]) -> str | None:
    """The assignment with the call `word` in this block or an inner one: `` `balance = [z_loss(0.001)]` ``."""
    for known in fields(block).values():
        for kind in known.kinds:
            for item in _within(kind):
                if not isinstance(item, CallKind) or word not in item.classes:
                    continue
                nothing = "WIDTH" if issubclass(item.classes[word], Activated) else ""
                call = f"{word}({nothing if value == 'true' else value})"
                call = f"8 * {call}" if isinstance(kind, ProductKind) else call
                written = f"`{known.word} = {f'[{call}]' if isinstance(kind, ListKind) else call}`"
                return written + _already(known, stated)
        if known.block and (inner := _as_call(known.block.cls, word, value, ())):
            return inner
    return None


def _within(kind: Kind) -> tuple[Kind, ...]:
    """The kinds of a product's factors, of a list's elements, or the kind itself."""
    if isinstance(kind, ProductKind):
        return tuple(inner for factor in fields(kind.cls).values() for inner in factor.kinds)
    return kind.items if isinstance(kind, ListKind) else (kind,)


def _blocks() -> list[type[Node]]:
    """The blocks of a file, and those in them."""
    return [Model, Layer, Moe, Train, Parallel, ClusterText, Level, Device, Adapt]
