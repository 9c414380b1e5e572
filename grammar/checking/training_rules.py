"""Rules of `train { … }`: options of an optimizer that do not go together, and parts that do not train."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.spec import Hash, Measured, ModelPart, Optimizer, Spec, Train
from moec.grammar.spec.optimizers import Sgd

SLOWEST = 2**-8
"""bf16 has 8 significant bits: rounding to nearest drops changes below this fraction of a number."""


def optimizer_options(train: Train | None) -> Iterator[Diagnostic]:
    """Refuses `nesterov` without momentum and bf16 states that would not change; warns of decays too slow for bf16."""
    optimizer = train.optimizer if train else None
    if train and train.state == "bf16":
        yield from _narrow_states(train, train.optimizer)
    if isinstance(optimizer, Sgd) and optimizer.nesterov and not optimizer.momentum:
        momentum = optimizer.span("momentum") if optimizer.given("momentum") else None
        yield diagnose(
            "MOE0336",
            optimizer.span("nesterov"),
            "it is one step ahead of the momentum, which is 0",
            labels=labels_at((momentum, "no momentum")),
            help="set `momentum`, commonly 0.9, or leave `nesterov` out",
        )


def _narrow_states(train: Train, optimizer: Optimizer) -> Iterator[Diagnostic]:
    state = train.span("state")
    here = labels_at((state, "states are kept in bf16"))
    if optimizer.wide:
        yield diagnose("MOE0337", optimizer.span(), optimizer.wide, labels=here, help="leave `state` out")
        return
    for node, name in ((part, name) for part in optimizer.parts() for name in part.betas):
        kept = getattr(node, name)
        if 0 < 1 - kept < SLOWEST:
            part, dropped = f"{100 * (1 - kept):.2g} %", f"{100 * SLOWEST:.2g} %"
            message = f"each step replaces {part} of it; bf16 rounds away changes below {dropped}"
            help = "at most 0.996 here (DeepSeek-V3, whose states are bf16: 0.9 and 0.95), or leave `state` out"
            at = node.span(name) if node.given(name) else state
            yield diagnose("MOE0338", at, message, labels=here, help=help, severity=Severity.WARNING)


def measured_lists(train: Train | None) -> Iterator[Diagnostic]:
    """`measured` has a number for each of its `ranks`, or for each and each of its `layers`."""
    loads = train.routing if train else None
    if not isinstance(loads, Measured):
        return
    rows = len(loads.ranks)
    wanted = {"time": rows * len(loads.layers), "kept": rows * len(loads.layers), "most": rows}
    for name, number in wanted.items():
        if (has := len(getattr(loads, name))) != number or not number:
            message = f"`{name}` has {has} numbers, and its ranks and layers want {number or 'some'}"
            help = '`moec compile` writes these lists: name the trace, `trace("loads.npz")`'
            yield diagnose("MOE0514", loads.span(name), message, help=help)


def frozen_parts(spec: Spec) -> Iterator[Diagnostic]:
    """Every part that `frozen` names has parameters, and some other part trains."""
    train = spec.train
    if train is None or not train.frozen:
        return
    parts, span = _parts(spec), train.span("frozen")
    help = f"parts of this {'model' if spec.has_model else 'layer'}: {', '.join(parts)}"
    for part in dict.fromkeys(train.frozen):
        if part == "head" and part not in parts and spec.has_model:
            message = "the head is the embedding's table (`tied`)"
            yield diagnose("MOE0342", span, message, help="`embedding` freezes both uses of the table")
        elif part not in parts:
            yield diagnose("MOE0342", span, f"nothing here has parameters of `{part}`", help=help)
    if set(parts) <= set(train.frozen):
        yield diagnose("MOE0343", span, "every part is frozen", help="leave a part out, such as `experts`")


def _parts(spec: Spec) -> list[ModelPart]:
    """The parts of the file's model or layer that have parameters."""
    layers = spec.model.layers if spec.has_model else ()
    mixtures = list({id(moe): moe for moe in spec.subject.mixtures if moe is not None}.values())
    weighed = [moe for moe in mixtures if moe.residual is not None or getattr(moe.shared, "gated", False)]
    present: dict[ModelPart, bool] = {
        "embedding": spec.has_model,
        "attention": spec.has_model,
        "norms": spec.has_model,
        "ffn": any(layer.ffn is not None for layer in layers),
        "experts": bool(mixtures),
        "gate": bool(weighed) or any(not isinstance(moe.gate, Hash) for moe in mixtures),
        "shared": any(moe.shared is not None for moe in mixtures),
        "residual": any(moe.residual is not None for moe in mixtures),
        "head": spec.has_model and not spec.model.embedding.tied,
    }
    return [part for part, is_there in present.items() if is_there]
