"""Random Specs over the whole vocabulary, drawn from the schema by introspection.

A field's strategy follows from the kinds of value it takes, so a new word is drawn from the day it is declared. What
rules between fields demand is mended afterwards, in one place below.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from moec.grammar import Spec
from moec.grammar import spec as s
from moec.grammar.checking.rules import check
from moec.grammar.diagnostics.diagnostic import Severity
from moec.grammar.schema import (
    BlockKind,
    CallKind,
    Field,
    Kind,
    ListKind,
    NumberKind,
    ProductKind,
    RangeKind,
    TextKind,
    WordKind,
)
from moec.grammar.schema import fields as fields_of
from moec.grammar.spec.base import Node
from moec.grammar.spec.optimizers import OPTIMIZERS
from moec.grammar.units import a_layer_holds

LARGEST = 2**40
SKIPPED = (s.Layer, s.ParallelLayers)  # drawn with the model, which has the number of layers
printing = st.characters(exclude_characters='"').filter(str.isprintable)
label = st.text(printing, max_size=12)


def numbers(kind: NumberKind) -> st.SearchStrategy[Any]:
    limits = {bound.name: bound.limit for bound in kind.bounds}
    low = limits.get("at least", limits.get("more than", 0))
    high = limits.get("at most", limits.get("less than"))
    if kind.whole:
        return st.integers(int(low), int(LARGEST if high is None else high))
    if kind.exact:
        drawn = st.builds(Fraction, st.integers(1, LARGEST), st.integers(1, LARGEST))
        return drawn.filter(lambda number: all(bound.holds(number) for bound in kind.bounds))
    return st.floats(
        low,
        3.38e38 if high is None else high,
        exclude_min="more than" in limits,
        exclude_max="less than" in limits,
        allow_infinity=False,
        allow_nan=False,
    ).filter(a_layer_holds)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    match kind:
        case NumberKind():
            return numbers(kind)
        case TextKind():
            return label
        case RangeKind():
            return st.builds(s.LayerRange, st.integers(0, 99), st.integers(0, 99))
        case WordKind():
            return st.sampled_from(list(kind.values.values()))
        case CallKind():
            return st.one_of(nodes(cls) for cls in kind.classes.values() if cls is not s.Mixture)
        case ProductKind():
            return nodes(kind.cls)
        case ListKind():
            return st.lists(st.one_of([values(item) for item in kind.items]), min_size=1, max_size=3).map(tuple)
        case BlockKind(many=False):
            return nodes(kind.cls)
    raise AssertionError(f"drawn elsewhere: {kind}")


def known(cls: type[Node], field: Field) -> bool:
    return not any(isinstance(kind, BlockKind) and kind.cls in SKIPPED for kind in field.kinds)


@cache  # hypothesis reads the source of each new composite
def drawn_fields(cls: type[Node]) -> dict[str, st.SearchStrategy[Any]]:
    """For each field of `cls` that is drawn with it, values of any of its kinds."""
    drawn = (field for field in fields_of(cls).values() if known(cls, field))
    return {field.word: st.one_of([values(kind) for kind in field.kinds]) for field in drawn}


@cache
def nodes(cls: type[Node]) -> st.SearchStrategy[Any]:
    @st.composite
    def draw_one(draw: st.DrawFn) -> Node:
        given: dict[str, Any] = {"name": draw(label)} if cls.labelled else {}
        for word, drawn in drawn_fields(cls).items():
            field = fields_of(cls)[word]
            if field.required or draw(st.booleans()):
                given[field.name] = draw(drawn)
        return cls(**mended(cls, given))

    return draw_one()


def mended(cls: type[Node], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the changes that the rules between fields need."""
    if "heads" in given and cls is not s.Mla:
        given["head_dim"] = 2 * min(given.get("head_dim") or 32, 2**30)
        if given.get("kv_heads"):
            given["kv_heads"] %= 1000
            given["kv_heads"] += 1
            given["heads"] = given["kv_heads"] * (given["heads"] % 8 + 1)
    if cls is s.Mla:
        given["rope_dim"] *= 2
    if cls is OPTIMIZERS["sgd"] and not given.get("momentum"):
        given.pop("nesterov", None)  # MOE0336
    if cls is s.Train and getattr(given.get("optimizer"), "wide", ""):
        given.pop("state", None)  # MOE0337
    if cls is s.Train and given.get("frozen"):  # MOE0342, MOE0343: every model has these, and a head or its embedding
        given["frozen"] = tuple(part for part in given["frozen"] if part in ("attention", "norms"))
    if cls is s.Moa:
        if not given["gate"].for_heads:  # MOE0333
            given["gate"] = s.TopK(k=getattr(given["gate"], "k", 2))
        given["gate"], given["experts"] = chosen(given["gate"], given["experts"])
        given["balance"] = balancing(given.get("balance") or (), given["gate"], given["experts"])
        given["balance"] = tuple(term for term in given["balance"] if not isinstance(term, s.DeviceLoss))  # MOE0334
    if cls is s.Moe:
        parts = given["experts"] if isinstance(given["experts"], tuple) else (given["experts"],)
        given["gate"], total = chosen(given["gate"], sum(part.count for part in parts))
        if total != sum(part.count for part in parts):
            given["experts"] = s.Experts(count=total, body=ungated(parts[0].body))
        elif isinstance(given["experts"], tuple):
            given["experts"] = tuple(part.replace(body=ungated(part.body)) for part in parts)
        else:
            given["experts"] = parts[0].replace(body=ungated(parts[0].body))
        if given.get("balance"):
            given["balance"] = balancing(given["balance"], given["gate"], total)
        gate = given["gate"]
        by_scores = isinstance(gate, s.Switch) or (
            isinstance(gate, s.TopK) and gate.bias != "learned" and not gate.noise and not gate.keep_groups
        )
        if not (isinstance(given.get("capacity"), s.Factor) and by_scores):
            given.pop("overflow", None)  # MOE0350, MOE0354
        if gate.decides_rows:  # MOE0354
            given.pop("capacity", None)
            given.pop("group", None)
        if given.get("residual"):
            given["residual"] = ungated(given["residual"])
    return given


def balancing(terms: Any, gate: Any, experts: int) -> tuple[Any, ...]:
    """The terms over what the gate gives (MOE0325), and that are not constant (MOE0345)."""
    refused = {"noise"} if getattr(gate, "k", 1) == experts else set()
    return tuple(term for term in terms if term.needs in {*gate.gives} - refused)


def chosen(gate: Any, experts: int) -> tuple[Any, int]:
    """A gate and a valid number of experts."""
    k = min(getattr(gate, "k", 1), 64)
    if "k" in fields_of(type(gate)):
        gate = gate.replace(k=k)
    if isinstance(gate, s.DSelectK):
        return gate, 64  # MOE0346
    if not isinstance(gate, s.TopK) or gate.groups == 1:
        return gate, max(experts, k)
    groups = min(gate.groups, 64)
    kept = min(gate.keep_groups, groups) if gate.keep_groups else None
    return gate.replace(groups=groups, keep_groups=kept), groups * k


def ungated(body: Any) -> Any:
    return body.replace(gated=False) if getattr(body, "gated", False) else body


@st.composite
def layers(draw: st.DrawFn, modules: tuple[s.LayerModule, ...]) -> s.Layer:
    attention = draw(values(next(iter(fields_of(s.Layer)["attention"].kinds))))
    if draw(st.booleans()):
        return s.Layer(attention=attention, ffn=ungated(draw(values(fields_of(s.Layer)["ffn"].kinds[0]))))
    moe = draw(nodes(s.Moe))
    if modules and isinstance(moe.experts, s.Experts) and draw(st.booleans()):
        moe = moe.replace(experts=moe.experts.replace(body=s.Mixture(name=draw(st.sampled_from(modules)).name)))
    return s.Layer(attention=attention, moe=moe)


@st.composite
def ranges(draw: st.DrawFn, depth: int) -> s.ParallelLayers:
    some = draw(st.sets(st.integers(0, depth - 1)))
    return draw(nodes(s.ParallelLayers)).replace(layers=tuple(sorted(some)))


@st.composite
def clusters(draw: st.DrawFn) -> s.Cluster:
    levels = draw(st.lists(nodes(s.Level), min_size=1, max_size=4, unique_by=lambda level: level.name))
    return s.Cluster(name=draw(label), device=draw(nodes(s.Device)), levels=tuple(levels))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A valid Spec of a model or of a layer."""
    modules = tuple(draw(st.lists(nodes(s.LayerModule), max_size=2, unique_by=lambda module: module.name)))
    train, adapt = draw(st.none() | nodes(s.Train)), draw(st.none() | nodes(s.Adapt))
    cluster = draw(clusters())
    if modules and draw(st.integers(0, 4)) == 0:
        subject = modules[0].replace(dim=modules[0].dim or 64)
        parallel = draw(nodes(s.Parallel)).replace(microbatches=None)  # MOE0332
        train = train.replace(frozen=()) if train else None
        return valid(Spec(layers=(subject,), cluster=cluster, train=train, parallel=parallel, adapt=adapt))
    kinds = draw(st.lists(layers(modules), min_size=1, max_size=3))
    stack = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12)))
    drawn = {
        field.name: draw(drawn_fields(s.Model)[word])
        for word, field in fields_of(s.Model).items()
        if known(s.Model, field) and (field.required or field.name == "vocab" or draw(st.booleans()))
    }
    embedding = drawn.get("embedding")
    if embedding is not None:
        ids = {name: id for name in ("padding", "separator") if isinstance(id := getattr(embedding, name), int)}
        drawn["embedding"] = embedding.replace(**{name: id % drawn["vocab"] for name, id in ids.items()})
    windows = [getattr(layer.attention, "window", None) or 1 for layer in stack]  # MOE0362
    context = max(draw(st.integers(1, LARGEST)), train.sequence if train and train.sequence else 1, *windows)
    model = s.Model(**drawn | {"name": draw(label), "depth": len(stack), "context": context, "layers": stack})
    parallel = draw(nodes(s.Parallel)).replace(layers=tuple(draw(st.lists(ranges(len(stack)), max_size=2))))
    modules = tuple(module.replace(dim=None if module.dim is None else model.dim) for module in modules)
    return valid(Spec(model=model, layers=modules, cluster=cluster, train=train, parallel=parallel, adapt=adapt))


def valid(spec: Spec) -> Spec:
    """The Spec, unless a rule that `mended` does not know refuses it."""
    assume(not any(found.severity is Severity.ERROR for found in check(spec)))
    return spec
