"""Rules between values: what each is alone may be right, and together they are not.

Each rule names both places. The resolver applies them as soon as it has the values, so that one mistake elsewhere
hides none of them; `check` applies them all to a Spec made in Python. What depends on degrees and ranks is the
`place` pass's to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.model import Diagnostic, Label
from moec.grammar.resolve.parts import Part
from moec.grammar.source import Span
from moec.grammar.spec import Gqa, Mha, Moe, Spec


def check(spec: Spec) -> list[Diagnostic]:
    """Every rule, over a whole Spec."""
    model, train = spec.model, spec.train
    found: list[Diagnostic] = []
    if len(model.layers) != model.depth:
        message = f"`depth` is {model.depth}, and there are {len(model.layers)} layers"
        found.append(diagnose("MOE0306", model.span("depth"), message))
    for layer in {id(layer): layer for layer in model.layers}.values():
        if not layer.ffn and not layer.moe:
            found.append(diagnose("MOE0305", layer.span(), "a layer has no `ffn` or `moe`"))
        if layer.ffn and layer.moe:
            found.append(diagnose("MOE0309", layer.span("moe"), "a layer has both"))
        found += attention(layer.attention, model.dim, model.span("dim"))
        if layer.moe:
            found += routing(layer.moe)
    sequence = (train.sequence, train.span("sequence")) if train else None
    found += lengths((model.context, model.span("context")), sequence, model.span())
    return found


def attention(node: Gqa | Mha, dim: int | None, dim_span: Span | None) -> Iterator[Diagnostic]:
    """Heads against each other and against the model's width (`None` where that is not known)."""
    if isinstance(node, Gqa) and node.heads % node.kv_heads:
        yield diagnose(
            "MOE0301",
            node.span("kv_heads"),
            f"{node.heads} query heads cannot share {node.kv_heads} evenly",
            labels=_labels((node.span("heads"), f"{node.heads} query heads")),
            help=f"set `kv_heads = {_divisor_near(node.heads, node.kv_heads)}`",
        )
    if node.head_dim is None and dim is not None and dim % node.heads:
        yield diagnose(
            "MOE0302",
            node.span("heads"),
            f"{dim} / {node.heads} leaves {dim % node.heads} over",
            labels=_labels((dim_span, f"the model is {dim} wide")),
            help=f"set `heads = {_divisor_near(dim, node.heads)}`, or give the heads' width with `head_dim`",
        )
        return
    width = node.head_dim or (dim // node.heads if dim else None)
    if node.rope and width and width % 2:
        of_what = f"heads are {width} wide" if node.head_dim else f"{dim} / {node.heads} makes heads {width} wide"
        yield diagnose(
            "MOE0303",
            node.span("rope"),
            "it turns pairs of dimensions",
            labels=_labels((node.span("head_dim" if node.head_dim else "heads"), of_what)),
        )


def routing(moe: Moe) -> Iterator[Diagnostic]:
    """The gate against the experts."""
    if moe.gate.k > moe.experts.count:
        yield diagnose(
            "MOE0304",
            moe.gate.span("k"),
            f"each token wants {moe.gate.k}",
            labels=_labels((moe.experts.span("count"), f"there are {moe.experts.count}")),
        )


def lengths(
    context: tuple[int | None, Span | None], sequence: tuple[int, Span | None] | None, model: Span | None
) -> Iterator[Diagnostic]:
    """`context` against `train.sequence`; each is (value, place), and one of them must be there."""
    if sequence is None:
        if context[0] is None:
            help = "give `context` in `model`, or `sequence` in a `train` block"
            yield diagnose("MOE0308", model, "neither `context` nor `train.sequence`", help=help)
    elif context[0] is not None and sequence[0] > context[0]:
        yield diagnose(
            "MOE0307",
            sequence[1],
            f"sequences of {sequence[0]}",
            labels=_labels((context[1], f"a context of {context[0]}")),
        )


def complete(part: Part, layers: Sequence[int], model: Span) -> Iterator[Diagnostic]:
    """Each layer has attention and a feed-forward. `part` is all that the blocks say about `layers`."""
    lacks = []
    if not part.where("attention"):
        lacks.append("`attention`")
    if not part.where("ffn") and not part.where("moe"):
        lacks.append("`ffn` or `moe`")
    if lacks:
        verb = "has" if len(layers) == 1 else "have"
        yield diagnose(
            "MOE0305",
            part.span,
            f"{numbered(layers)} {verb} no {' and no '.join(lacks)}",
            labels=_labels((model, "in this model")) if part.span != model else (),
            help="give it here, or in a `layers` block that covers them",
        )


def selected(first: int, last: int, span: Span, depth: int, depth_span: Span | None) -> Iterator[Diagnostic]:
    """A selector picks layers that there are."""
    if first > last:
        yield diagnose("MOE0306", span, f"{first}..{last} is no layer: a range goes upwards")
    elif last >= depth:
        yield diagnose(
            "MOE0306",
            span,
            f"layers are numbered 0..{depth - 1}",
            labels=_labels((depth_span, f"{depth} layers")),
        )


def one_slot(part: Part) -> Iterator[Diagnostic]:
    """One block gives at most one field of a slot; of two blocks the later one's counts."""
    for slot in part.cls.slots:
        given = [(word, span) for word in slot if (span := part.where(word))]
        if len(given) > 1:
            (first, first_span), (second, second_span) = sorted(given, key=lambda item: item[1].start)[:2]
            yield diagnose(
                "MOE0309",
                second_span,
                f"this block gives `{first}` already",
                labels=_labels((first_span, f"`{first}` is given here")),
                help=f"keep one; to change some layers from `{first}` to `{second}`, add a `layers` block for them",
            )


def numbered(layers: Sequence[int]) -> str:
    """`layer 5`, `layers 0..3, 7`."""
    texts = ranges(layers)
    listed = ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")
    return f"layer{'s' * (len(layers) > 1)} {listed}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending `numbers` as a selector lists them: runs as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [f"{first}" if first == last else f"{first}..{last}" for first, last in runs]


def _labels(*places: tuple[Span | None, str]) -> list[Label]:
    return [Label(span=span, message=message) for span, message in places if span]


def _divisor_near(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the larger of two; the search is bounded."""
    candidates: Iterable[int] = range(max(1, wanted - 10_000), min(number, wanted + 10_000) + 1)
    return min((n for n in candidates if number % n == 0), key=lambda n: (abs(n - wanted), -n), default=1)
