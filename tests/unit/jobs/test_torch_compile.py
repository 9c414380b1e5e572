"""`torch.compile` of what a plan compiles to: one graph, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import moe_spec
from torch import Tensor, fx
from torch._dynamo.testing import CompileCounterWithBackend

from moec.runtime.module import PlanModule
from moec.runtime.reference import reference

BESIDE = {
    "dropless": "",
    "factor": "capacity = factor(1.25)",
    "factor over the batch": "capacity = factor(1.25, eval = 2.0); group = batch",
    "dynamic": "capacity = dynamic(max = 1.5)",
}
LAYERS = [*((beside, "forward") for beside in BESIDE), ("factor over the batch", "evaluation")]
"""Evaluation has graphs of its own only where its capacity is another."""

BACKENDS = ("eager", "aot_eager")
SHAPES = [(4, 8), (6, 5), (2, 7)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def layer_of(beside: str, mode: str) -> fx.GraphModule:
    """The mixture's layer of the graphs for training, or for evaluation."""
    found = reference(moe_spec(beside=BESIDE[beside])).__dict__[f"_{mode}_graph"].get_submodule("layers.1")
    assert isinstance(found, fx.GraphModule)
    return found


def through(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Results, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    results = layer(x)
    torch.stack([result.square().sum() for result in results if result.is_floating_point()]).sum().backward()
    assert x.grad is not None
    return [*results, x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def equal(ours: list[Tensor], exact: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, exact, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("beside", "mode"), LAYERS)
def test_a_layer_is_one_graph_and_computes_the_same(beside: str, mode: str, backend: str) -> None:
    layer, x = layer_of(beside, mode), torch.randn(4, 8, 16)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    assert equal(through(compiled, x), through(layer, x))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("beside", "mode"), LAYERS)
def test_a_layer_takes_any_number_of_tokens_in_one_graph(beside: str, mode: str) -> None:
    layer = layer_of(beside, mode)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for shape in SHAPES:
        x = torch.randn(*shape, 16)
        assert equal(through(compiled, x), through(layer, x)), shape
    assert counter.frame_count == 1


def steps(model: PlanModule) -> Iterator[Tensor]:
    for shape in SHAPES:
        tokens = torch.randint(32, shape, generator=torch.Generator().manual_seed(0))
        for mode in (True, False):
            model.train(mode).zero_grad()
            output = model(tokens, tokens)
            assert output.loss is not None
            output.loss.backward()
            yield from (output.logits, output.loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks, and hides it
@pytest.mark.parametrize("padding", ["", "embedding = tokens(padding = 5)"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_whole_model_compiles_its_graphs_and_still_checks_each_batch(beside: str, padding: str) -> None:
    compiled, eager = (reference(moe_spec(beside=BESIDE[beside], model=padding), seed=1) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter, dynamic=True)
    assert equal(list(steps(compiled)), list(steps(eager)))
    # The forward pass, four graphs of the loss, and in evaluation another forward pass where its capacity is another.
    assert counter.frame_count == (6 if "eval" in BESIDE[beside] else 5)
    with pytest.raises(Exception, match=r"MOE0702.*tokens contain the id 32"):
        compiled(torch.full((1, 4), 32))
