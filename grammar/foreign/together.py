"""One form for several names of other systems in one block: `num_experts = 8` and `moe_intermediate_size = 128`.

Imported where there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from moec.grammar.foreign.lookup import Alias, Meaning, aliases
from moec.grammar.foreign.row import ATTENTION, MOE

FORMS: dict[str, dict[str, str]] = {
    "experts = {count} * swiglu({width})": {
        f"{MOE}.experts.count": "count",
        f"{MOE}.experts.swiglu.hidden": "width",
    },
    "attention = gqa(heads = {heads}, kv_heads = {kv_heads}, rope = rope())": {
        f"{ATTENTION}.mha.heads": "heads",
        f"{ATTENTION}.gqa.kv_heads": "kv_heads",
    },
    "gate = topk({k}, normalize = {normalize})": {
        f"{MOE}.gate.topk.k": "k",
        f"{MOE}.gate.topk.normalize": "normalize",
    },
}
"""Each form with the paths of its values' words, and the values' places in it."""
SYSTEMS = {"experts": ("hf", "tt"), "attention": ("hf",), "gate": ("hf",)}
"""The systems in which a form gives the same numbers, by the form's name."""


def together(alias: Alias, value: str, beside: Mapping[str, str], *, here: bool) -> str:
    """The help for `found` with its `value`: one form, where the names `beside` it have all other values of a form.

    All names must be those of one system.
    """
    usable = [
        meaning for meaning in alias.meanings if value and value.lower() not in meaning.row.but and _holds(meaning)
    ]
    for form, places in FORMS.items():
        for meaning in usable:
            others = _others(meaning, form, beside)
            if others:
                values = {places[meaning.row.path]: value}
                values |= {places[path]: beside[word] for path, word in others.items()}
                names = " and ".join(f"`{name}`" for name in (alias.word, *others.values()))
                where = "" if here or not meaning.block else f", in {meaning.block}"
                return f"{names} are one value here: `{form.format_map(values)}`{where}"
    return alias.said(value, here=here)


def _others(meaning: Meaning, form: str, beside: Mapping[str, str]) -> dict[str, str]:
    """The paths of the other values of a form, with the names beside that give them in a system of the meaning."""
    places, systems = FORMS[form], SYSTEMS[form.partition(" ")[0]]
    if meaning.row.path not in places:
        return {}
    for system in meaning.systems:
        values = {path: _value_beside(path, system, beside) for path in places if path != meaning.row.path}
        if system in systems and all(values.values()):
            return values
    return {}


def _holds(meaning: Meaning) -> bool:
    """Whether the value is a number or word of the form."""
    return "{}" in meaning.row.form


def _value_beside(path: str, system: str, beside: Mapping[str, str]) -> str:
    """The name beside that gives the word here at `path` in the system; empty if there is none."""
    for word, text in beside.items():
        alias = aliases().get(word)
        meanings = alias.meanings if text and alias else ()
        if any(m.row.path == path and system in m.systems and _holds(m) for m in meanings):
            return word
    return ""
