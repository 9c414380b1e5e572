"""The table of activations, against the language's classes and the functions in torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from moec.grammar.spec import Activated
from moec.grammar.spec.base import field_names
from moec.grammar.spec.experts import FeedForward
from moec.passes.ir.activations import ACTIVATIONS, Function
from moec.runtime.backends.torch.torch_activations import FUNCTIONS
from moec.runtime.ops import compositions

TABLE = {kind.function.name: kind.function for kind in ACTIVATIONS.values()}
functions = pytest.mark.parametrize("function", TABLE.values(), ids=TABLE)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
CLASSES = {cls.word: cls for cls in get_args(FeedForward) if issubclass(cls, Activated)}


def composed(function: Function, x: Tensor) -> Tensor:
    """The function as graphs compute it."""
    for name in function.aten:
        x = getattr(torch.ops.aten, name).default(x)
    return x


def test_every_activation_is_a_word_of_the_language_and_has_its_function_in_torch() -> None:
    assert {*CLASSES, "identity"} == ACTIVATIONS.keys()  # of low-rank maps
    assert TABLE.keys() == FUNCTIONS.keys() == compositions.FUNCTIONS.keys()


def test_the_parameters_of_an_activation_are_the_fields_that_its_class_adds() -> None:
    common = set(field_names(Activated))
    for word, kind in ACTIVATIONS.items() - {("identity", ACTIVATIONS["identity"])}:
        assert set(kind.parameters) == set(field_names(CLASSES[word])) - common


def test_a_smooth_activation_has_as_many_parts_and_operators() -> None:
    for kind in ACTIVATIONS.values():
        if kind.smooth:
            smooth = ACTIVATIONS[kind.smooth]
            assert not smooth.smooth
            assert (smooth.parts, len(smooth.function.aten)) == (kind.parts, len(kind.function.aten))


@dtypes
@functions
def test_a_function_and_its_gradient_are_those_of_its_composition(function: Function, dtype: torch.dtype) -> None:
    x, grad = torch.randn(999, dtype=dtype, requires_grad=True), torch.randn(999, dtype=dtype)
    expected = composed(function, x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    forward, backward = FUNCTIONS[function.name]
    out, grad_x = torch.empty_like(x), torch.empty_like(x)
    forward(x.detach(), out=out)
    backward(grad, x.detach(), grad_input=grad_x)
    assert torch.equal(out, expected)
    assert torch.equal(grad_x, expected_grad)
    backward(grad, x.detach(), grad_input=grad)  # in place
    assert torch.equal(grad, grad_x)


@functions
def test_a_function_keeps_nan(function: Function) -> None:
    x = torch.tensor([torch.nan, 1.0])
    out = torch.empty_like(x)
    FUNCTIONS[function.name][0](x, out=out)
    assert out.isnan().tolist() == [True, False]
