"""One form for names of other systems beside each other: `num_experts = 8` and `moe_intermediate_size = 128`.

Imported where there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from moec.grammar.aliases import Alias, aliases

_MOE, _ATTENTION = "model.layers.moe", "model.layers.attention"
FORMS: dict[str, dict[str, str]] = {
    "experts = {count} * swiglu({width})": {
        f"{_MOE}.experts.count": "count",
        f"{_MOE}.experts.swiglu.hidden": "width",
    },
    "attention = gqa(heads = {heads}, kv_heads = {kv_heads}, rope = rope())": {
        f"{_ATTENTION}.mha.heads": "heads",
        f"{_ATTENTION}.gqa.kv_heads": "kv_heads",
    },
    "gate = topk({k}, normalize = {normalize})": {
        f"{_MOE}.gate.topk.k": "k",
        f"{_MOE}.gate.topk.normalize": "normalize",
    },
}
"""Each form with the paths of the words here whose values it has, and their places in it."""


def together(found: Alias, value: str, beside: Mapping[str, str], *, here: bool) -> str:
    """The help for `found` with its `value`: one form, where the names `beside` it have all other values of a form."""
    if value and value.lower() not in found.but and "{}" in found.form:
        for form, places in FORMS.items():
            values = {place: _value_of(path, found, value, beside) for path, place in places.items()}
            if ".".join(found.path) in places and all(values.values()):
                where = "" if here or not found.block else f", in {found.block}"
                others = (word for path in places if ".".join(found.path) != path for word in _words_of(path))
                names = " and ".join(f"`{each}`" for each in (found.word, *filter(beside.get, others)))
                return f"{names} are one value here: `{form.format_map(values)}`{where}"
    return found.said(value, here=here)


def _value_of(path: str, found: Alias, value: str, beside: Mapping[str, str]) -> str:
    """The value of the word here at `path`; empty if no name gives it."""
    if ".".join(found.path) == path:
        return value
    return next((beside[word] for word in _words_of(path) if beside.get(word)), "")


@cache
def _words_of(path: str) -> tuple[str, ...]:
    """The names of other systems for the word here at `path`, which have the same value."""
    return tuple(word for word, other in aliases().items() if ".".join(other.path) == path and "{}" in other.form)
