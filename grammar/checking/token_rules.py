"""Rules of a batch's other inputs: the routes of a rollout, segments of packed texts, padding."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Label, Severity, labels_at
from moec.grammar.spec import Factor, Moe, Patches, Spec, TokenEmbedding


def token_inputs(spec: Spec) -> Iterator[Diagnostic]:
    """Refuses gates whose choices cannot be given, in a file with `replay`, and two ways to mark packed texts.

    Warns of one id for the ends of texts and for padding.
    """
    if spec.has_model:
        yield from _packed(spec.model.embedding)
    if spec.train is not None and spec.train.replay and spec.has_model:
        yield from _replayed(spec)


def _packed(embedding: TokenEmbedding | Patches) -> Iterator[Diagnostic]:
    if embedding.segments and embedding.separator is not None:
        line = embedding.span("separator")
        here = labels_at((line, "texts end with this id"))
        message = "the batch says which text a token belongs to"
        yield diagnose("MOE0371", embedding.span("segments"), message, labels=here, help="keep one of them")
    if embedding.separator is not None and embedding.separator == embedding.padding_id:
        line = embedding.span("padding")
        here = labels_at((line, "tokens with this id reach no expert"))
        message = "the last token of each text is padding"
        help = "pad with another id, or mark padding in the batch: `padding = given`"
        yield diagnose(
            "MOE0348", embedding.span("separator"), message, labels=here, help=help, severity=Severity.WARNING
        )


def _replayed(spec: Spec) -> Iterator[Diagnostic]:
    assert spec.train is not None
    line = spec.train.span("replay")
    here = labels_at((line, "routes replace the choices of every gate"))
    help = "leave `replay` out, or use `topk` or `switch`"
    gates = {id(layer.moe.gate): layer.moe.gate for layer in spec.model.layers if layer.moe}
    if not gates:
        yield diagnose("MOE0370", line, "the model has no gate", help="leave `replay` out")
    for gate in gates.values():
        if not gate.replays:
            message = f"the weights of `{gate.word}` do not follow from scores and given choices"
            yield diagnose("MOE0370", gate.span(), message, labels=here, help=help)
    for moe in {id(layer.moe): layer.moe for layer in spec.model.layers if layer.moe}.values():
        yield from _decided_again(moe, here)


def _decided_again(moe: Moe, here: list[Label]) -> Iterator[Diagnostic]:
    """Warns of a capacity that drops or reroutes other choices of a step than of its rollout."""
    capacity = moe.capacity
    if not moe.drops:
        return
    if moe.overflow == "reroute":
        span, message = moe.span("overflow"), "a step reroutes the given choices by its own scores"
    elif moe.order not in ("sequence", "token"):
        by = "numbers that evaluation does not draw" if moe.order == "random" else "its own scores"
        span, message = capacity.span("order"), f"a step drops some of the given choices by {by}"
    elif isinstance(capacity, Factor) and capacity.eval not in (None, capacity.factor):
        span, message = capacity.span("eval"), "a rollout in evaluation has other places than a step"
    else:
        return
    help = "`dropless` drops nothing; one `factor`, in sequence, drops the same choices of the same tokens"
    yield diagnose("MOE0373", span, message, labels=here, help=help, severity=Severity.WARNING)
