"""Rules of blocks' values that are checked before there is a Spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, labels_at
from moec.grammar.layer_numbers import numbered
from moec.grammar.resolve.parts import Part
from moec.grammar.source import Span


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
            labels=labels_at((model, "in this model")) if part.span != model else (),
            help="give it here, or in a `layers` block that covers them",
        )


def one_slot(part: Part) -> Iterator[Diagnostic]:
    """One block gives at most one field of a slot; of two blocks the later one's counts."""
    for slot in part.cls.exclusive:
        stated = [(word, span) for word in slot if (span := part.where(word))]
        if len(stated) > 1:
            (first, first_span), (second, second_span) = sorted(stated, key=lambda item: item[1].start)[:2]
            yield diagnose(
                "MOE0309",
                second_span,
                f"`{second}` takes the place of `{first}`",
                labels=labels_at((first_span, f"`{first}` is given here")),
                help=f"keep one (a dense path beside experts is `shared = …` in `moe`); to change some layers from "
                f"`{first}` to `{second}`, add a `layers` block for them",
            )
