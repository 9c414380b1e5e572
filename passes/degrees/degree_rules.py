"""Checks degrees against ranks, widths and the batch; each diagnostic names both places in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moec.grammar.checking.mixture_rules import mixture
from moec.grammar.checking.rank_rules import states_cluster
from moec.grammar.checking.rules import attention
from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.layer_numbers import numbered
from moec.grammar.source import Span
from moec.grammar.spec import Attention, Experts, Moe, Spec
from moec.grammar.spec.base import Node
from moec.passes.degrees.fitting_degrees import Changes, dense_changes, divided, fitting_ep, is_divided, written
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.degrees.stated_degrees import Mixtures, Stated, number_of, stated_eps, zero_of


def problems_of(spec: Spec, mixtures: Mixtures) -> list[Diagnostic]:
    """A diagnostic for every rule that the stated degrees break."""
    changes = dense_changes(spec)
    return [
        *_mesh_problems(spec, mixtures, changes),
        *_expert_problems(spec, mixtures),
        *_batch_problems(spec, changes),
        *_width_problems(spec, changes),
        *_sequence_problems(spec, changes),
        *_zero_problems(spec),
    ]


def _advice(changes: Changes, *names: str) -> str:
    """The changes of `names` in words; all changes if `tp` is among them, since the others depend on it."""
    return written(changes if "tp" in changes else {name: changes[name] for name in names})


def _cluster_label(spec: Spec) -> tuple[Label, ...]:
    ranks = spec.cluster.ranks
    return _label(spec.cluster.span(), f"{ranks} {'rank' if ranks == 1 else 'ranks'}")


def _label(span: Span | None, message: str) -> tuple[Label, ...]:
    return (Label(span=span, message=message),) if span else ()


def _mesh_problems(spec: Spec, mixtures: Mixtures, changes: Changes) -> Iterator[Diagnostic]:
    ranks, parallel = spec.cluster.ranks, spec.parallel
    dp, tp = number_of(parallel.dp), number_of(parallel.tp) or 1
    if ranks % tp == 0 and dp is not None and dp * tp != ranks:
        yield diagnose(
            "MOE0310",
            parallel.span("dp"),
            f"dp = {dp}, {f'tp = {tp}' if tp > 1 else 'and every other dense degree is 1'}, "
            f"but the cluster has {ranks} ranks",
            labels=_cluster_label(spec) + _label(parallel.span("tp") if tp > 1 else None, f"tp = {tp}"),
            help=_advice(changes, "dp") + ("" if "tp" in changes else ", or leave `dp` out"),
        )
    if ranks % tp:
        yield _not_whole(spec, parallel.span("tp"), tp, written(changes))
    for _, stated in stated_eps(spec):
        if ranks % stated.ep:
            yield _not_whole(spec, stated.span, stated.ep, f"set `ep = {fitting_ep(spec, stated, mixtures)}`")


def _not_whole(spec: Spec, span: Span | None, degree: int, help: str) -> Diagnostic:
    message = f"{spec.cluster.ranks} / {degree} is not whole"
    if not states_cluster(spec):
        size = -(-8 // degree) * degree  # the smallest multiple from 8 on
        help = (
            "without a `cluster` there is one rank: declare yours, "
            f'`cluster "mine" {{ device = h100; level "node" {{ size = {size} }} }}`, or leave the degree out'
        )
    return diagnose("MOE0312", span, message, labels=_cluster_label(spec), help=help)


def _expert_problems(spec: Spec, mixtures: Mixtures) -> list[Diagnostic]:
    """A diagnostic for each mixture, or part of one, whose experts its `ep` does not divide."""
    problems: list[Diagnostic] = []
    for moe, stated, layers in mixtures:
        if stated is None:
            continue
        count, ep = moe.num_experts, stated.ep
        if count % ep == 0:
            problems += _part_problems(spec, mixtures, moe, stated)
            continue
        fitting = fitting_ep(spec, stated, mixtures)
        help = f"set `ep = {fitting}` ({count // fitting} per rank)"
        if larger_count := _more_experts(spec, mixtures, moe):
            help += f" or `experts = {larger_count} * …` ({larger_count // ep} per rank)"
        label = f"{count} experts declared here ({numbered(layers)})"
        message = f"{count} / {ep} leaves {count % ep} experts over"
        labels = _label(moe.span("experts"), label)
        problems.append(diagnose("MOE0311", stated.span, message, labels=labels, help=help))
    return problems


def _more_experts(spec: Spec, mixtures: Mixtures, moe: Moe) -> int | None:
    """The next number of experts that every `ep` stated for `moe` divides, if ranks and the other rules allow it."""
    degrees = math.lcm(*(stated.ep for candidate, stated, _ in mixtures if candidate is moe and stated is not None))
    larger_count = -(-moe.num_experts // degrees) * degrees
    if spec.cluster.ranks % degrees or not isinstance(moe.experts, Experts):
        return None
    larger = moe.replace(experts=moe.experts.replace(count=larger_count))
    broken_rules = {problem.code for problem in mixture(moe)}
    return None if {problem.code for problem in mixture(larger)} - broken_rules else larger_count


def _part_problems(spec: Spec, mixtures: Mixtures, moe: Moe, stated: Stated) -> Iterator[Diagnostic]:
    """A diagnostic for each part of the experts that `ep` does not divide: all ranks have equally many of each part."""
    for part in moe.parts:
        if part.count % stated.ep:
            yield diagnose(
                "MOE0355",
                stated.span,
                f"{part.count} / {stated.ep} leaves {part.count % stated.ep} experts over",
                labels=_label(part.span(), f"{part.count} experts of this kind"),
                help=f"set `ep = {fitting_ep(spec, stated, mixtures)}`, or give other numbers of experts",
            )


def _batch_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    train, tp = spec.train, number_of(spec.parallel.tp) or 1
    if train is None or spec.cluster.ranks % tp:
        return []
    dp = spec.cluster.ranks // tp
    if train.batch % dp == 0:
        return _microbatch_problems(spec, train.batch, dp, changes)
    shares = f"{dp} data-parallel ranks" if tp > 1 else f"{dp} ranks"
    return [
        diagnose(
            "MOE0313",
            train.span("batch"),
            f"{train.batch} {_sequences(spec)} over {shares}",
            labels=_cluster_label(spec),
            help=_advice(changes, "batch"),
        )
    ]


def _sequences(spec: Spec) -> str:
    return "images" if spec.has_model and spec.model.length is not None else "sequences"


def _microbatch_problems(spec: Spec, batch: int, dp: int, changes: Changes) -> list[Diagnostic]:
    """A diagnostic if the micro-batches do not divide a rank's sequences: they would differ in size and capacity."""
    parallel, sequences = spec.parallel, batch // dp
    parts = number_of(parallel.microbatches) or 1
    if sequences % parts == 0:
        return []
    assert spec.train is not None
    batch_that_fits = -(-sequences // parts) * parts * dp
    return [
        diagnose(
            "MOE0330",
            parallel.span("microbatches"),
            f"{sequences} / {parts} is not whole",
            labels=_label(spec.train.span("batch"), f"{sequences} {_sequences(spec)} per data-parallel rank, of {dp}"),
            help=_advice(changes, "microbatches") + ("" if "tp" in changes else f" or `batch = {batch_that_fits}`"),
        )
    ]


def _width_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    """Diagnostics for heads, hidden widths and slots that `tp` does not divide; each declaration once."""
    tp = number_of(spec.parallel.tp) or 1
    if tp == 1 or not spec.has_model:
        return []
    broken: dict[tuple[int, str], tuple[Node, str, int]] = {}
    for layer in {id(layer): layer for layer in spec.model.layers}.values():
        for node, name, size in divided(layer):
            if not is_divided(tp, name, size):
                broken[id(node), name] = (node, name, size)
    advice = written(changes) if broken else ""
    if len({(node.span(name), size) for node, name, size in broken.values()}) == 1 and len(changes) == 1:
        advice += _wider(spec, *next(iter(broken.values())), tp)
    problems = []
    for node, name, size in broken.values():
        noun = {"hidden": "wide", "slots": "slots"}.get(name, "heads")
        labels = _label(node.span(name) or node.span(), f"{size} {'kv ' if name == 'kv_heads' else ''}{noun}")
        message = f"{size} / {tp} is not whole"
        problems.append(diagnose("MOE0318", spec.parallel.span("tp"), message, labels=labels, help=advice))
    return list(dict.fromkeys(problems))


def _wider(spec: Spec, node: Node, name: str, size: int, tp: int) -> str:
    """A second advice for a single size: the next size that `tp` divides, if ranks and the other rules allow it."""
    wider = -(-size // tp) * tp
    if spec.cluster.ranks % tp:
        return ""
    if isinstance(node, Attention):
        refused = attention(node.replace(**{name: wider}), spec.model.dim, None)
        return "" if any(refused) else f" or `{name} = {wider}`"
    return f" or take `{name} = {wider}`, which is another model" if name == "slots" else f" or `{name} = {wider}`"


def _sequence_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    """A diagnostic if ranks of a tp group would get pieces of different lengths of a sequence, or of an image."""
    tp = sequence_pieces(spec)
    if tp == 1 or not spec.has_model:
        return []
    train, patches = spec.train, spec.model.length
    label = _label(spec.parallel.span("tp"), f"tp = {tp}")
    if patches is not None and patches % tp:
        tokens, help = f"{patches} patches", f"{written(changes)}, or take patches whose number is a multiple of {tp}"
        if spec.model.has_class_token:
            tokens, help = f"{patches} tokens, a class token and patches,", written(changes)
            help += ", or leave `pool` out" if (patches - 1) % tp == 0 else ""
        grid = spec.model.embedding.span()
        return [diagnose("MOE0319", grid, f"{tokens} over {tp} ranks", labels=label, help=help)]
    if patches is None and train is not None and train.sequence is not None and train.sequence % tp:
        message = f"{train.sequence} tokens over {tp} ranks"
        help = _advice(changes, "sequence")
        return [diagnose("MOE0319", train.span("sequence"), message, labels=label, help=help)]
    return []


def _zero_problems(spec: Spec) -> list[Diagnostic]:
    """Refuses `zero` in the file of one `layer`: DistributedDataParallel or FSDP around it cuts its parameters."""
    zero = zero_of(spec)
    if spec.has_model or zero == 0:
        return []
    return [
        diagnose(
            "MOE0326",
            spec.parallel.span("zero"),
            f"`zero = {zero}` in the file of one `layer`",
            labels=_label(spec.layer.span(), "a layer, which `moec.layer` puts into a model of your own"),
            help="leave `zero` out, and put `fully_shard` or DistributedDataParallel around your model",
        )
    ]
