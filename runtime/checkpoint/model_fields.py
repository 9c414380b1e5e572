"""What a model computes, as text of its `.moe` file, and how two models of equal shapes differ. Needs no torch.

A checkpoint stores those fields of `model` and of its layers that differ from their defaults. It omits sizes, which the
tensors' shapes state, and how and on which ranks a model is trained, which may change from run to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from moec.grammar.printer import selector, written_value
from moec.grammar.schema import fields
from moec.grammar.spec import Layer, LongRope, Mixture, Model, Moe, Ntk, Spec
from moec.grammar.spec.base import Node
from moec.runtime.checkpoint.format.index import ModelFields

WITHOUT = frozenset(("name", "vocab", "dim", "depth", "context", "layers"))
"""Fields of a model that are not stored with it: shapes, their bounds, and `layers`, which are stored one by one."""


def fields_of(spec: Spec) -> dict[str, Any]:
    """A `ModelFields` as plain data. Equal layers are stored once."""
    distinct = dict[Node, int]()
    kinds = [distinct.setdefault(layer, len(distinct)) for layer in spec.model.layers]
    inner = spec.subject.inner
    layers = [dict(_texts(layer, inner)) for layer in distinct]
    model = {k: text for k, text in _texts(spec.model, inner) if k not in WITHOUT} | _context(spec)
    return {"model": model, "layers": layers, "kinds": kinds}


def _texts(node: Node, inner: Mapping[str, Moe], prefix: str = "") -> Iterator[tuple[str, str]]:
    for known in fields(type(node)).values():
        value = getattr(node, known.name)
        if value is None or known.name in WITHOUT or (not known.required and value == known.default):
            continue
        if known.block:
            yield from _texts(value, inner, f"{prefix}{known.word}.")
        else:
            yield prefix + known.word, written_value(known, value)
    parts = node.parts if isinstance(node, Moe) else ()
    for number, part in enumerate(parts):
        if isinstance(part.body, Mixture):
            where = f"experts.{number}." if len(parts) > 1 else "experts."
            yield from _texts(inner[part.body.name], inner, prefix + where)


def _context(spec: Spec) -> dict[str, str]:
    """The context, if frequencies of rotary positions depend on it (`passes/lower/rotary.py`)."""
    context = spec.model.context or spec.sequence
    ropes = (layer.attention.rope for layer in spec.model.layers)
    scalings = (rope.scaling for rope in ropes if rope is not None)
    originals = [scaling.original for scaling in scalings if isinstance(scaling, LongRope | Ntk) and scaling.original]
    return {"context": str(context)} if context and any(context > original for original in originals) else {}


def differences(stored: ModelFields, spec: Spec) -> list[str]:
    """A phrase for each field that differs between a checkpoint's model and that of `spec`, with both values."""
    here = ModelFields(**fields_of(spec))
    phrases_of_all = list(_between(stored.model, here.model))
    layers = dict[str, list[int]]()
    phrases_of_pair = dict[tuple[int, int], list[str]]()
    for number, pair in enumerate(zip(stored.kinds, here.kinds, strict=False)):
        if pair not in phrases_of_pair:
            phrases_of_pair[pair] = list(_between(stored.layers[pair[0]], here.layers[pair[1]]))
        for phrase in phrases_of_pair[pair]:
            layers.setdefault(phrase, []).append(number)
    depth = len(here.kinds)
    for phrase, numbers in layers.items():
        where = "" if len(numbers) == depth else f" of layers {selector(numbers)}"
        name, _, rest = phrase.partition(" is ")
        phrases_of_all.append(f"{name}{where} is {rest}")
    return phrases_of_all


def other_biases(stored: ModelFields, spec: Spec) -> str:
    """A phrase for the first layer whose gate has a learned bias on one side and an online one on the other; or empty.

    The two have one name and shape but different meanings: a learned bias is added to logits and has a gradient; an
    online one only takes part in the choice of experts, and follows their loads.
    """
    here = ModelFields(**fields_of(spec))
    for number, (there, now) in enumerate(zip(stored.kinds, here.kinds, strict=False)):
        words = [_bias_of(fields.layers[kind]) for fields, kind in ((stored, there), (here, now))]
        if all(words) and words[0] != words[1]:
            return f"layers.{number}.moe.gate.bias is `{words[0]}` in the checkpoint, `{words[1]}` here"
    return ""


def _bias_of(layer: Mapping[str, str]) -> str:
    match = re.search(r"\bbias = (learned|online)\b", layer.get("moe.gate", ""))
    return match[1] if match else ""


def _between(stored: dict[str, str], here: dict[str, str]) -> Iterator[str]:
    for name in [*stored, *(name for name in here if name not in stored)]:
        there, now = stored.get(name) or _not_given(name), here.get(name) or _not_given(name)
        if there != now:
            yield f"{name} is {there} in the checkpoint, {now} here"


def _not_given(name: str) -> str:
    """`not given`, with the default in parentheses if the field has one: `not given (bf16)`."""
    word = name.rpartition(".")[2]
    known = next((known for kind in (Model, Layer, Moe) for known in fields(kind).values() if known.word == word), None)
    has_default = known is not None and not known.required and known.default is not None
    return f"not given ({written_value(known, known.default)})" if known and has_default else "not given"
