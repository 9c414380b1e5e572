"""Every operator in every mode of differentiation: what it gives is right, or it refuses (MOE0729).

Central differences of results and of first gradients say what is right. The operators of `test_opcheck.py`, so that a
new one is tried too; those that need a process group are in `tests/distributed/test_conversions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from places import Numbers
from test_opcheck import IN_A_GROUP, TABLE, kind
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.ops.registry import INTEGER_OPERATORS

STEP = 1e-5
OF_GENERATION = {"cached_attention", "mixture_of_few", "turn"}
"""They refuse every derivative, as does every operator that is the backward of another."""

INSIDE = {"expert_mlp": 1, "masked_attention": 1, "mixture_mlp": 1, "mixture_mlp_recomputed": 1}
"""How many of the results have a gradient, where not all floating ones have."""


class Call:
    """One call as a function of its floating arguments, with a direction of each and a weight of each result."""

    def __init__(self, name: str, arguments: Sequence[Any], draw: torch.Generator) -> None:
        self.name, self.operator = name, getattr(torch.ops.moec, name).default
        self.arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        self.places = [i for i, x in enumerate(self.arguments) if isinstance(x, Tensor) and x.is_floating_point()]
        self.at = tuple(self.arguments[i] for i in self.places)
        self.directions = tuple(self.random(x, draw) for x in self.at)
        self.weights = [self.random(x, draw) for x in self(*self.at)]

    @staticmethod
    def random(like: Tensor, draw: torch.Generator) -> Tensor:
        return torch.randn(like.shape, generator=draw, dtype=like.dtype)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The differentiable results."""
        arguments = [
            x.clone() if self.name == "cached_attention" and isinstance(x, Tensor) else x for x in self.arguments
        ]
        for place, x in zip(self.places, given, strict=True):
            arguments[place] = x
        results = self.operator(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(x for x in results[: INSIDE.get(self.name)] if x.is_floating_point())

    def weighted(self, *given: Tensor) -> Tensor:
        """A sum that has a gradient also where the results have none."""
        terms = [(x * w).sum() for x, w in zip(self(*given), self.weights, strict=True)]
        return torch.stack([*terms, *(0 * x.sum() for x in given)]).sum()

    def gradients(self, *given: Tensor, again: bool = False) -> tuple[Tensor, ...]:
        own = given if again else tuple(x.detach().requires_grad_() for x in given)
        return torch.autograd.grad(self.weighted(*own), own, create_graph=again)

    def change(self, function: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
        """The derivative of the function in the direction, by central differences."""
        ends = [function(*(x + s * d for x, d in zip(self.at, self.directions, strict=True))) for s in (STEP, -STEP)]
        return [(one - other) / (2 * STEP) for one, other in zip(*ends, strict=True)]


def backward(call: Call) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """First gradients."""
    right = [(x * w).sum() for x, w in zip(call.change(call), call.weights, strict=True)]
    found = [(g * d).sum() for g, d in zip(call.gradients(*call.at), call.directions, strict=True)]
    yield [torch.stack(found).sum()], [torch.stack(right).sum()]


def forward(call: Call) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """What is found, and what is right: by `torch.func.jvp`, and by dual numbers of tensors without a gradient."""
    right = call.change(call)
    yield jvp(call, call.at, call.directions)[1], right
    with forward_ad.dual_level():
        results = call(*map(forward_ad.make_dual, call.at, call.directions))
        tangents = [forward_ad.unpack_dual(x).tangent for x in results]
    yield [torch.zeros_like(r) if t is None and not r.any() else t for t, r in zip(tangents, right, strict=True)], right


def second(call: Call) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Twice backward, forward over backward, and the same by `torch.func`."""
    right, everything = call.change(call.gradients), tuple(range(len(call.at)))
    own = tuple(x.detach().requires_grad_() for x in call.at)
    moved = sum((g * d).sum() for g, d in zip(call.gradients(*own, again=True), call.directions, strict=True))
    yield torch.autograd.grad(moved + 0 * torch.stack([x.sum() for x in own]).sum(), own, materialize_grads=True), right
    yield jvp(grad(call.weighted, everything), call.at, call.directions)[1], right


def batched(call: Call) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Results, and gradients by `torch.func.grad`, of two calls at once."""
    two = tuple(torch.stack([x, 1.01 * x]) for x in call.at)
    everything = tuple(range(len(call.at)))
    for together, one in ((call, call), (grad(call.weighted, everything), call.gradients)):
        each = [one(*(x[i] for x in two)) for i in range(2)]
        yield vmap(together)(*two), [torch.stack(pair) for pair in zip(*each, strict=True)]


def refusal(call: Call, mode: Callable[[Call], Iterator[Any]]) -> str:
    """The code of the error, "" where what is found is right; anything else fails.

    Torch itself refuses to batch an operator that writes to an argument.
    """
    try:
        for found, right in mode(call):
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m: f"{call.name}: {m}")
    except DiagnosticError as error:
        return error.diagnostics[0].code
    except RuntimeError as error:
        if call.name != "cached_attention" or "Batching rule not implemented" not in str(error):
            raise
        return "MOE0729"
    return ""


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script")
def test_every_operator_has_each_derivative_or_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "torch")
    draw, seen, codes = torch.Generator().manual_seed(0), set[Any](), dict[str, set[str]]()
    for family in TABLE:
        for name, arguments in TABLE[family](Numbers(torch.float64)):
            if kind(name, arguments) in seen or name in INTEGER_OPERATORS:
                continue
            seen.add(kind(name, arguments))
            call = Call(name, arguments, draw)
            codes.setdefault(name, set()).update(refusal(call, mode) for mode in (backward, forward, second, batched))
    schemas = torch._C._jit_get_all_schemas()
    registered = {schema.name.removeprefix("moec::") for schema in schemas if schema.name.startswith("moec::")}
    assert registered - IN_A_GROUP - {*INTEGER_OPERATORS} == {*codes}
    undifferentiated = {name for name in codes if name in OF_GENERATION or name.endswith("_backward")}
    assert codes == {name: {"MOE0729"} if name in undifferentiated else {""} for name in codes}


def test_operators_of_integers_give_no_floating_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_BACKEND", "torch")
    tried = set[str]()
    for family in TABLE:
        for name, arguments in TABLE[family](Numbers(torch.float64)):
            if name in INTEGER_OPERATORS:
                results = getattr(torch.ops.moec, name).default(*arguments)
                assert not any(x.is_floating_point() for x in (results if isinstance(results, tuple) else (results,)))
                tried.add(name)
    assert tried == {*INTEGER_OPERATORS} - IN_A_GROUP
