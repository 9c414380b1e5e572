"""`torch.compile` of a plan's graphs: one graph each, the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan, moe_spec, moe_text
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import moec
from moec.grammar import load_text
from moec.runtime.backends.torch import torch_backend
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_layer import Layer

BESIDE = {
    "dropless": "",
    "factor": "capacity = factor(1.25)",
    "factor over the batch": "capacity = factor(1.25, eval = 2.0); group = batch",
    "dynamic": "capacity = dynamic(max = 1.5)",
}
LAYERS = [*((beside, "forward") for beside in BESIDE), ("factor over the batch", "evaluation")]
"""Evaluation has separate graphs only if its capacity differs."""

BACKENDS = ("eager", "aot_eager")
PADDED = "embedding = tokens(padding = 5)"
SHAPES = [(4, 8), (6, 5), (2, 7)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def layer_of(beside: str, mode: str) -> Layer:
    """The mixture's layer of a model for training, or for evaluation."""
    layer = reference(moe_spec(beside=BESIDE[beside])).train(mode == "forward").layers[1]
    assert isinstance(layer, Layer)
    return layer


def through(layer: Layer, x: Tensor) -> list[Tensor]:
    """Results, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    results = layer(x)
    torch.stack([result.square().sum() for result in results if result.is_floating_point()]).sum().backward()
    assert x.grad is not None
    return [*results, x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def compiled_like(layer: Layer, **options: Any) -> Layer:
    """A copy of a layer, of which the graph is compiled."""
    copied = copy.deepcopy(layer)
    copied.function = replace(layer.function, module=copy.deepcopy(layer.function.module))
    copied.function.module.compile(**options)
    return copied


def equal(ours: list[Tensor], exact: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, exact, strict=True))


@pytest.mark.parametrize("backend", some(BACKENDS, ["aot_eager"]))
@pytest.mark.parametrize("which", some(LAYERS, [("dropless", "forward"), ("dynamic", "forward")]))
def test_a_layer_is_one_graph_and_computes_the_same(which: tuple[str, str], backend: str) -> None:
    layer, x = layer_of(*which), torch.randn(4, 8, 16)
    counter = CompileCounterWithBackend(backend)
    compiled = compiled_like(layer, fullgraph=True, backend=counter)
    assert equal(through(compiled, x), through(layer, x))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", LAYERS)
def test_a_layer_takes_any_number_of_tokens_in_one_graph(which: tuple[str, str]) -> None:
    """Whole models of each capacity do so below."""
    layer = layer_of(*which)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compiled_like(layer, fullgraph=True, backend=counter, dynamic=True)
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
@pytest.mark.parametrize(
    ("beside", "padding"),
    [
        ("factor over the batch", PADDED),
        pytest.param("dropless", PADDED, marks=pytest.mark.slow),
        pytest.param("factor", "", marks=pytest.mark.slow),
        pytest.param("dynamic", PADDED, marks=pytest.mark.slow),
    ],
)
def test_a_whole_model_compiles_its_graphs_and_still_checks_each_batch(beside: str, padding: str) -> None:
    compiled, eager = (reference(moe_spec(beside=BESIDE[beside], model=padding), seed=1) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter, dynamic=True)
    assert equal(list(steps(compiled)), list(steps(eager)))
    # Two distinct layers and four graphs of the loss; training and evaluation share them.
    assert counter.frame_count == 6
    with pytest.raises(Exception, match=r"MOE0702.*tokens contain the id 32"):
        compiled(torch.full((1, 4), 32))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("word", ["layer", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_compiled_model_recomputes_and_keeps_the_routers_choices(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    route, calls = torch_backend.route, []
    monkeypatch.setattr(torch_backend, "route", lambda *arguments: (calls.append(1), route(*arguments))[1])
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(ranks=1, ep=1, recompute=word), device="cpu") as job:
        compiled, eager = job.build(seed=1), job.build(seed=1)
        counter = CompileCounterWithBackend("aot_eager")
        compiled.compile(fullgraph=True, backend=counter)
        found = []
        for model in (compiled, eager):
            calls.clear()
            loss = model(tokens, tokens).loss
            assert len(calls) == 2
            loss.backward()
            assert len(calls) == 2
            found.append([loss, *(p.grad for p in model.parameters())])
    assert equal(*found)
    assert counter.frame_count == 6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("gate", "experts"),
    [("gshard", "4 * conv(4)"), pytest.param("topk(2)", "[2 * swiglu(4), 2 * conv(4)]", marks=pytest.mark.slow)],
)
def test_windows_that_leave_a_compiled_graph_get_their_gradients(gate: str, experts: str) -> None:
    """A graph ends at `permute` where a choice may be −1."""
    text = moe_text(gate=gate, expert="gelu(3)", experts=4, depth=2).replace("4 * gelu(3)", experts)
    spec = load_text(text, name="tiny.moe").unwrap()
    compiled, eager = (reference(spec, seed=1) for _ in range(2))
    compiled.compile(backend="aot_eager")
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    for model in (compiled, eager):
        model(tokens, tokens).loss.backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
