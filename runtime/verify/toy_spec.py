"""A plan's Spec at toy widths: which widths there are, and how small each of them can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moec.codegen.plan import Plan
from moec.grammar.checking.guest_rules import placed_words
from moec.grammar.spec import DSelectK, Experts, Layer, LayerModule, Mla, Model, Moe, Replicate, Spec, TokenEmbedding
from moec.passes.degrees.guest_slots import guest_words
from moec.passes.degrees.stated_degrees import zero_of
from moec.passes.ir.mesh import ZERO_AXES
from moec.passes.lower.lower_model import context_of

DIM, HEAD_DIM, HIDDEN, VOCAB = 16, 4, 8, 64
"""A head of 4 has two rope frequencies, so rope's theta still matters."""

KV_HEADS, QUERIES = 2, 2
"""Kv heads of a rank, and queries for each: with a single one of either, heads in a wrong order would not show."""

SEQUENCE, SHORT_SEQUENCE, MANY_RANKS = 8, 4, 65
"""Tokens of a sequence on fewer than `MANY_RANKS` ranks, and on others."""

Node_ = TypeVar("Node_", Layer, Moe)


@dataclass(frozen=True, slots=True)
class Width:
    """One kind of width that was shrunk."""

    name: str
    before: int
    toy: int

    def __str__(self) -> str:
        return f"{self.name} {self.before} → {self.toy}"


_ORDER = (
    "dim", "vocab", "padding", "heads", "kv_heads", "head_dim", "hidden", "experts", "context", "sequence", "window",
)  # fmt: skip


class ToySpec:
    """Builds a Spec with toy widths. Layers that were one object stay one object; distinct layers stay distinct."""

    def __init__(self, plan: Plan, fewer_experts: bool) -> None:
        self._spec, self._ranks = plan.spec, plan.stage_size
        meshes = plan.meshes.values()
        by_zero = ZERO_AXES if zero_of(plan.spec) else ()
        self._pieces = math.lcm(*(mesh.size(axis) for mesh in meshes for axis in ("tp", "etp", "cp", *by_zero)))
        cuts = (mesh.size(axis) for mesh in meshes for axis in ("ep", *by_zero))
        self._eps = math.lcm(*cuts) if fewer_experts else None
        self._slots = math.lcm(*(mesh.size("ep") for mesh in meshes)) if fewer_experts else None
        self._toys: set[Width] = set()
        self._hidden = self._toy_widths("hidden", _hidden_widths(plan.spec), HIDDEN)
        self._head_dims = self._toy_widths("head_dim", _head_dims(plan.spec), HEAD_DIM)
        self._heads = self._toy_heads()
        self._windows = self._toy_windows()
        self._shrunk_nodes: dict[int, object] = {}

    def spec(self) -> Spec:
        """The plan's Spec with toy widths, which `widths` lists from then on."""
        spec = self._with_toy_widths()
        if self._slots is None or spec.adapt is None or not (words := guest_words(spec)):
            return spec
        # As few slots for guests as the ranks of every layer can share: of fewer experts, more would not fit.
        others = tuple(word for word in placed_words(spec) if word not in words)
        return spec.replace(adapt=spec.adapt.replace(placement=(*others, Replicate(slots=self._slots))))

    def _with_toy_widths(self) -> Spec:
        if not self._spec.has_model:
            subject = self._spec.layer
            layers = (
                self._layer_module(layer) if layer is subject else self._inner(layer) for layer in self._spec.layers
            )
            return self._spec.replace(layers=tuple(layers))
        model, train = self._spec.model, self._spec.train
        toy = model.replace(
            dim=self._shrunk("dim", model.dim, DIM),
            layers=tuple(self._once(layer, self._layer) for layer in model.layers),
        )
        inner = tuple(map(self._inner, self._spec.layers))
        if not isinstance(model.embedding, TokenEmbedding) or model.vocab is None:  # images keep their size
            return self._spec.replace(model=toy, layers=inner)
        name = "sequence" if model.context is None else "context"  # a context that nothing gives is `train.sequence`
        tokens = self._shrunk(name, context_of(self._spec), self._tokens())
        vocab = self._shrunk("vocab", model.vocab, VOCAB)
        toy = toy.replace(vocab=vocab, embedding=self._embedding(model.embedding, vocab), context=tokens)
        if train is None or train.sequence is None:
            return self._spec.replace(model=toy, layers=inner)
        return self._spec.replace(model=toy, layers=inner, train=train.replace(sequence=min(tokens, train.sequence)))

    def _inner(self, layer: LayerModule) -> LayerModule:
        """A mixture nested in an expert. It keeps its number of experts."""
        (experts,) = layer.moe.parts
        return layer.replace(moe=layer.moe.replace(experts=experts.replace(body=self._narrow(experts.body))))

    def _layer_module(self, layer: LayerModule) -> LayerModule:
        """The subject of a `layer` file, whose ops contain no sequence length."""
        dim = self._shrunk("dim", layer.subject.dim, DIM)
        return layer.replace(dim=dim, moe=self._mixture(layer.moe))

    def _embedding(self, embedding: TokenEmbedding, vocab: int) -> TokenEmbedding:
        """The embedding with a padding id below the toy vocabulary: the last id if it was above."""
        if embedding.padding_id is None or embedding.padding_id < vocab:
            return embedding
        self._toys.add(Width("padding", embedding.padding_id, vocab - 1))
        return embedding.replace(padding=vocab - 1)

    @property
    def widths(self) -> tuple[Width, ...]:
        """The widths that were shrunk."""
        shrunk = (width for width in self._toys if width.toy != width.before)
        return tuple(sorted(shrunk, key=lambda width: (_ORDER.index(width.name), width.before, width.toy)))

    def _tokens(self) -> int:
        return SEQUENCE if self._ranks < MANY_RANKS else SHORT_SEQUENCE

    def _shrunk(self, name: str, width: int, smallest: int, pieces: int | None = None) -> int:
        """The toy width, with the same greatest common divisor with `pieces` (by default all degrees) as `width`."""
        pieces = pieces or self._pieces
        divisor = math.gcd(width, pieces)
        toy = next((toy for toy in range(smallest, width) if math.gcd(toy, pieces) == divisor), width)
        self._toys.add(Width(name, width, toy))
        return toy

    def _toy_widths(self, name: str, widths: Iterator[int], smallest: int) -> Mapping[int, int]:
        """Toy widths for all `widths`; different widths get different toy widths."""
        step = math.lcm(self._pieces, 4)
        return {
            width: self._shrunk(name, width, smallest + step * index) for index, width in enumerate(sorted(set(widths)))
        }

    def _toy_heads(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """Toy numbers of heads and kv heads, by both. Kv heads with several queries keep several."""
        layers = self._spec.model.layers if self._spec.has_model else ()
        # As many kv heads as heads leave no choice: they come first.
        pairs = sorted({_head_counts(layer) for layer in layers}, key=lambda pair: (pair[0] > pair[1], pair))
        step = math.lcm(self._pieces, 4)
        kv_heads = {
            kv: self._shrunk("kv_heads", kv, KV_HEADS * math.gcd(kv, self._pieces) + step * index)
            for index, kv in enumerate(sorted({kv for _, kv in pairs}))
        }
        toys: dict[tuple[int, int], tuple[int, int]] = {}
        for heads, kv in pairs:
            toy_kv, queries, divisor = kv_heads[kv], heads // kv, math.gcd(heads, self._pieces)
            used = {toy for (count, _), (toy, _) in toys.items() if count != heads}
            candidates = range(QUERIES * toy_kv, heads + 1, toy_kv) if queries > 1 else ()
            toy_heads = next(
                (toy for toy in candidates if math.gcd(toy, self._pieces) == divisor and toy not in used),
                queries * toy_kv,
            )
            if math.gcd(toy_heads, self._pieces) != divisor:  # ZeRO would cut other dims
                toy_heads, toy_kv = heads, kv
            toys[heads, kv] = toy_heads, toy_kv
            self._toys.add(Width("heads", heads, toy_heads))
        stated = {getattr(layer.attention, "kv_heads", None) for layer in layers}
        self._toys -= {width for width in self._toys if width.name == "kv_heads" and width.before not in stated}
        return toys

    def _toy_windows(self) -> Mapping[int, int]:
        """Toy windows shorter than a toy sequence, for windows that are not; different ones while there are enough."""
        layers = self._spec.model.layers if self._spec.has_model else ()
        windows = sorted({layer.attention.window for layer in layers if layer.attention.window is not None})
        unused = [toy for toy in range(2, self._tokens()) if toy not in windows] or [self._tokens() - 1]
        wide = [window for window in windows if window >= self._tokens()]
        toys = {window: unused[min(index, len(unused) - 1)] for index, window in enumerate(wide)}
        self._toys |= {Width("window", *pair) for pair in toys.items()}
        return toys

    def _once(self, node: Node_, make: Callable[[Node_], Node_]) -> Node_:
        """`make(node)`, called once for each object."""
        if id(node) not in self._shrunk_nodes:
            self._shrunk_nodes[id(node)] = make(node)
        shrunk = self._shrunk_nodes[id(node)]
        assert isinstance(shrunk, type(node))
        return shrunk

    def _layer(self, layer: Layer) -> Layer:
        heads, kv_heads = self._heads[_head_counts(layer)]
        widths: dict[str, int] = {"heads": heads}
        if (head_dim := _head_dim(self._spec.model, layer)) is not None:
            widths["head_dim"] = self._head_dims[head_dim]
        if getattr(layer.attention, "kv_heads", None) is not None:
            widths["kv_heads"] = kv_heads
        if layer.attention.window is not None:
            widths["window"] = self._windows.get(layer.attention.window, layer.attention.window)
        changed: dict[str, object] = {"attention": layer.attention.replace(**widths)}
        if layer.ffn is not None:
            changed["ffn"] = self._narrow(layer.ffn)
        if layer.moe is not None:
            changed["moe"] = self._once(layer.moe, self._mixture)
        return layer.replace(**changed)

    def _mixture(self, moe: Moe) -> Moe:
        parts = tuple(part.replace(count=self._count(moe, part), body=self._narrow(part.body)) for part in moe.parts)
        experts = parts if isinstance(moe.experts, tuple) else parts[0]
        dense_paths = {name: self._narrow(path) for name in ("shared", "residual") if (path := getattr(moe, name))}
        return moe.replace(experts=experts, **dense_paths)

    def _count(self, moe: Moe, part: Experts) -> int:
        if self._eps is None:
            return part.count
        return self._shrunk("experts", part.count, _fewest(moe, self._eps), self._eps)

    def _narrow(self, path: Any) -> object:
        """A feed-forward with its toy width, if it has one: a linear map has none, and a low rank is small."""
        return path.replace(hidden=self._hidden[path.hidden]) if hasattr(path, "hidden") else path


def _fewest(moe: Moe, eps: int) -> int:
    """The fewest experts of a mixture at toy widths: as many as a token chooses, one more where loads under noise are
    balanced (MOE0345), and all for `DSelectK`, whose codes name them (MOE0346)."""
    if isinstance(moe.gate, DSelectK):
        return moe.num_experts
    k: int = getattr(moe.gate, "k", 1)
    return max(k + any(term.needs == "noise" for term in moe.balance), eps)


def _hidden_widths(spec: Spec) -> Iterator[int]:
    paths: list[Any] = [layer.ffn for layer in spec.model.layers] if spec.has_model else []
    for moe in (*spec.subject.mixtures, *spec.subject.inner.values()):
        if moe is not None:
            paths += [moe.shared, moe.residual, *(part.body for part in moe.parts)]
    return (path.hidden for path in paths if hasattr(path, "hidden"))


def _head_dims(spec: Spec) -> Iterator[int]:
    layers = spec.model.layers if spec.has_model else ()
    return (head_dim for layer in layers if (head_dim := _head_dim(spec.model, layer)) is not None)


def _head_dim(model: Model, layer: Layer) -> int | None:
    """The width of a head; None where it is stated in parts, as `mla` does, and stays."""
    attention: Any = layer.attention
    return None if isinstance(attention, Mla) else int(attention.head_dim or model.dim // attention.heads)


def _head_counts(layer: Layer) -> tuple[int, int]:
    """Query heads, and heads of keys and values."""
    attention: Any = layer.attention
    return attention.heads, getattr(attention, "kv_heads", None) or attention.heads
