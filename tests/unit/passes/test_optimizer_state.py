"""The number of elements of optimizer states, against the optimizers of torch."""

import pytest
import torch
from support.ranks.torch_optimizers import PaperLion
from support.tables import each_row

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec.optimizers import Adafactor, AdamW, Lion, Muon, Sgd
from moec.passes.cost.optimizers import state_elements
from moec.passes.ir import VECTOR, Matrices

SHAPE = (6, 4, 10)


def kept(optimizer: torch.optim.Optimizer) -> int:
    """Elements of all states, without counts of steps."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


@each_row("shape", [(8,), (6, 10), SHAPE])
@each_row(
    ("spec", "of_torch"),
    [
        (AdamW(), torch.optim.AdamW),
        (Sgd(lr=1.0), torch.optim.SGD),
        (Sgd(lr=1.0, momentum=0.9), lambda p: torch.optim.SGD(p, momentum=0.9)),
        (Lion(), lambda p: PaperLion(p, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})),
        (Adafactor(), torch.optim.Adafactor),
    ],
)
def test_elements_are_those_that_torch_keeps(spec, of_torch, shape):
    expected = kept(of_torch([torch.nn.Parameter(torch.ones(shape))]))
    matrices = Matrices(max(len(shape) - 2, 0), min(len(shape) - 1, 1))
    assert state_elements(shape, spec, matrices) == expected


def test_muon_keeps_a_momentum_of_hidden_matrices_and_adamws_moments_of_all_others():
    assert kept(torch.optim.Muon([torch.nn.Parameter(torch.ones(6, 10))])) == 60
    assert state_elements(SHAPE, Muon(), Matrices(1, 1, hidden=True)) == 240
    assert state_elements(SHAPE, Muon(), Matrices(1, 1)) == 480
    assert state_elements((8,), Muon(), VECTOR) == 16


def test_adafactor_factors_the_matrices_that_the_parameter_declares():
    """Heads and widths together are the rows of a projection of 6 x 4 outputs."""
    assert state_elements(SHAPE, Adafactor(), Matrices(rows=2, hidden=True)) == 6 * 4 + 10
    assert state_elements(SHAPE, Adafactor(), Matrices(rows=1, hidden=True)) == 6 + 4 * 10
    assert state_elements((6, 4), Adafactor(), Matrices(stack=1)) == 24


def test_an_optimizer_without_a_declaration_is_an_error_and_not_an_adamw():
    class Other(AdamW):
        word = "other"

    with pytest.raises(InternalError, match="`other` has no declaration"):
        state_elements((8,), Other(), VECTOR)
