"""Rules inside of one mixture: its gate against its experts, balance terms against the gate, gated feed-forwards."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.source import Span
from moec.grammar.spec import DSelectK, LoadLoss, Moa, Moe, TopK
from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import AttentionRouter, GShard, NoisyTopK
from moec.grammar.suggest import divisor_near


def mixture(moe: Moe) -> Iterator[Diagnostic]:
    """The gate against the experts, and what they are counted over."""
    first, last = moe.parts[0].span("count"), moe.parts[-1].span("count")
    experts = first.to(last) if first and last else None
    yield from choice(moe.gate, moe.num_experts, experts)
    yield from unlearned(moe.gate, moe.num_experts)
    yield from balanced(moe)


def balanced(moe: Moe | Moa) -> Iterator[Diagnostic]:
    """Every balance term needs scores that the gate computes, and choices in the order that the term expects."""
    gate = moe.gate
    for term in moe.balance:
        if isinstance(term, LoadLoss) and term.of == "probabilities":
            if not (isinstance(gate, TopK) and gate.noise):
                message, label = "it is over the noise of `topk`", labels_at((gate.span(), "this gate has none"))
                help = "use `topk(2, noise = 0.1)`, or leave `of` out"
                yield diagnose("MOE0325", term.span("of"), message, labels=label, help=help)
        elif term.needs not in gate.gives:
            fixed = "leave the term out: no term of this gate would have a gradient that balances experts"
            others = f"leave the term out, or use a gate with {term.needs} of its own"
            yield diagnose(
                "MOE0325",
                term.span(),
                f"`{term.word}` is over the {term.needs} of experts",
                labels=labels_at((gate.span(), f"`{gate.word}` computes none")),
                help=others if gate.gives else fixed,
            )
        elif term.counted == "first" and gate.by_expert:
            label = labels_at((gate.span(), f"`{gate.word}` lists choices by expert, not best first"))
            help = "use `switch_loss`, which counts all choices"
            yield diagnose("MOE0325", term.span(), f"`{term.word}` counts first choices", labels=label, help=help)
        elif term.needs == "noise" and gate.choices(moe.num_experts) == moe.num_experts:
            yield diagnose(
                "MOE0345",
                gate.span("k") or gate.span(),
                f"each token takes all {moe.num_experts}",
                labels=labels_at((term.span(), "their loads are equal whatever the noise is")),
                help=f"leave `{term.word}` out, or give each token fewer experts",
            )
        elif why := _equal_loads(moe, term.counted):
            yield diagnose(
                "MOE0345",
                term.span(),
                "it is constant, and has no gradient",
                labels=labels_at((gate.span(), why)),
                help=f"leave `{term.word}` out",
                severity=Severity.WARNING,
            )


def _equal_loads(moe: Moe | Moa, counts: str) -> str:
    """Why a term's loads are equal whatever the router computes; empty if they are not."""
    gate, experts = moe.gate, moe.num_experts
    if experts == 1 or counts not in ("choices", "scores") or isinstance(gate, GShard):  # drops second choices
        return ""
    if gate.equal_loads:
        return "every expert takes as many tokens as the others"
    if gate.choices(experts) != experts or (gate.by_expert and counts == "choices"):
        return ""
    if gate.by_expert:
        return f"it has a choice for each of the {experts} experts, so all scores count"
    return f"each token goes to all {experts} experts"


def unlearned(gate: Node, experts: int) -> Iterator[Diagnostic]:
    """Warns of a gate with constant weights: one choice, normalized over itself. One expert needs no warning."""
    if not isinstance(gate, TopK | NoisyTopK | AttentionRouter) or gate.k != 1 or experts == 1:
        return
    if not isinstance(gate, TopK):
        at, help = "k", "choose two experts or more; `switch` weighs one expert by its probability"
    elif gate.normalize:
        at, help = "normalize", "`normalize = false` weighs an expert by its score; so does `switch`"
    elif gate.order == "after" and gate.score == "softmax":
        at, help = "order", "`order = before` weighs an expert by its probability; so does `switch`"
    else:
        return
    message = "of one choice this makes every weight 1"
    yield diagnose("MOE0321", gate.span(at), message, help=help, severity=Severity.WARNING)


def choice(gate: Node, experts: int, declared: Span | None) -> Iterator[Diagnostic]:
    """There are enough experts for a token's choices, in groups of equal size, also in the groups that it keeps."""
    there = labels_at((declared, f"there are {experts}"))
    k = getattr(gate, "k", 1)
    if k > experts:
        fewer = "" if isinstance(gate, GShard) else f"set `k = {experts}` or less, or "
        help = f"{fewer}give {k} experts or more"
        yield diagnose("MOE0304", gate.span("k") or gate.span(), f"each token wants {k}", labels=there, help=help)
    if isinstance(gate, DSelectK) and (experts < 2 or experts.bit_count() > 1):
        near = 2 ** max(1, round(math.log2(experts)))
        help = f"a code of m bits names 2^m experts: use {near} experts"
        yield diagnose("MOE0346", gate.span(), f"{experts} is no power of two from 2 on", labels=there, help=help)
    if not isinstance(gate, TopK):
        return
    kept = gate.keep_groups or gate.groups
    if experts % gate.groups:
        message = f"{experts} experts do not make {gate.groups} equal groups"
        help = f"set `groups = {divisor_near(experts, gate.groups)}`"
        yield diagnose("MOE0317", gate.span("groups"), message, labels=there, help=help)
    elif kept > gate.groups:
        groups = f"there are {gate.groups} groups" if gate.groups > 1 else "without `groups` there is one"
        label = labels_at((gate.span("groups") or gate.span(), groups))
        fewer = f"set `keep_groups = {gate.groups}` or less, or give more `groups`"
        help = fewer if gate.given("groups") else "give their number, `groups = …`"
        yield diagnose("MOE0317", gate.span("keep_groups"), f"a token cannot keep {kept}", labels=label, help=help)
    elif k <= experts and kept * (experts // gate.groups) < k:
        message = f"{kept} groups hold {kept * (experts // gate.groups)} experts"
        label = labels_at((gate.span("k"), f"each token wants {k}"))
        help = f"set `keep_groups = {math.ceil(k * gate.groups / experts)}`"
        yield diagnose("MOE0317", gate.span("keep_groups"), message, labels=label, help=help)
    elif kept == gate.groups and (gate.groups > 1 or gate.given("group_score")):
        at = gate.span("group_score") if gate.given("group_score") else gate.span("groups")
        message = f"a token may choose from all {gate.groups}" if gate.groups > 1 else "all experts are one group"
        help = "leave it out, or let a token keep fewer groups: `groups = 8, keep_groups = 4`"
        yield diagnose("MOE0347", at, message, help=help, severity=Severity.WARNING)


def gated(ffn: Node | None, moe: Moe | None) -> Iterator[Diagnostic]:
    """Only a shared expert can have a gate of its own."""
    bodies = [ffn, *([moe.residual, *(part.body for part in moe.parts)] if moe else [])]
    for body in bodies:
        if body is not None and getattr(body, "gated", False):
            help = "leave it out, or write this feed-forward as `shared = …`"
            yield diagnose("MOE0314", body.span("gated"), "this is no `shared`", help=help)
