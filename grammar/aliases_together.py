"""One form for several names of other systems that stand beside each other: `num_experts` and `moe_intermediate_size`.

Imported where there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from moec.grammar.aliases import Alias, alias

_MIXTURE = ("model", "layers", "moe")
_ATTENTION = ("model", "layers", "attention")
_HEADS = (*_ATTENTION, "mha", "heads")
_K = (*_MIXTURE, "gate", "topk", "k")
BLANKS = {
    (*_MIXTURE, "experts", "swiglu", "hidden"): "WIDTH",
    (*_MIXTURE, "experts", "count"): "COUNT",
    _HEADS: "HEADS",
    (*_ATTENTION, "gqa", "kv_heads"): "KV_HEADS",
    _K: "K",
}
"""The word that stands for the value of a path in the forms of other paths."""
WIDER = {_HEADS: (*_ATTENTION, "gqa", "kv_heads"), _K: (*_MIXTURE, "gate", "topk", "normalize")}
"""Paths whose value stands in the form of another path too, which says more."""


def together(found: Alias, value: str, beside: Mapping[str, str], *, here: bool) -> str:
    """The help for `found` with its `value`, and with the values of the names `beside` it that the form has too."""
    values = {other.path: text for word, text in beside.items() if text and (other := alias(word)) is not None}
    values[found.path] = value
    by_path = {other.path: other for word in beside if (other := alias(word)) is not None}
    wider = by_path.get(WIDER.get(found.path, ()))
    said = wider if value and wider is not None and values.get(wider.path) else found
    own = values.get(said.path, "")
    form, filled = said.blank_form, said is not found
    for path, blank in BLANKS.items():
        if path != said.path and values.get(path) and blank in form:
            form, filled = form.replace(blank, values[path]), True
    if not filled or value.lower() in found.but:
        return found.said(value, here=here)
    place = "" if here or not said.block else f", in {said.block}"
    return f"here it is `{form.replace('{}', own)}`{place}"
