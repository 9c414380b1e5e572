"""The implementations that benchmarks/layer.py times compute the same layer; its check fails if one does not."""

from __future__ import annotations

import pytest
import torch
from layer import Contender, WrongError, check
from layer_peers import IMPLEMENTATIONS, NotRun
from layer_problem import LOADS, Shape, make_problem, reference

SHAPE = Shape(tokens=37, dim=32, hidden=48, experts=8, k=3)


@pytest.mark.parametrize("impl", ["moec", "plain torch", "transformers eager", "transformers grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_an_implementation_agrees_with_the_float64_layer_until_a_weight_changes(
    impl: str, dtype: torch.dtype, load: str
) -> None:
    problem = make_problem(SHAPE, dtype, "cpu", load)
    try:
        layer = IMPLEMENTATIONS["cpu"][impl](problem)
    except NotRun as why:
        pytest.skip(str(why))
    x, exact = problem.x.clone().requires_grad_(), reference(problem)[:2]
    check(Contender(layer), problem, x, exact)
    layer.run(x).backward(problem.grad)
    assert all(parameter.grad is not None for parameter in layer.parameters)
    with torch.no_grad():
        layer.parameters[-1].mul_(1.2)
    with pytest.raises(WrongError, match=r"its (output|input gradient) is wrong"):
        check(Contender(layer), problem, x, exact)


def test_zipf_loads_the_first_expert_most() -> None:
    problem = make_problem(Shape(2000, 16, 8, 16, 2), torch.bfloat16, "cpu", "zipf")
    chosen = (problem.x @ problem.gate.t()).topk(2)[1]
    counts = chosen.flatten().bincount(minlength=16)
    assert counts[0] == counts.max()
    assert counts[0] > 5 * counts[15] > 0


def test_a_shape_reads_as_it_is_written() -> None:
    assert Shape.parse(str(SHAPE)) == SHAPE
    with pytest.raises(ValueError, match="a shape is written as T2048-D512-F1024-E16-k2"):
        Shape.parse("2048x512")
