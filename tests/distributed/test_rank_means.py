"""The warning of a loss of one's own that is a mean over a rank's labels, where gradients are added over ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from support.plans import moe_plan
from support.ranks.gloo_pool import GlooPool
from torch import Tensor

import moec
from moec.runtime.guards.rank_means import is_mean_of_rank


def loss_of(kind: str, logits: Tensor, labels: Tensor, ranks: int) -> Tensor:
    """A loss of `kind` over this rank's labels, of which all ranks have the same number."""
    logits, labels = logits.flatten(0, 1), labels.flatten()
    count = (labels != -100).sum()
    match kind:
        case "mean":
            return F.cross_entropy(logits, labels)
        case "global mean":
            return F.cross_entropy(logits, labels, reduction="sum") / (count * ranks)
        case "weighted":  # one row has the scale of a mean
            weights = torch.linspace(0.1, 1.0, len(labels))
            return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / count
        case "squares":
            return (logits**2).mean()
        case _:
            raise ValueError(kind)


def steps_as_rank(kind: str, ranks: int, tp: int) -> list[tuple[str, bool]]:
    """The warnings of two steps in a loop of one's own, and whether each is at a line of this file."""
    with moec.launch(moe_plan(ranks=ranks, ep=1, tp=tp), device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(job.data_rank))
        labels = tokens.flip(-1)
        labels[0, :3] = -100
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                output = model(tokens)
                logits = job.whole_logits(output)
                loss_of(kind, logits, labels, job.data_size).backward()
    return [(str(warning.message), warning.filename == __file__) for warning in caught]


def test_a_mean_over_a_ranks_labels_warns_once(gloo: GlooPool) -> None:
    first, second = gloo.run(2, steps_as_rank, "mean", 2, 1)
    ((message, is_here),) = first
    assert "a mean over this rank's labels" in message
    assert "2 times too large" in message
    assert is_here
    assert second == []


@pytest.mark.parametrize("kind", ["global mean", "squares"])
def test_other_losses_do_not(gloo: GlooPool, kind: str) -> None:
    assert gloo.run(2, steps_as_rank, kind, 2, 1) == [[], []]


def test_with_tensor_parallelism_it_looks_at_the_whole_logits(gloo: GlooPool) -> None:
    first, *others = gloo.run(4, steps_as_rank, "mean", 4, 2)
    ((message, is_here),) = first
    assert "2 times too large" in message
    assert is_here
    assert others == [[]] * 3


@pytest.mark.slow
def test_with_tensor_parallelism_a_global_mean_does_not(gloo: GlooPool) -> None:
    assert gloo.run(4, steps_as_rank, "global mean", 4, 2) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "is_mean"), [("mean", True), ("global mean", False), ("weighted", False), ("squares", False)]
)
def test_rows_of_the_gradient_tell_the_count(dtype: torch.dtype, kind: str, is_mean: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 100, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 100, (3, 5), generator=generator)
    labels[1] = -100
    loss_of(kind, logits.float(), labels, 2).backward()
    assert logits.grad is not None
    assert is_mean_of_rank(logits.detach(), logits.grad) is is_mean
