"""Warnings about ranks: results of a mixture that depend on their number, and degrees of layers without a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.layer_numbers import numbered
from moec.grammar.source import Span
from moec.grammar.spec import Base, Dynamic, ExpertChoice, Factor, Moe, SequenceLoss, Spec, Topology, ZLoss
from moec.grammar.stated import data_parallel_size, stated_of_layers

DEFAULT_CLUSTER = "clusters/one_rank"
"""The library's cluster of a file that states none."""
_ACCEPT = "`# accept: MOE0315` behind it says that it is meant"


def dependent_on_ranks(spec: Spec) -> Iterator[Diagnostic]:
    """Warns of a mixture whose results another number of data-parallel ranks would change (MOE0315).

    A file that states a cluster of one data-parallel rank has no warning. A file without a cluster has one, because it
    may be compiled for any number of ranks.
    """
    if not states_cluster(spec) or data_parallel_size(spec) > 1:
        yield from with_results_of_ranks(spec)


def with_results_of_ranks(spec: Spec) -> Iterator[Diagnostic]:
    """The warnings of `MOE0315` for any cluster."""
    layers = spec.model.layers if spec.has_model else ()
    mixtures = [layer.moe for layer in layers if layer.moe is not None] + [module.moe for module in spec.layers]
    for moe in {id(moe): moe for moe in mixtures}.values():
        if moe.group == "rank" and (result_of_rank := _rank_dependence(moe)):
            what, place = result_of_rank
            labels = labels_at((place, what))
            help = f"`group = sequence` gives the same result on any number of ranks; {_ACCEPT}"
            yield diagnose("MOE0315", moe.span("group"), labels=labels, help=help, severity=Severity.WARNING)
        elif _prefers_near(moe):
            help = f"`topk` gives the same result on any number of ranks; {_ACCEPT}"
            yield diagnose("MOE0315", moe.gate.span(), help=help, severity=Severity.WARNING)


def degrees_without_experts(spec: Spec) -> Iterator[Diagnostic]:
    """Warns of an `ep` or `etp` whose layers all have no experts (MOE0375)."""
    if not spec.has_model:
        return
    mixtures = [layer.moe for layer in spec.model.layers]
    for layers, stated in stated_of_layers(spec, "ep") + stated_of_layers(spec, "etp"):
        numbers = [number for number in layers if number < len(mixtures)]
        if not numbers or any(mixtures[number] for number in numbers):
            continue
        layer = spec.model.layers[numbers[0]]
        declared = layer.span("ffn") or layer.span()
        labels = labels_at((declared, f"layer {numbers[0]} has this instead of experts"))
        help = "leave it out, or select layers with a `moe`" if any(mixtures) else "leave it out"
        message = f"it concerns no layer: {numbered(numbers)} {'have' if len(numbers) > 1 else 'has'} no experts"
        yield diagnose("MOE0375", stated.span, message, labels=labels, help=help, severity=Severity.WARNING)


def states_cluster(spec: Spec) -> bool:
    """Whether its cluster is another than the default one of the library."""
    span = spec.cluster.span()
    return span is None or span.source.name != f"library:{DEFAULT_CLUSTER}.moe"


def _prefers_near(moe: Moe) -> bool:
    """Whether its gate knows of ranks: by its loss, or by a bound on far choices."""
    return isinstance(moe.gate, Topology) and (moe.gate.weight > 0 or moe.gate.share is not None)


def _rank_dependence(moe: Moe) -> tuple[str, Span | None] | None:
    """Why results depend on the tokens of a rank's group, and the place in the file; None if they do not."""
    if isinstance(moe.gate, ExpertChoice | Base):
        return "experts choose among a rank's tokens", moe.gate.span()
    if _prefers_near(moe):
        return "its loss is over a rank's tokens", moe.gate.span()
    if _can_drop(moe):
        return "an expert's places are counted over a rank's tokens", moe.span("capacity")
    if any(term.weight > 0 and not isinstance(term, SequenceLoss | ZLoss) for term in moe.balance):
        return "balance is counted over a rank's tokens", moe.span("balance")
    return None


def _can_drop(moe: Moe) -> bool:
    """Whether an expert may have fewer places than a group has tokens, each of which chooses it at most once."""
    match moe.capacity:
        case Factor() as capacity:
            least = min(capacity.factor, capacity.eval or capacity.factor)
        case Dynamic(max=Fraction() as least):
            pass
        case _:
            return False
    return least * moe.gate.choices(moe.num_experts) < moe.num_experts
