"""The attributes of the op `rope` from the words of the language: which dims of a head turn, and how fast.

Frequencies are functions of the file, the model's context among it, and of no batch's length: shorter sequences have
the same positions. transformers' `modeling_rope_utils` computes the same for sequences as long as the context.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from moec.grammar.spec import Linear, Llama3, LongRope, Ntk, Rope, Yarn


def rotation(rope: Rope, width: int, context: int | None) -> dict[str, Any]:
    """Attributes of `rope` on heads `width` wide, in a model whose longest sequence has `context` tokens, None where
    the file does not say it.

    A part of the dims turns as a head of that part's width would (GPT-NeoX, Black et al. 2022, section 2.1.1).
    """
    turning = rope.turning(width)
    frequencies, factor = scaled(rope, turning, context)
    return {
        "theta": rope.theta,
        "width": 0 if turning == width else turning,
        "interleaved": rope.interleaved,
        "frequencies": tuple(min(value, sys.float_info.max) for value in frequencies),
        "factor": factor,
    }


def score_factor(rope: Rope | None) -> float:
    """The factor on scores that sharpens all dimensions: yarn's `mscale_all`, once for queries and once for keys."""
    scaling = rope.scaling if rope is not None else None
    return _sharpening(scaling.factor, scaling.mscale_all) ** 2 if isinstance(scaling, Yarn) else 1.0


def scaled(rope: Rope, width: int, context: int | None) -> tuple[list[float], float]:
    """The radians per position of each of `width / 2` pairs, and the factor on the dims that turn; no radians where
    `theta` says them."""
    pairs = range(width // 2)
    plain = [rope.theta ** (-2 * i / width) for i in pairs]
    match rope.scaling:
        case None:
            return [], 1.0
        case Linear(factor=factor):
            return [frequency / factor for frequency in plain], 1.0
        case Ntk() as scaling:
            return _ntk(scaling, rope.theta, width, context), 1.0
        case Llama3() as scaling:
            return [_llama3(scaling, frequency) for frequency in plain], 1.0
        case LongRope() as scaling:
            return _longrope(scaling, plain, context)
        case Yarn() as scaling:
            return _yarn(scaling, rope.theta, plain), _yarn_factor(scaling)


def _ntk(scaling: Ntk, theta: float, width: int, context: int | None) -> list[float]:
    """A base times (factor · context / original − (factor − 1)) ^ (d / (d − 2)): "dynamic NTK", here for the context.

    The base's power is a sum of logarithms, which does not overflow. Pair 0 turns by 1 with any base.
    """
    assert context is not None, "the language requires a context or a train.sequence"
    original = scaling.original or context
    stretch = scaling.factor * max(context, original) / original - (scaling.factor - 1)
    power = width / (width - 2) if width > 2 else 0.0
    log_base = math.log(theta) + power * math.log(stretch)
    return [math.exp(-2 * i / width * log_base) for i in range(width // 2)]


def _llama3(scaling: Llama3, frequency: float) -> float:
    """Frequencies are kept above `high` turns in the original context, divided below `low`, mixed between."""
    turns = scaling.original * frequency / (2 * math.pi)
    high_share = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return (1 - high_share) * frequency / scaling.factor + high_share * frequency


def _longrope(scaling: LongRope, plain: list[float], context: int | None) -> tuple[list[float], float]:
    """Each frequency over its factor; beyond the original context factors are the long ones, and vectors grow by
    sqrt(1 + ln(context / original) / ln(original)) (Ding et al. 2024, section 3.3)."""
    assert context is not None, "the language requires a context or a train.sequence"
    if context <= scaling.original:
        return [frequency / factor for frequency, factor in zip(plain, scaling.short, strict=True)], 1.0
    growth = math.log(context / scaling.original) / math.log(scaling.original)
    return [frequency / factor for frequency, factor in zip(plain, scaling.long, strict=True)], math.sqrt(1 + growth)


def _yarn(scaling: Yarn, theta: float, plain: list[float]) -> list[float]:
    """Frequencies of many turns are kept, of few divided by the factor; a ramp over pairs between (Peng et al. 2023,
    equations 17 to 21, with the ramp of their code: over the pairs at which wavelengths turn that often)."""
    width = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return width * math.log(scaling.original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    divided = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [
        frequency / scaling.factor * part + frequency * (1 - part)
        for frequency, part in zip(plain, divided, strict=True)
    ]


def _yarn_factor(scaling: Yarn) -> float:
    """The factor on the dims that turn: their sharpening over that of all dimensions, as in DeepSeek's code."""
    return _sharpening(scaling.factor, scaling.mscale or 1.0) / _sharpening(scaling.factor, scaling.mscale_all)


def _sharpening(factor: float, mscale: float) -> float:
    """sqrt(1 / t) of Peng et al. 2023, equation 22, with a factor of DeepSeek's before the logarithm."""
    return 0.1 * mscale * math.log(factor) + 1
