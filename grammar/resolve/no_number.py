"""A word where a number stands.

Imported where there is an error.
"""

from __future__ import annotations

from moec.grammar.resolve.expected import described
from moec.grammar.resolve.scope import Broken, Scope, Written
from moec.grammar.schema import Field, NumberKind, fields
from moec.grammar.source import Span
from moec.grammar.spec import ClusterText, Level, Model, Moe, Parallel, Train
from moec.grammar.suggest import advice, meant

NONE = frozenset(("none", "null", "nil", "false", "no", "off"))
YES = frozenset(("true", "yes", "on"))


def diagnose_no_number(scope: Scope, written: Written | Span, word: str, known: Field | None) -> Broken:
    """Diagnose `word`, of which there is no `let`, in the field `known` or in arithmetic."""
    kinds = [kind for kind in known.kinds if isinstance(kind, NumberKind)] if known else []
    if word.lower() in NONE | YES:
        help = "write a number"
        if known is not None and word.lower() in NONE and not known.required and known.word:
            help = f"for none, leave `{known.word}` out"
        elif known is not None and kinds:
            said = f": {known.description}" if known.description else ""
            leave = "" if known.required or not known.word else f"; or leave `{known.word}` out"
            help = f"write {described(kinds[0])}{said}{leave}"
        return scope.error("MOE0206", written, f"expected a number, found `{word}`", help=help)
    help, instead = advice(word, scope.lets), meant(word, scope.lets)
    if instead is None and (block := _block_of(word)):
        help = (
            f"`{word}` of `{block}` cannot be used in expressions: write `let {word} = …` at the top of the file, and "
            f"`{word} = {word}` in `{block}`"
        )
    elif instead is None and word in ("s", "sec", "second", "seconds"):
        help = "a rate has its `/s` right after its size: `450GB/s`"
    elif not scope.lets:
        help = (
            f"write {described(kinds[0])}" if kinds else f"write a number, or `let {word} = …` at the top of the file"
        )
    return scope.error("MOE0201", written, "no `let` of this name", help=help, instead=instead)


def _block_of(word: str) -> str:
    """The block that has a number of this name."""
    for cls in (Model, Train, Parallel, Moe, ClusterText, Level):
        known = fields(cls).get(word)
        if known is not None and any(isinstance(kind, NumberKind) for kind in known.kinds):
            return cls.word
    return ""
