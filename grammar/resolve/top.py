"""Syntax trees to a Spec: resolves the top-level blocks of the files.

The other files of this folder resolve the parts: lets, numbers, values, blocks, layers, cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moec.grammar.checking import rules
from moec.grammar.diagnostics.diagnostic import Diagnostic
from moec.grammar.resolve.blocks import read_block, report_blocks_twice
from moec.grammar.resolve.clusters import Machines, resolve_clusters
from moec.grammar.resolve.layers import resolve_layers, select_layers
from moec.grammar.resolve.lets import declare_lets
from moec.grammar.resolve.library import library_names, read_library
from moec.grammar.resolve.parts import Part, Stated, build
from moec.grammar.resolve.scope import BROKEN, Broken, Scope
from moec.grammar.schema import fields
from moec.grammar.source import Span
from moec.grammar.spec import (
    ClusterText,
    Device,
    Layer,
    LayerModule,
    Model,
    Parallel,
    Spec,
    TokenEmbedding,
    Train,
)
from moec.grammar.spec.base import Node
from moec.grammar.syntax.tree import Assignment, Bad, Block, Let, Statement

_DEFAULT_CLUSTER = "clusters/one_rank"


def resolve(
    statements: Iterable[Statement],
    overrides: Mapping[str, str | int | float],
    whole: Span,
    *,
    complete: bool,
) -> tuple[Spec | None, list[Diagnostic], list[tuple[Span, str]]]:
    """The Spec of `statements`, or None; their diagnostics; and the spans of values that an override changed.

    `overrides` replace the values of `let`s. `whole` is the span for something that the whole file lacks; it is not
    reported if the file is not `complete` because a part of it could not be read or did not parse.
    """
    scope = Scope()
    statements = list(statements)
    declare_lets(scope, [s for s in statements if isinstance(s, Let)], overrides)
    top = _Top(scope, complete)
    for statement in statements:
        top.read(statement)
    if Model.word not in top.singles and not top.modules and not top.incomplete:
        help = "`moec init` writes a file to start from"
        scope.error("MOE0203", whole, "a file needs a `model`, or a `layer` for its subject", help=help)
    spec = _spec(scope, top)
    diagnostics = list(dict.fromkeys(scope.diagnostics))  # layers that share a mistake share its diagnostic
    failed = any(d.severity == "error" for d in diagnostics)
    return (None if failed else spec), diagnostics, scope.overridden


class _Top:
    """The top-level blocks, read but not yet built."""

    def __init__(self, scope: Scope, complete: bool) -> None:
        self.scope = scope
        self.singles: dict[str, Part] = {}
        self.modules: dict[str, Part] = {}
        self.incomplete = not complete
        self.machines = Machines(self._built_in, library_names("devices"), library_names("clusters"))

    def read(self, statement: Statement) -> None:
        match statement:
            case Block():
                self._block(statement)
            case Assignment():
                self._outside(statement)
            case Bad():
                self.incomplete = True

    def _outside(self, statement: Assignment) -> None:
        """Reports a name at the top level."""
        from moec.grammar.resolve.unknown import outside  # good files do without it

        words = [*_singles(), LayerModule.word, ClusterText.word, Device.word]
        help = outside(self.scope, statement, words)
        if not self.incomplete and not self.singles:  # a file without blocks hears it once
            help = f"{help}; all names stand in blocks, as in `moec init`'s file"
        self.incomplete = self.incomplete or not self.singles
        self.scope.error("MOE0211", statement.name.span, "names are given in a block", help=help)

    def _block(self, block: Block) -> None:
        word = block.kind.text
        many: dict[str, tuple[type[Node], dict[str, Part]]] = {
            LayerModule.word: (LayerModule, self.modules),
            ClusterText.word: (ClusterText, self.machines.clusters),
            Device.word: (Device, self.machines.devices),
        }
        if word not in many and word not in _singles():
            from moec.grammar.resolve.unknown import unknown_block  # good files do without it

            meant = unknown_block(self.scope, block, _singles(), [*many, *_singles()], self.singles)
            if meant is None:
                self.incomplete = self.incomplete or not self.singles
                return
            word = meant
        cls, parts = many.get(word) or (_singles()[word], self.singles)
        part = read_block(self.scope, cls, block)
        if part is None:
            self.incomplete = True
            return
        name = part.label.value if word in many and part.label else word
        if name in parts:
            report_blocks_twice(self.scope, word, block, parts[name])
        else:
            parts[name] = part

    def _built_in(self, name: str) -> Part | None:
        """A device of the library."""
        return self._library(f"devices/{name}", Device) if name in self.machines.shipped_devices else None

    def default_cluster(self) -> None:
        """Adds the default cluster, one rank, where no cluster is declared."""
        part = self._library(_DEFAULT_CLUSTER, ClusterText)
        assert part
        assert part.label
        self.machines.clusters[part.label.value] = part

    def _library(self, path: str, cls: type[Node]) -> Part | None:
        for statement in read_library(path):
            if isinstance(statement, Block) and statement.kind.text == cls.word:
                return read_block(self.scope, cls, statement)
        return None


def _singles() -> dict[str, type[Node]]:
    """The blocks of which a file has at most one."""
    blocks = {word: known.block for word, known in fields(Spec).items() if known.block}
    return {word: kind.cls for word, kind in blocks.items() if kind and not kind.many and word != ClusterText.word}


def _spec(scope: Scope, top: _Top) -> Spec | None:
    if not top.machines.clusters:
        top.default_cluster()
    values: dict[str, object] = {"cluster": resolve_clusters(scope, top.machines)}
    spans: dict[str, Span] = {}
    model = top.singles.get(Model.word)
    for word, part in top.singles.items():
        if part.cls is Train and model and _takes_images(model) and "sequence" not in part.stated:
            part = _without(part, "sequence")
        values[word] = _model(scope, part) if part.cls is Model else build(scope, _placed(scope, part, top))
        spans[word] = part.span
    modules = [build(scope, part) for part in top.modules.values()]
    values["layers"] = tuple(modules)
    _lengths(scope, top)
    if any(isinstance(value, Broken) for value in (*values.values(), *modules)) or top.incomplete:
        return None
    if Model.word not in values and not modules:
        return None
    spec = Spec.checked(values, spans)
    scope.diagnostics += rules.over_parts(spec)
    return spec


def _model(scope: Scope, part: Part) -> Node | Broken:
    """The model; its `layers` blocks together make one field."""
    if Layer.word in part.blocks:
        layers = resolve_layers(scope, part)
        first = part.blocks[Layer.word][0].span if part.blocks[Layer.word] else part.span
        part = part._replace(stated={**part.stated, Layer.word: Stated(layers, first, first)})
    if _takes_images(part) and "vocab" not in part.stated:
        part = _without(part, "vocab")
    vocab, embedding = (part.stated.get(name) for name in ("vocab", "embedding"))
    if vocab and embedding and isinstance(vocab.value, int) and isinstance(embedding.value, TokenEmbedding):
        scope.diagnostics += rules.special_ids(embedding.value, vocab.value, vocab.span)
    return build(scope, part)


def _takes_images(model: Part) -> bool:
    """Whether a model takes images, which have no `vocab` and fix `sequence`; True also if its embedding is broken."""
    embedding = model.stated.get("embedding")
    return embedding is not None and not isinstance(embedding.value, TokenEmbedding)


def _without(part: Part, name: str) -> Part:
    """The block with no value for a name that it does not need."""
    return part._replace(stated={**part.stated, name: Stated(None, part.span, part.span)})


def _placed(scope: Scope, part: Part, top: _Top) -> Part:
    """`parallel`, with the layers that its `layers` blocks are for."""
    blocks = part.blocks.get(Layer.word, [])
    if part.cls is not Parallel or not blocks:
        return part
    model = top.singles.get(Model.word)
    depth = model.stated.get("depth") if model else None
    if model and (depth is None or not isinstance(depth.value, int)):
        return part._replace(incomplete=True)  # diagnosed there
    size, span = (depth.value, depth.span) if depth else (1, part.span)
    assert isinstance(size, int)
    placed = []
    for block in blocks:
        selected = select_layers(scope, block.selector, size, span) if block.selector else ()
        if isinstance(selected, Broken):
            placed.append(block._replace(incomplete=True))
        elif selected or not block.selector:  # of no layers it says nothing; without a selector it is for all
            placed.append(block._replace(selected=tuple(sorted(selected))))
    return part._replace(blocks={**part.blocks, Layer.word: placed})


def _lengths(scope: Scope, top: _Top) -> None:
    model, train = top.singles.get(Model.word), top.singles.get(Train.word)
    if (
        top.incomplete
        or model is None
        or model.incomplete
        or _takes_images(model)
        or (train is not None and train.incomplete)
    ):
        return
    context = model.stated.get("context")
    sequence = train.stated.get("sequence") if train else None
    if (train and not sequence) or any(stated and stated.value is BROKEN for stated in (context, sequence)):
        return
    limit = (context.value, context.span) if context else (None, None)
    length = (sequence.value, sequence.span) if sequence else None
    scope.diagnostics += rules.lengths(limit, length, model.span)  # type: ignore[arg-type]
