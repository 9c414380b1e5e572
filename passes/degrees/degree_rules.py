"""Checks degrees of dense parts against ranks, widths and the batch; each diagnostic names both places in the file."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.checking.rules import attention
from moec.grammar.diagnostics import Diagnostic, Label, diagnose
from moec.grammar.spec import Attention, Spec
from moec.grammar.spec.base import Node
from moec.grammar.stated import SharingDegrees, number_of, pipeline_of, sharing_degrees, stage_ranks
from moec.passes.degrees.expert_degree_rules import expert_problems
from moec.passes.degrees.fitting_degrees import Changes, changes_sharing, dense_changes, divided, undivided, written
from moec.passes.degrees.fitting_expert_degrees import FittingExpertDegrees
from moec.passes.degrees.labels import cluster_label, labelled, not_whole, quotient
from moec.passes.degrees.pipeline_rules import pipeline_problems
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.degrees.stated_degrees import (
    PlacedMixture,
    divisors,
    fitting_microbatches,
    takes_microbatches,
    zero_of,
)


def problems_of(spec: Spec, mixtures: list[PlacedMixture]) -> list[Diagnostic]:
    """A diagnostic for every rule that the stated degrees break."""
    if pipeline := pipeline_problems(spec):
        return pipeline
    changes = dense_changes(spec)
    return [
        *_mesh_problems(spec, changes),
        *expert_problems(spec, mixtures, FittingExpertDegrees.of(spec, mixtures, changes)),
        *_schedule_problems(spec, changes),
        *_batch_problems(spec, changes),
        *_width_problems(spec, changes),
        *_sequence_problems(spec, changes),
        *_zero_problems(spec),
    ]


def _advice(changes: Changes, *names: str) -> str:
    """The changes of `names` in words; all changes if `tp` or `cp` is among them, since the others depend on it."""
    return written(changes if changes_sharing(changes) else {name: changes[name] for name in names})


def _degree_labels(spec: Spec, *words: str) -> tuple[Label, ...]:
    """A label at each of these degrees, `tp` and `cp`, that is above 1."""
    stated = sharing_degrees(spec)
    degrees = {word: getattr(stated, word) for word in words}
    return tuple(
        label for word, n in degrees.items() if n > 1 for label in labelled(spec.parallel.span(word), f"{word} = {n}")
    )


def _mesh_problems(spec: Spec, changes: Changes) -> Iterator[Diagnostic]:
    ranks, parallel, pp = stage_ranks(spec), spec.parallel, pipeline_of(spec).pp
    dp, sharing = number_of(parallel.dp), sharing_degrees(spec)
    if ranks % sharing.sharers == 0 and dp is not None and dp * sharing.sharers != ranks:
        others = [f"{word} = {n}" for word, n in (("pp", pp), ("cp", sharing.cp), ("tp", sharing.tp)) if n > 1]
        degrees = ", ".join((f"dp = {dp}", *(others or ["and every other dense degree is 1"])))
        yield diagnose(
            "MOE0310",
            parallel.span("dp"),
            f"{degrees}, but the cluster has {spec.cluster.ranks} ranks",
            labels=cluster_label(spec) + _degree_labels(spec, "cp", "tp"),
            help=_advice(changes, "dp") + ("" if changes_sharing(changes) else ", or leave `dp` out"),
        )
    if ranks % sharing.tp:
        yield not_whole(spec, parallel.span("tp"), sharing.tp, written(changes))
    elif ranks % sharing.sharers:
        yield not_whole(spec, parallel.span("cp"), sharing.cp, written(changes), sharing.tp, _degree_labels(spec, "tp"))


def _batch_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    train, sharers = spec.train, sharing_degrees(spec).sharers
    if train is None or stage_ranks(spec) % sharers:
        return []
    dp = stage_ranks(spec) // sharers
    if train.batch % dp == 0:
        return _microbatch_problems(spec, train.batch, dp, changes)
    shares = f"{dp} data-parallel ranks" if dp < spec.cluster.ranks else f"{dp} ranks"
    return [
        diagnose(
            "MOE0313",
            train.span("batch"),
            f"{train.batch} {_sequences(spec)} over {shares}",
            labels=cluster_label(spec),
            help=_advice(changes, "batch"),
        )
    ]


def _sequences(spec: Spec) -> str:
    return "images" if spec.has_model and spec.model.length is not None else "sequences"


def _microbatch_problems(spec: Spec, batch: int, dp: int, changes: Changes) -> list[Diagnostic]:
    """A diagnostic if the micro-batches do not divide a rank's sequences: they would differ in size and capacity."""
    parallel, sequences = spec.parallel, batch // dp
    stated, fitting = number_of(parallel.microbatches), fitting_microbatches(spec, sequences)
    if fitting if stated is None else fitting == stated or not takes_microbatches(spec, stated):
        return []
    assert spec.train is not None
    if stated is None:
        pp = pipeline_of(spec).pp
        span, message = parallel.span("pp"), f"no number of micro-batches from {pp} on divides {sequences}"
        most = max((d for d in divisors(sequences) if takes_microbatches(spec, d)), default=0)
        other = f"microbatches = {most}" if most else ""
    else:
        span, message = parallel.span("microbatches"), f"{sequences} / {stated} is not whole"
        other = f"batch = {-(-sequences // stated) * stated * dp}"
    return [
        diagnose(
            "MOE0330",
            span,
            message,
            labels=labelled(
                spec.train.span("batch"), f"{sequences} {_sequences(spec)} per data-parallel rank, of {dp}"
            ),
            help=_advice(changes, "batch" if stated is None else "microbatches")
            + ("" if changes_sharing(changes) or not other else f" or `{other}`"),
        )
    ]


def _schedule_problems(spec: Spec, changes: Changes) -> Iterator[Diagnostic]:
    """Stated micro-batches of which the schedule has no table."""
    stated, (pp, _, schedule) = number_of(spec.parallel.microbatches), pipeline_of(spec)
    if stated is None or takes_microbatches(spec, stated):
        return
    message = f"`{schedule}` takes them in {stated // pp} equal rounds on {pp} ranks"
    if schedule == "dual_pipe_v":
        message = f"`dual_pipe_v` takes at least 2 * {pp}"
    span = spec.parallel.span("microbatches")
    labels = labelled(spec.parallel.span("pp"), f"pp = {pp}")
    yield diagnose("MOE0380", span, message, labels=labels, help=_advice(changes, "microbatches"))


def _width_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    """Diagnostics for heads, hidden widths and slots that `tp` or `cp` does not divide; each declaration once."""
    sharing = sharing_degrees(spec)
    if sharing.sharers == 1 or not spec.has_model:
        return []
    broken: dict[tuple[int, str], tuple[Node, str, int]] = {}
    for layer in {id(layer): layer for layer in spec.model.layers}.values():
        for node, name, size in divided(layer):
            if undivided(sharing, name, size):
                broken[id(node), name] = (node, name, size)
    advice = written(changes) if broken else ""
    if len({(node.span(name), size) for node, name, size in broken.values()}) == 1 and len(changes) == 1:
        advice += _wider(spec, *next(iter(broken.values())), sharing)
    problems = []
    for node, name, size in broken.values():
        noun = {"hidden": "wide", "slots": "slots"}.get(name, "heads")
        labels = labelled(node.span(name) or node.span(), f"{size} {'kv ' if name == 'kv_heads' else ''}{noun}")
        word = undivided(sharing, name, size)
        beside = sharing.tp if word == "cp" else 1
        labels += _degree_labels(spec, "tp") if word == "cp" else ()
        message = f"{quotient(size, getattr(sharing, word), beside)} is not whole"
        problems.append(diagnose("MOE0318", spec.parallel.span(word), message, labels=labels, help=advice))
    return list(dict.fromkeys(problems))


def _wider(spec: Spec, node: Node, name: str, size: int, sharing: SharingDegrees) -> str:
    """A second advice for a single size: the next size that is divided, if ranks and the other rules allow it."""
    pieces = sharing.tp if name == "hidden" else sharing.sharers
    wider = -(-size // pieces) * pieces
    if stage_ranks(spec) % sharing.sharers:
        return ""
    if isinstance(node, Attention):
        refused = attention(node.replace(**{name: wider}), spec.model.dim, None)
        return "" if any(refused) else f" or `{name} = {wider}`"
    return f" or take `{name} = {wider}`, which is another model" if name == "slots" else f" or `{name} = {wider}`"


def _sequence_problems(spec: Spec, changes: Changes) -> list[Diagnostic]:
    """A diagnostic if ranks that share a sequence, or an image, would get pieces of different lengths."""
    pieces = sequence_pieces(spec)
    if pieces == 1 or not spec.has_model:
        return []
    train, patches = spec.train, spec.model.length
    labels = _degree_labels(spec, "cp", "tp") if pieces == sharing_degrees(spec).sharers else _degree_labels(spec, "cp")
    if patches is not None and patches % pieces:
        tokens = f"{patches} patches"
        help = f"{written(changes)}, or take patches whose number is a multiple of {pieces}"
        if spec.model.has_class_token:
            tokens, help = f"{patches} tokens, a class token and patches,", written(changes)
            help += ", or leave `pool` out" if (patches - 1) % pieces == 0 else ""
        grid = spec.model.embedding.span()
        return [diagnose("MOE0319", grid, f"{tokens} over {pieces} ranks", labels=labels, help=help)]
    if patches is None and train is not None and train.sequence is not None and train.sequence % pieces:
        message = f"{train.sequence} tokens over {pieces} ranks"
        help = _advice(changes, "sequence")
        return [diagnose("MOE0319", train.span("sequence"), message, labels=labels, help=help)]
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
            labels=labelled(spec.layer.span(), "a layer, which `moec.layer` puts into a model of your own"),
            help="leave `zero` out, and put `fully_shard` or DistributedDataParallel around your model",
        )
    ]
