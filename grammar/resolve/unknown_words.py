"""Diagnoses a word that is not one of the allowed words: moec's word for it, or the nearest allowed one.

Imported where there is an error.
"""

from __future__ import annotations

from moec.grammar.foreign.lookup import defaults_elsewhere, near, synonym
from moec.grammar.resolve.expected import expected, plain_words, supported, words
from moec.grammar.resolve.no_number import NONE
from moec.grammar.resolve.rewriting import value_or_fixable
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.resolve.values import resolve
from moec.grammar.schema import Field, NumberKind
from moec.grammar.suggest import advice, meant, nearest
from moec.grammar.syntax.tree import Call, Name


def diagnose_unknown_word(
    scope: Scope, known: Field, written: Written, value: Name | Call, rewriting: tuple[str, str] | None
) -> Broken:
    """Diagnose the word `value`, or its call. `rewriting`: the value as `known` has it, and why."""
    name = value if isinstance(value, Name) else value.name
    if isinstance(value, Call) and name.text in plain_words(known.kinds):
        return scope.error("MOE0206", written, f"`{name.text}` takes no arguments", help=f"write `{name.text}`")
    message = f"`{name.text}` is not known here"
    if help := near(name.text):
        return scope.error("MOE0201", name.span, message, help=help)
    if rewriting is not None:
        text, help = rewriting
        return scope.error("MOE0201", value.span, message, help=help, instead=text)
    same = synonym(name.text) or name.text.lower()
    if help := _without(known, name.text, same):
        return scope.error("MOE0201", written, message, help=help)
    if (isinstance(value, Call) or defaults_elsewhere(same)) and same in words(known.kinds) and not written.lets:
        # Only the word is wrong, or its arguments too.
        arguments = value.arguments if isinstance(value, Call) else ()
        stated = {argument.name.text for argument in arguments if argument.name}
        other_defaults = defaults_elsewhere(same, stated | {"beta1", "beta2"} if "betas" in stated else stated)
        help = f"here it is called `{same}`" + (f"; {other_defaults}" if other_defaults else "")
        scope.error("MOE0201", name.span, message, help=help, instead=None if other_defaults else same)
        resolve(scope, known.kinds, Call(Name(same, name.span), arguments, value.span), known)
        return BROKEN
    allowed = sorted(words(known.kinds) | (set(scope.lets) if isinstance(value, Name) else set()))
    slip = None if written.lets else meant(name.text, allowed)
    instead = slip if slip is not None and _can_stand(scope, known, value, slip) else None
    numbers = any(isinstance(kind, NumberKind) for kind in known.kinds)
    if numbers and instead is None and (isinstance(value, Call) or nearest(name.text, allowed) is None):
        help = f"write {expected(supported(known))}"  # `zero = stage(2)`: a number is allowed beside the words
    else:
        help = _nearest(known, name.text, allowed)
    return scope.error("MOE0201", written if written.lets else name.span, message, help=help, instead=instead)


def _without(known: Field, word: str, same: str) -> str:
    """Help for a word that means "none", and for one that cannot be compiled yet."""
    if word.lower() in NONE and not known.required:
        return f"for none, leave `{known.word}` out"
    mark = known.not_yet
    if mark and same in mark.words and same in words(known.kinds):
        return f"{mark.help or 'leave it out'}: moec cannot compile `{same}` yet"
    return ""


def _nearest(known: Field, word: str, allowed: list[str]) -> str:
    """The nearest word, or all that can be compiled."""
    if nearest(word, allowed) is not None:
        return advice(word, allowed)
    not_yet = known.not_yet.words if known.not_yet else ()
    return advice(word, words(known.kinds).difference(not_yet) or allowed)


def _can_stand(scope: Scope, known: Field, value: Name | Call, word: str) -> bool:
    """Whether `value` fits after its word is replaced by `word`."""
    name = Name(word, value.span if isinstance(value, Name) else value.name.span)
    tried = name if isinstance(value, Name) else Call(name, value.arguments, value.span)
    return value_or_fixable(scope, known, tried)[1]
