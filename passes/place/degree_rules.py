"""Checks degrees against ranks, widths and the batch; each diagnostic names both places in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.rules import numbered
from moec.grammar.source import Span
from moec.grammar.spec import Conv, Layer, Moe, Soft, Spec
from moec.grammar.spec.base import Node
from moec.passes.place.stated_degrees import Mixtures, Stated, divisors, number_of, stated_eps, zero_of


def problems_of(spec: Spec, mixtures: Mixtures) -> list[Diagnostic]:
    """A diagnostic for every rule that the stated degrees break."""
    return [
        *_mesh_problems(spec),
        *_expert_problems(spec, mixtures),
        *_batch_problems(spec),
        *_width_problems(spec),
        *_zero_problems(spec),
    ]


def _cluster_label(spec: Spec) -> tuple[Label, ...]:
    ranks = spec.cluster.ranks
    return _label(spec.cluster.span(), f"{ranks} {'rank' if ranks == 1 else 'ranks'}")


def _label(span: Span | None, message: str) -> tuple[Label, ...]:
    return (Label(span=span, message=message),) if span else ()


def _mesh_problems(spec: Spec) -> list[Diagnostic]:
    ranks, parallel = spec.cluster.ranks, spec.parallel
    dp, tp = number_of(parallel.dp), number_of(parallel.tp) or 1
    problems = []
    if ranks % tp == 0 and dp is not None and dp * tp != ranks:
        problems.append(
            diagnose(
                "MOE0310",
                parallel.span("dp"),
                f"dp = {dp}, {f'tp = {tp}' if tp > 1 else 'and every other dense degree is 1'}, "
                f"but the cluster has {ranks} ranks",
                labels=_cluster_label(spec) + _label(parallel.span("tp") if tp > 1 else None, f"tp = {tp}"),
                help=f"set `dp = {ranks // tp}`, or leave `dp` out",
            )
        )
    stated = [("tp", tp, parallel.span("tp")), *(("ep", given.ep, given.span) for _, given in stated_eps(spec))]
    for name, degree, span in stated:
        if ranks % degree:
            below = max(d for d in divisors(ranks) if d <= degree)
            problems.append(
                diagnose(
                    "MOE0312",
                    span,
                    f"{ranks} / {degree} is not whole",
                    labels=_cluster_label(spec),
                    help=f"set `{name} = {below}`",
                )
            )
    return problems


def _expert_problems(spec: Spec, mixtures: Mixtures) -> list[Diagnostic]:
    problems: list[Diagnostic] = []
    for moe, stated, layers in mixtures:
        count = moe.num_experts
        if stated is None:
            continue
        ep = stated.ep
        if count % ep == 0:
            problems += _part_problems(moe, stated)
            continue
        ways = [f"`ep = {d}` ({count // d} per rank)" for d in divisors(spec.cluster.ranks) if count % d == 0][-1:]
        more = -(-count // ep) * ep
        ways.append(f"`experts = {more} * …` ({more // ep} per rank)")
        declared = moe.span("experts")
        where = f"{count} experts declared here ({numbered(layers)})"
        problems.append(
            diagnose(
                "MOE0311",
                stated.span,
                f"{count} / {ep} leaves {count % ep} experts over",
                labels=_label(declared, where),
                help=f"set {' or '.join(ways)}",
            )
        )
    return problems


def _part_problems(moe: Moe, stated: Stated) -> Iterator[Diagnostic]:
    """A diagnostic for each part of the experts that `ep` does not divide: a rank has as many of each as any other."""
    for part in moe.parts:
        if part.count % stated.ep:
            fitting = math.gcd(*moe.counts)
            yield diagnose(
                "MOE0355",
                stated.span,
                f"{part.count} / {stated.ep} leaves {part.count % stated.ep} experts over",
                labels=_label(part.span(), f"{part.count} experts of this kind"),
                help=f"set `ep` to a divisor of {fitting}"
                if fitting > 1
                else "set `ep = 1`, or other numbers of experts",
            )


def _batch_problems(spec: Spec) -> list[Diagnostic]:
    train, tp = spec.train, number_of(spec.parallel.tp) or 1
    if train is None or spec.cluster.ranks % tp:
        return []
    dp = spec.cluster.ranks // tp
    if train.batch % dp == 0:
        return _microbatch_problems(spec, train.batch, dp)
    shares = f"{dp} data-parallel ranks" if tp > 1 else f"{dp} ranks"
    return [
        diagnose(
            "MOE0313",
            train.span("batch"),
            f"{train.batch} {_of_batch(spec)} over {shares}",
            labels=_cluster_label(spec),
            help=f"set `batch = {-(-train.batch // dp) * dp}`",
        )
    ]


def _of_batch(spec: Spec) -> str:
    return "images" if spec.has_model and spec.model.length is not None else "sequences"


def _microbatch_problems(spec: Spec, batch: int, dp: int) -> list[Diagnostic]:
    """A diagnostic if the micro-batches do not divide a rank's sequences: they would differ in size and capacity."""
    parallel, sequences = spec.parallel, batch // dp
    parts = number_of(parallel.microbatches) or 1
    if sequences % parts == 0:
        return []
    assert spec.train is not None
    below, more = max(d for d in divisors(sequences) if d < parts), -(-sequences // parts) * parts * dp
    return [
        diagnose(
            "MOE0330",
            parallel.span("microbatches"),
            f"{sequences} / {parts} is not whole",
            labels=_label(spec.train.span("batch"), f"{sequences} {_of_batch(spec)} per data-parallel rank, of {dp}"),
            help=f"set `microbatches = {below}` or `batch = {more}`",
        )
    ]


def _width_problems(spec: Spec) -> list[Diagnostic]:
    """Diagnostics for heads, hidden widths and sequences that `tp` does not divide; each declaration once."""
    tp = number_of(spec.parallel.tp) or 1
    if tp == 1:
        return []
    found: dict[tuple[int, str], Diagnostic] = {}
    for layer in spec.model.layers:
        for node, name, size in _divided(layer):
            if size % tp == 0 or (name == "kv_heads" and tp % size == 0):
                continue
            fitting = [f"`tp = {max(d for d in divisors(math.gcd(size, spec.cluster.ranks)))}`"]
            wider = f"`{name} = {-(-size // tp) * tp}`"
            fitting.append(f"take {wider}, which is another model" if name == "slots" else wider)
            what = {"hidden": "wide", "slots": "slots"}.get(name, "heads")
            found[id(node), name] = diagnose(
                "MOE0318",
                spec.parallel.span("tp"),
                f"{size} / {tp} is not whole",
                labels=_label(node.span(name) or node.span(), f"{size} {'kv ' if name == 'kv_heads' else ''}{what}"),
                help=f"set {' or '.join(fitting)}",
            )
    problems = list(dict.fromkeys(found.values()))
    train, patches = spec.train, spec.model.length
    if patches is not None and patches % tp:
        grid, help = spec.model.embedding.span(), "take a size of patches whose grid has a multiple of `tp` patches"
        tokens = f"{patches} patches"
        if spec.model.has_class_token:
            tokens = f"{patches} tokens, a class token and patches,"
            help = "a grid of odd sides and `tp = 2` fit, or leave `pool` out"
        label = _label(spec.parallel.span("tp"), f"tp = {tp}")
        problems.append(diagnose("MOE0319", grid, f"{tokens} over {tp} ranks", labels=label, help=help))
    elif train is not None and train.sequence is not None and train.sequence % tp:
        problems.append(
            diagnose(
                "MOE0319",
                train.span("sequence"),
                f"{train.sequence} tokens over {tp} ranks",
                labels=_label(spec.parallel.span("tp"), f"tp = {tp}"),
                help=f"set `sequence = {-(-train.sequence // tp) * tp}`",
            )
        )
    return problems


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


def _divided(layer: Layer) -> Iterator[tuple[Node, str, int]]:
    """The sizes of a layer that `tp` must divide: the declaring node, the field's name, the size."""
    attention = layer.attention
    yield attention, "heads", attention.heads
    if (kv_heads := getattr(attention, "kv_heads", None)) is not None:
        yield attention, "kv_heads", kv_heads
    if layer.moe is not None and isinstance(layer.moe.gate, Soft):
        yield layer.moe.gate, "slots", layer.moe.gate.slots
    bodies = [layer.ffn] if layer.moe is None else [layer.moe.shared, layer.moe.residual]
    for body in bodies:
        hidden = None if isinstance(body, Conv) else getattr(body, "hidden", None)  # whole on every rank
        if body is not None and isinstance(hidden, int):
            yield body, "hidden", hidden
