"""Rules of the gate `topology` that need no degrees but those that the file states; `place` checks the others."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.spec import Moa, Spec, Topology
from moec.grammar.stated import Stated, stage_ranks, stated_by_layer


def topology_problems(spec: Spec) -> list[Diagnostic]:
    """Every diagnostic of these gates in the file's model or layer, once for all layers with the same mixture."""
    problems = list(_head_problems(spec))
    ep_of, etp_of = stated_by_layer(spec, "ep"), stated_by_layer(spec, "etp")
    mixtures = [layer.moe for layer in (spec.model.layers if spec.has_model else spec.layers)]
    for number, moe in enumerate(mixtures):
        if moe is None or not isinstance(gate := moe.gate, Topology):
            continue
        problems += _flat(spec, gate, ep_of.get(number), etp_of.get(number))
        if gate.share is not None:
            problems += _bounded(spec, gate)
    return list(dict.fromkeys(problems))


def _head_problems(spec: Spec) -> Iterator[Diagnostic]:
    for layer in spec.model.layers if spec.has_model else ():
        if isinstance(layer.attention, Moa) and isinstance(gate := layer.attention.gate, Topology):
            message = "moec cannot compile `topology` of heads yet"
            yield diagnose("MOE0202", gate.span(), message, help="heads are on no ranks of their own: use `topk`")


def _flat(spec: Spec, gate: Topology, ep: Stated | None, etp: Stated | None) -> Iterator[Diagnostic]:
    """Warns if a rank sends tokens to all experts at equal cost, so that the gate equals `topk`.

    If the ranks that share a token, those of cp and tp, together have all experts, each of them is equally far from
    all, within one level.
    """
    parallel = spec.parallel
    everywhere = stage_ranks(spec) == 1 or (ep is not None and ep.value == 1)
    if not everywhere and not _have_all_experts(spec, ep, etp):
        return
    message = "every rank has all experts" if everywhere else "the ranks that share a token have all experts"
    one_rank = "one rank" if spec.cluster.ranks == 1 else "one rank for each pipeline stage"
    labels = labels_at((ep.span, f"`ep = {ep.value}`") if ep is not None else (spec.cluster.span(), one_rank))
    if not everywhere:
        sharing = (("cp", parallel.cp), ("tp", parallel.tp))
        labels += labels_at(*((parallel.span(word), f"`{word} = {n}`") for word, n in sharing if n not in (None, 1)))
    help = "use `topk`, or spread the experts over more ranks with `ep`"
    yield diagnose("MOE0328", gate.span(), message, labels=labels, help=help, severity=Severity.WARNING)


def _have_all_experts(spec: Spec, ep: Stated | None, etp: Stated | None) -> bool:
    """Whether ranks that share a token are whole groups of `ep` * `etp` ranks, within units of the innermost level."""
    inner = next((level.size for level in spec.cluster.levels if level.size > 1), 1)
    match spec.parallel.cp or 1, spec.parallel.tp or 1, ep and ep.value, etp.value if etp else 1:
        case int(cp), int(tp), int(num_ep), int(num_etp):
            return cp * tp % (num_ep * num_etp) == 0 and inner % (cp * tp) == 0
    return False


def _bounded(spec: Spec, gate: Topology) -> Iterator[Diagnostic]:
    """`share` without other nodes, beside given choices, or of more digits than an exact product of counts has."""
    outermost = spec.cluster.levels[-1] if spec.cluster.levels else None
    if outermost is None or outermost.size == 1:
        message = "there is one node, so that no choice goes to another"
        labels = labels_at((outermost.span("size"), "of the outermost level")) if outermost else ()
        help = "leave `share` out, or give the cluster more `nodes`"
        yield diagnose("MOE0328", gate.span("share"), message, labels=labels, help=help, severity=Severity.WARNING)
    if spec.train is not None and spec.train.replay:
        labels = labels_at((spec.train.span("replay"), "routes replace the choices of every gate"))
        message = "given choices have no bound of their own"
        yield diagnose("MOE0370", gate.span("share"), message, labels=labels, help="leave `share` or `replay` out")
    assert gate.share is not None
    if gate.share.denominator >= _LARGEST_PART:
        message = "moec cannot compile so exact a `share` yet"
        yield diagnose("MOE0202", gate.span("share"), message, help="write it with fewer digits")


_LARGEST_PART = 2**32
"""Numerators times choices must fit 64 bits."""
