"""`layer.capture`: what surrounds the CUDA graphs. `tests/gpu` captures real ones.

Here `StaticGraph` stands for the graphs. It has what makes them dangerous: one memory for inputs, results and
gradients, overwritten by every run, and a backward that reads the activations of the last forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import layer_text
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.host.layer import MoeLayer

BALANCED = layer_text(ranks=None, balance="[switch_loss(0.01)]")


class StaticGraph:
    def __init__(self, run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> None:
        self.run, self.inputs, self.replays = run, inputs, 0
        self.live = run(*inputs)
        self.outputs = [output.detach().clone() for output in self.live]
        self.gradients: list[Tensor | None] = [torch.zeros_like(i) if i.requires_grad else None for i in inputs]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        self.replays += 1
        for own, other in zip(self.inputs, given, strict=True):
            if own.data_ptr() != other.data_ptr():
                own.copy_(other)
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            self.live = self.run(*self.inputs)
        for place, output in zip(self.outputs, self.live, strict=True):
            place.copy_(output.detach())
        return tuple(output.detach() for output in self.outputs)

    def backward(self, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i in self.inputs if i.requires_grad]
        pairs = [(o, g) for o, g in zip(self.live, gradients, strict=True) if o.requires_grad]
        outs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outs, wanted, grads, retain_graph=True))
        for place in self.gradients:
            if place is not None:
                place.copy_(next(found))
        return tuple(None if place is None else place.detach() for place in self.gradients)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StaticGraph]:
    made: list[StaticGraph] = []

    def make(run: Any, inputs: tuple[Tensor, ...], allow_unused_input: bool) -> Any:
        graph = StaticGraph(run, inputs)
        made.append(graph)

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
                return graph.forward(*given)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                return graph.backward(*gradients)

        return Graphed.apply

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return made


def captured(monkeypatch: pytest.MonkeyPatch, x: Tensor, text: str = BALANCED) -> tuple[MoeLayer, MoeLayer]:
    """A captured layer and an equal one without a graph."""
    monkeypatch.setattr(MoeLayer, "_require_capturable", lambda *_: None)
    layers = [moec.layer(text, seed=2) for _ in range(2)]
    for parameter in (p for each in layers for p in each.parameters()):
        parameter.data *= 10  # else results and gradients are too small for `assert_close` to tell them apart
    layers[0].capture(x)
    return layers[0], layers[1]


def x_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(layer: MoeLayer, x: Tensor) -> list[Tensor]:
    y = layer(x)
    loss = y.square().sum() if layer.aux_loss is None else y.square().sum() + 3 * layer.aux_loss
    loss.backward()
    return [y, layer.expert_counts, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("text", [BALANCED, layer_text(ranks=None)], ids=["balance term", "none"])
def test_replays_give_the_results_and_gradients_of_calls_without_a_graph(
    text: str, monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, plain = captured(monkeypatch, x_of(2, 5, 16), text)
    for seed in range(3):  # gradients accumulate over the passes
        one, other = (train(each, x_of(2, 5, 16, seed=seed)) for each in (layer, plain))
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert graphs[0].replays == 3


def test_a_gradient_and_a_result_that_are_kept_outlive_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    x = x_of(2, 5, 16)
    kept = train(layer, x)
    values = [tensor.detach().clone() for tensor in kept]
    layer.zero_grad(set_to_none=True)
    train(layer, x_of(2, 5, 16, seed=9))
    for tensor, value in zip(kept, values, strict=True):
        torch.testing.assert_close(tensor.detach(), value)
    with torch.no_grad():
        one = layer(x)
        before = one.clone()
        layer(x_of(2, 5, 16, seed=4))
    assert torch.equal(one, before)


def test_two_forward_passes_before_their_backwards_are_right(
    monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, plain = captured(monkeypatch, x_of(2, 5, 16))
    gradients = []
    for each in (layer, plain):
        first, second = (each(x_of(2, 5, 16, seed=seed)) for seed in (1, 2))
        (first.sum() + 2 * second.square().sum()).backward()
        gradients.append([p.grad for p in each.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert graphs[0].replays == 1  # the second pass ran without the graph
    layer(x_of(2, 5, 16)).sum().backward()
    assert graphs[0].replays == 2


def test_a_pass_that_is_dropped_without_a_backward_does_not_end_the_replays(
    monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    for _ in range(3):
        layer(x_of(2, 5, 16))
    layer.aux_loss = None
    assert graphs[0].replays == 3


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_second_backward_after_another_forward_pass_is_refused(
    with_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    y = layer(x_of(2, 5, 16))
    y.sum().backward(retain_graph=True)
    with torch.set_grad_enabled(with_gradient):
        layer(x_of(2, 5, 16, seed=5))
    with pytest.raises(DiagnosticError, match="overwritten its activations") as refused:
        y.sum().backward()
    assert refused.value.diagnostics[0].code == "MOE0744"


def test_a_pass_without_a_gradient_leaves_the_activations_that_wait_for_a_backward(
    monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    gradients = []
    for each in captured(monkeypatch, x_of(2, 5, 16)):
        y = each(x_of(2, 5, 16))
        with torch.no_grad():
            each(x_of(2, 5, 16, seed=2))
        y.square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert graphs[0].replays == 1


def test_gradients_that_a_script_asked_for_outlive_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    parameters, hooked = list(layer.parameters()), list[Tensor]()
    train(layer, x_of(2, 5, 16))  # each parameter has a `.grad` from here on
    parameters[0].register_hook(hooked.append)
    asked = torch.autograd.grad(layer(x_of(2, 5, 16, seed=3)).square().sum(), parameters)
    train(layer, x_of(2, 5, 16, seed=4))
    kept = [*asked, *hooked]
    values = [gradient.clone() for gradient in kept]
    train(layer, x_of(2, 5, 16, seed=5))
    for gradient, value in zip(kept, values, strict=False):
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("how", ["functional_call", "data"])
def test_a_call_with_other_weights_does_not_write_to_the_layers_own(
    how: str, monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    own = {name: p.data for name, p in layer.named_parameters()}
    before = {name: p.clone() for name, p in own.items()}
    other = {name: (2 * p).requires_grad_() for name, p in own.items()}
    if how == "functional_call":
        functional_call(layer, other, (x_of(2, 5, 16),))
    else:  # as averages of weights are tried
        for name, parameter in layer.named_parameters():
            parameter.data = other[name].data
        layer(x_of(2, 5, 16))
    for name, value in before.items():
        assert torch.equal(own[name], value)
    assert graphs[0].replays == 0


def test_a_checkpoint_around_a_captured_layer_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for each in captured(monkeypatch, x_of(2, 5, 16), layer_text(ranks=None)):
        x = x_of(2, 5, 16)
        checkpoint(lambda x, layer=each: layer(3 * x.sin()).square(), x, use_reentrant=False).sum().backward()
        gradients.append([x.grad, *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_that_loses_the_gradient_of_aux_loss_is_refused_with_and_without_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for each in captured(monkeypatch, x_of(2, 5, 16)):
        y = checkpoint(each, x_of(2, 5, 16), use_reentrant=True)
        with pytest.raises(DiagnosticError, match="made aux_loss without a gradient"):
            (y.sum() + each.aux_loss).backward()


@pytest.mark.parametrize(
    "x",
    [x_of(3, 5, 16), x_of(2, 4, 16), x_of(2, 5, 16).detach(), x_of(2, 5, 16).double().detach().requires_grad_()],
    ids=["batch", "tokens", "no gradient", "dtype"],
)
def test_other_inputs_run_without_the_graph(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, plain = captured(monkeypatch, x_of(2, 5, 16))
    torch.testing.assert_close(layer(x), plain(x))
    assert graphs[0].replays == 0


def test_evaluation_frozen_parameters_and_copies_run_without_the_graph(
    monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, _ = captured(monkeypatch, x_of(2, 5, 16))
    layer.eval()(x_of(2, 5, 16))
    layer.train()
    copy.deepcopy(layer)(x_of(2, 5, 16))
    next(layer.parameters()).requires_grad_(False)
    layer(x_of(2, 5, 16)).sum().backward()
    assert graphs[0].replays == 0


@pytest.mark.parametrize("how", ["in place", "data", "load", "assign"])
def test_changed_parameters_are_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, plain = captured(monkeypatch, x_of(2, 5, 16))
    new = {name: p.detach() * 1.5 + 0.1 for name, p in plain.named_parameters()}
    for each in (layer, plain):
        if how in ("load", "assign"):
            each.load_state_dict(
                {**each.state_dict(), **{n: p.clone() for n, p in new.items()}}, assign=how == "assign"
            )
        for name, parameter in each.named_parameters():
            if how == "in place":
                with torch.no_grad():
                    parameter.copy_(new[name])
            elif how == "data":
                parameter.data = new[name].clone()
    for _ in range(2):
        for ours, theirs in zip(*(train(each, x_of(2, 5, 16)) for each in (layer, plain)), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_layer_without_a_cuda_device_or_that_moves_rows_by_other_operators_is_refused() -> None:
    for text, said in (
        (BALANCED, "captured on a CUDA device, and x is on cpu"),
        (layer_text(ranks=None, gate="expert_choice(1.0)"), "cannot be captured"),
    ):
        with pytest.raises(DiagnosticError, match=said) as refused:
            moec.layer(text).capture(x_of(2, 5, 16))
        assert refused.value.diagnostics[0].code == "MOE0744"


@pytest.mark.parametrize("sample", ["x", None])
def test_a_sample_that_is_no_tensor_is_refused(sample: Any) -> None:
    with pytest.raises(DiagnosticError, match="`capture` wants a tensor as a sample, not"):
        moec.layer(BALANCED).capture(sample)


def test_a_layer_over_several_ranks_is_refused_before_anything_runs() -> None:
    layer = moec.layer(BALANCED)
    layer._home.ranks = (0, 1)
    with pytest.raises(DiagnosticError, match="a layer over 2 ranks cannot be captured") as refused:
        layer.capture(x_of(2, 5, 16))
    assert refused.value.diagnostics[0].code == "MOE0744"
    assert layer.expert_counts is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_captured_layer_refuses_second_derivatives_and_computes_tangents_without_its_graph(
    monkeypatch: pytest.MonkeyPatch, graphs: list[StaticGraph]
) -> None:
    layer, plain = captured(monkeypatch, x_of(2, 5, 16))
    x = x_of(2, 5, 16)
    with pytest.raises(DiagnosticError, match=r"MOE0729.*a captured layer has no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with forward_ad.dual_level():
        one, other = (forward_ad.unpack_dual(each(forward_ad.make_dual(x, x))).tangent for each in (layer, plain))
        torch.testing.assert_close(one, other)
    assert graphs[0].replays == 1
