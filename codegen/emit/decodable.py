"""Which models can generate: those whose ops compute a token from itself, and attention from the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moec.codegen.emit.emitter import site_of
from moec.passes.ir import Block, Op, Program, Value
from moec.passes.ir import ops as o
from moec.passes.ir.interface import FORWARD, layer_calls, taken_role

OF_ONE_TOKEN: frozenset[type[Op]] = frozenset(
    {
        o.Activation,
        o.Add,
        o.AddBias,
        o.AddLearnedNoise,
        o.AddNoise,
        o.AttendExperts,
        o.BalancedAssignment,
        o.BestScore,
        o.BoundFar,
        o.Call,
        o.ChooseNear,
        o.ChosenHeads,
        o.ChosenWeights,
        o.Clip,
        o.Combine,
        o.CombinePadded,
        o.CountQueues,
        o.DataRanks,
        o.DecodeSelectors,
        o.DetachedShares,
        o.Embed,
        o.EmbedPositions,
        o.EveryExpert,
        o.ExpertLinear,
        o.ExpertMlp,
        o.ExpertMlpPadded,
        o.GateHeads,
        o.HashRoute,
        o.Jitter,
        o.JoinShared,
        o.LargestLoad,
        o.LayerNorm,
        o.Linear,
        o.MaskChoices,
        o.Mix,
        o.MixHeads,
        o.MixtureMlp,
        o.NestedRoute,
        o.NormalNoise,
        o.NumberSegments,
        o.Permute,
        o.PermuteDynamic,
        o.PermuteWeights,
        o.QueueStarts,
        o.RealTokens,
        o.RepeatHeads,
        o.Renormalize,
        o.Replay,
        o.RmsNorm,
        o.Rope,
        o.Route,
        o.RoundWeights,
        o.Router,
        o.SampleExperts,
        o.SampledWeights,
        o.Scale,
        o.SecondAtRandom,
        o.Segments,
        o.SelectExperts,
        o.SigmoidGate,
        o.SumRows,
        o.TakeRoutes,
        o.TokenKeys,
        o.Uniform,
        o.WholeSequences,
    }
)
"""Ops that in evaluation compute a token from no other token."""

LATER: Mapping[type[Op], str] = {
    o.ChooseTokens: "`expert_choice`, whose experts choose among all tokens of a group",
    o.KeepInSegments: "a capacity, under which the choices of a whole text compete for places",
    o.MergeShares: "`smear`, whose expert is made of a whole sequence",
    o.SlotWeights: "`soft`, whose experts take means of a whole sequence",
    o.Windows: "`conv`, which sees neighbours in the sequence",
}
"""What ops belong to that compute a token from others than attention's, in words of the language."""


class Refusal(NamedTuple):
    """What a model has that cannot generate, and where."""

    what: str
    place: str


def live_ops(block: Block) -> tuple[Op, ...]:
    """The ops that the block's first output follows from, in order. Counts and balance terms need the others."""
    wanted, found = {block.outputs[0].name}, list[Op]()
    for op in reversed(block.ops):
        if any(value.name in wanted for value in op.results):
            found.append(op)
            wanted.update(_used(op))
    return tuple(reversed(found))


def _used(op: Op) -> tuple[str, ...]:
    """The operands of an op that generation needs: numbers of texts and of positions come from the cache's places."""
    return () if isinstance(op, o.Segments | o.NumberSegments) else op.operands


def refusal(program: Program) -> Refusal | None:
    """The first thing of the model that computes a token from later ones, or None."""
    forward = program.block(FORWARD)
    if taken_role(program) != "tokens":
        return Refusal("a model of images", str(forward.span or program.name))
    first = {call.block: call.layer for call in reversed(layer_calls(program))}
    for block in (*(program.block(name) for name in sorted(first, key=first.__getitem__)), forward):
        for op in live_ops(block):
            if what := _needs_others(block, op):
                return Refusal(what, site_of(op, first.get(block.name)))
    return None


def _needs_others(block: Block, op: Op) -> str:
    if isinstance(op, o.Attention):
        return "" if op.causal else "attention to later tokens (`causal = false`)"
    if isinstance(op, o.Capacity):
        return "" if _never_drops(block, op) else "a capacity, under which the choices of several tokens compete"
    if isinstance(op, o.Conversion):
        return ""
    return "" if type(op) in OF_ONE_TOKEN else LATER.get(type(op), f"`{op.mnemonic}`, which looks at several tokens")


def _never_drops(block: Block, op: o.Capacity) -> bool:
    """Whether in evaluation an expert has a place for every token: `factor · k ≥ experts`."""
    given: dict[str, Value] = op.named(block.operands(op))
    k, scored = given["experts"].shape[-1], given.get("starts") or given.get("logits")
    experts = scored.shape[-1] if scored is not None else getattr(op, "num_experts", 0)
    if not isinstance(k, int) or not isinstance(experts, int):
        return False
    return op.eval_parts * k >= op.eval_whole * experts
