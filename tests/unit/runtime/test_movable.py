"""What of experts moves with them: once each, and nothing of which rows are not its own."""

from __future__ import annotations

import pytest
import torch
from support.tables import each_row
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moec.runtime.weights.movable import CannotMove, Movable

ROWS = torch.arange(48.0).view(4, 3, 4)


def movable(*states: Tensor) -> Movable:
    found = Movable("layer 1", 4)
    for number, state in enumerate(states):
        found.add_state(f"state {number}", state, nn.Parameter(torch.zeros(4, 3, 4)))
    found.require_apart()
    return found


@each_row(
    ("states", "parts"),
    [
        ((ROWS, ROWS, ROWS.view(4, 3, 4)), 1),
        ((ROWS, ROWS.clone(), ROWS.mT.contiguous().mT), 3),
        ((ROWS[..., :2], ROWS[..., 2:], ROWS.clone()[..., ::2]), 3),  # between each other
        ((ROWS[:, :1], ROWS[:, 1:2], torch.tensor(3.0)), 2),
        ((ROWS[:, :1], ROWS.as_strided((4, 1, 4), (12, 1, 1))), 1),
        ((ROWS[..., :2], ROWS[..., 2:].view(torch.int32)), 2),
    ],
)
def test_tensors_that_lie_apart_move_once_each(states: tuple[Tensor, ...], parts: int) -> None:
    assert len(movable(*states).parts) == parts


@each_row(
    ("states", "words"),
    [
        ((ROWS, ROWS[..., :2]), "share memory"),
        ((ROWS[:, :2], ROWS[:, 1:]), "share memory"),
        ((ROWS, ROWS.view(torch.int32)), "share memory"),
        ((ROWS[:1].expand(4, 3, 4),), "share memory"),
        ((ROWS[..., :1].expand(4, 3, 4),), "share memory"),
        ((torch.zeros(12).as_strided((4, 3, 2), (2, 2, 1)),), "share memory"),
        ((torch.zeros(48).as_strided((4, 3, 4), (5, 10, 4)),), "share memory"),
        ((TwoTensor(ROWS, ROWS),), "`state 0` of experts of layer 1 is a tensor of type TwoTensor"),
        ((torch.zeros(3),), r"`state 0`, a Tensor \[3\], of experts of layer 1"),
    ],
)
def test_tensors_whose_rows_are_not_their_own_do_not_move(states: tuple[Tensor, ...], words: str) -> None:
    with pytest.raises(CannotMove, match=words):
        movable(*states)


def test_a_tensor_of_inference_mode_does_not_move() -> None:
    with torch.inference_mode():
        made = torch.zeros(4, 3, 4)
    with pytest.raises(CannotMove, match="was made in inference mode"):
        movable(made)


def test_checksums_know_names_dtypes_and_values() -> None:
    plain, wide, beside_one = (
        movable(*states).sums() for states in ((ROWS,), (ROWS.double(),), (ROWS, torch.ones(())))
    )
    named = Movable("layer 1", 4)
    named.add("another name", ROWS)
    assert len({plain[0], wide[0], named.sums()[0]}) == 3
    assert plain[0] == beside_one[0]
    assert plain[1] != beside_one[1]
