"""Makes weights so large that values exceed the limits of `clip` and of clamped activations. With initial weights no
value does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from moec.grammar.spec import Spec
from moec.passes.ir import Block, Op
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.ops import Activation, AddBias, Clip
from moec.passes.ir.ops.mixture_ops import Activates
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.unsharded import Unsharded


def limits_of(spec: Spec) -> dict[str, float]:
    """The parameters whose products are clipped or clamped in the unsharded model, by full name, and the limits."""
    program = reference_program(spec)
    return {
        f"layers.{call.layer}.{name}": limit
        for call in layer_calls(program)
        for name, limit in _limits_in(program.block(call.block))
    }


@contextmanager
def beyond_limits(model: Unsharded, limits: Mapping[str, float]) -> Iterator[None]:
    """Multiplies these parameters, so that a third of their products or more exceed the limit; restores them."""
    factors = {name: _factor(model.get_parameter(name), limit) for name, limit in limits.items()}
    _multiply(model, factors)
    try:
        yield
    finally:
        _multiply(model, {name: 1 / factor for name, factor in factors.items()})


def _limits_in(block: Block) -> Iterator[tuple[str, float]]:
    producers = {value.name: op for op in block.ops for value in op.results}
    for op in block.ops:
        if isinstance(op, Activates) and op.clamp is not None:
            yield op.named(op.operands)["up"][1:], op.clamp
            continue
        limit = op.limit if isinstance(op, Clip) else op.clamp if isinstance(op, Activation) else None
        if limit is not None and (weight := _weight_of(op.operands[0], producers)):
            yield weight, limit


def _weight_of(value: str, producers: Mapping[str, Op]) -> str:
    """The name of the parameter that a value is a product of; empty if there is none."""
    while value in producers:
        op = producers[value]
        parameters = [name[1:] for name in op.operands if name[0] == "@"]
        if parameters and not isinstance(op, AddBias):
            return parameters[0]
        value = op.operands[0]
    return ""


def _factor(weight: Tensor, limit: float) -> float:
    """A power of two, 1 at least: with it, products of `weight` with normal numbers deviate by `limit` or more."""
    outputs = weight.numel() // weight.shape[-1] if weight.dim() > 1 else weight.numel()
    deviation = float(weight.detach().double().norm()) / math.sqrt(outputs)
    return 2.0 ** max(math.ceil(math.log2(limit / deviation)), 0)


@torch.no_grad()
def _multiply(model: Unsharded, factors: Mapping[str, float]) -> None:
    for name, factor in factors.items():
        model.get_parameter(name).mul_(factor)
