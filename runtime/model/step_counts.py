"""The divisors of a step's losses, and the numbers of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.errors import JobError
from moec.runtime.ranks.checks import Complaint
from moec.runtime.weights.backward_pass import in_backward

WITHOUT_LABELS = (
    "zero the gradients, and call `model(tokens, labels)` for every micro-batch of the block; with a loss of your own "
    "its `.loss` may stay unused. Or use `job.step(…, loss=…)`, or no `job.accumulate` and `job.update_states(model)`"
)
"""The help for forward passes that lack labels, or are missing."""

OTHER_LABELS = (
    "zero the gradients, and pass it the labels of exactly the micro-batches of the block; evaluate in between after "
    "`model.eval()` and under torch.no_grad"
)
"""The help for forward passes that had other labels, or too many."""


@dataclass(slots=True)
class StepCounts:
    """Divisors of losses: counts over all ranks of a step, 0-d int64. None: each forward pass counts its batch.

    `sequences`: this rank's sequences in the whole step; None if each forward pass in training is a step. `numbered`:
    the sequences of the step's earlier forward passes.
    """

    labels: Tensor | None = None
    tokens: Tensor | None = None
    sequences: int | None = None
    numbered: int = 0
    num_labels: int = 0
    """Labels, ignored ones included, of the forward passes on this rank whose losses were divided by `labels`."""
    global_num_labels: int = 0
    """`num_labels` summed over all ranks."""
    valid: int | Tensor = 0
    """Valid labels of those passes, on this rank."""
    loss: float | Tensor = 0.0
    """The sum of those passes' losses, a scalar."""
    skips: bool = False
    """Whether a step with a loss that is not finite is skipped, without an error."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCounts:
        return StepCounts()  # a copy of a model belongs to no open step

    def divisors(self, training: bool) -> tuple[Tensor | None, Tensor | None]:
        """`labels` and `tokens` for the pass that runs now: None where it counts its own batch."""
        return (None, None) if _evaluates(training) else (self.labels, self.tokens)

    def add(self, labels: Tensor) -> None:
        """Counts the labels of a forward pass on this rank, if its loss is divided by `self.labels`."""
        if self.labels is not None:
            self.num_labels += labels.numel()
            self.valid = self.valid + (labels != IGNORED_LABEL).sum()

    def add_loss(self, loss: Tensor) -> None:
        """Adds the global loss of a forward pass, if it is divided by `self.labels`."""
        if self.labels is not None:
            self.loss = self.loss + loss.detach()

    def complaint(self, labels: Tensor, *, reads_values: bool, numbered: bool) -> Complaint | None:
        """None if the forward passes had exactly the `labels` and, if `numbered`, all the sequences.

        Without `reads_values` it does not read which labels are ignored.
        """
        difference = self._difference(labels, reads_values=reads_values, numbered=numbered)
        if difference is None:
            return None
        help = WITHOUT_LABELS if self.num_labels < labels.numel() else OTHER_LABELS
        return Complaint("MOE0713", f"job.accumulate got {difference}", help)

    def _difference(self, labels: Tensor, *, reads_values: bool, numbered: bool) -> str | None:
        if self.num_labels != labels.numel():
            return f"{labels.numel()} labels, its forward passes had {self.num_labels}"
        if numbered and self.numbered != self.sequences:
            return f"labels of {self.sequences} sequences, its forward passes had {self.numbered}"
        if reads_values:
            valid, used = int((labels != IGNORED_LABEL).sum()), int(self.valid)
            if valid != used:
                return f"{valid} labels that are not {IGNORED_LABEL}, its forward passes had {used}"
        return None

    def number_sequences(self, tokens: Tensor, data_rank: int, *, advance: bool) -> Tensor:
        """The numbers of the sequences of `tokens` in the global batch of the step: int64 `[batch]`.

        `advance`: the next forward pass of the step continues after them. Raises `JobError` if the step has fewer
        sequences: their numbers would be another rank's.
        """
        batch = tokens.shape[0]
        if self.sequences is None:
            return sequence_numbers(data_rank, batch, batch, device=tokens.device)
        if advance and self.numbered + batch > self.sequences:
            raise JobError(
                "MOE0713",
                f"the step has {self.sequences} sequences on this rank, and its forward passes have more",
                "call other forward passes in evaluation or under torch.no_grad, and in job.accumulate pass labels "
                "`[batch, sequence]` of each micro-batch",
            )
        numbers = sequence_numbers(
            data_rank, self.sequences, batch, numbered=self.numbered if advance else 0, device=tokens.device
        )
        self.numbered += batch if advance else 0
        return numbers


def is_step_pass(training: bool) -> bool:
    """Whether the running pass is part of a step: not in evaluation, and not when it is computed again in backward."""
    return not in_backward() and not _evaluates(training)


def _evaluates(training: bool) -> bool:
    """A script may evaluate between the passes of a step; a training pass without gradients is a checkpoint's first."""
    return not training and not torch.is_grad_enabled()


def sequence_numbers(
    data_rank: int, in_step: int, batch: int, *, numbered: int = 0, device: torch.device | None = None
) -> Tensor:
    """The numbers of `batch` sequences in the global batch of the step, int64, after the rank's first `numbered`.

    `in_step` are the sequences that each rank has in the step.
    """
    first = data_rank * in_step + numbered
    return torch.arange(first, first + batch, device=device)
