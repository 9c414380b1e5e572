"""job.accumulate's comparison of its labels with those of the forward passes in its block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.runtime.model.step_counts import OTHER_LABELS, WITHOUT_LABELS, StepCounts
from moec.runtime.ranks.checks import Complaint

LABELS = torch.tensor([[3, 4], [5, -100]])
IGNORING = torch.tensor([[3, -100], [5, -100]])


def counts(*passes: Tensor, sequences: int = 2) -> StepCounts:
    """A step after forward passes on `passes`, one sequence a row."""
    step = StepCounts(labels=torch.tensor(3), tokens=torch.tensor(4), sequences=sequences)
    for labels in passes:
        step.add(labels)
        step.number_sequences(labels, 0, advance=True)
    return step


def test_forward_passes_on_the_labels_of_the_block_are_right() -> None:
    assert counts(LABELS[:1], LABELS[1:]).complaint(LABELS, reads_values=True, numbered=True) is None


@pytest.mark.parametrize(
    ("step", "message", "help"),
    [
        (counts(LABELS[:1]), "4 labels, its forward passes had 2", WITHOUT_LABELS),
        (counts(LABELS, LABELS, sequences=4), "4 labels, its forward passes had 8", OTHER_LABELS),
        (counts(IGNORING), "3 labels that are not -100, its forward passes had 2", OTHER_LABELS),
        (counts(LABELS.reshape(1, 4)), "labels of 2 sequences, its forward passes had 1", OTHER_LABELS),
    ],
)
def test_a_complaint_says_what_differs_and_how_much(step: StepCounts, message: str, help: str) -> None:
    found = step.complaint(LABELS, reads_values=True, numbered=True)
    assert found == Complaint("MOE0713", f"job.accumulate got {message}", help)


def test_ignored_labels_are_not_compared_where_checks_read_no_values() -> None:
    assert counts(IGNORING).complaint(LABELS, reads_values=False, numbered=True) is None


def test_sequences_are_not_compared_where_the_model_draws_nothing() -> None:
    assert counts(LABELS.reshape(1, 4)).complaint(LABELS, reads_values=True, numbered=False) is None
