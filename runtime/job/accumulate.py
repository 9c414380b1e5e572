"""`job.accumulate`: the gradient of several micro-batches; the script calls their backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.model.stage_pass import require_whole

if TYPE_CHECKING:
    from moec.runtime.job.job import Job


@contextmanager
def accumulating(
    job: Job, model: PlanModule, labels: tuple[Tensor, ...], tokens: tuple[Tensor, ...], padding: tuple[Tensor, ...]
) -> Iterator[None]:
    """The block of `Job.accumulate`, which describes it."""
    require_whole(model.program, "job.accumulate", "`job.step(…, microbatches=n)` accumulates")
    if not labels:
        raise JobError(
            "MOE0713",
            "job.accumulate needs the labels of every micro-batch of the block",
            "give them after the model: `with job.accumulate(model, *labels):`",
        )
    _require_tensors("labels", labels, "unpack them: `job.accumulate(model, *labels)`")
    _require_tensors("tokens", tokens, "pass a tuple with the tokens of each micro-batch: `tokens=(…, …)`")
    _require_tensors("padding", padding, "pass a tuple with the padding of each micro-batch: `padding=(…, …)`")
    marks = padding if model.takes.padding else tokens
    if not marks and model.counts_padding:
        name, source = ("padding", "given padding") if model.takes.padding else ("tokens", "a padding id")
        raise JobError(
            "MOE0713",
            f"the model has {source} and balance terms, which count real tokens",
            f"pass the {name} of every micro-batch of the block: job.accumulate(…, {name}=(…))",
        )
    limits, in_text = model.limits, model.limits.label_dims == 2
    if model.draws and any(part.dim() != limits.label_dims for part in labels):
        raise JobError(
            "MOE0713",
            "the model draws random numbers, which depend on the numbers of its sequences",
            f"pass the labels of each micro-batch by themselves, `{'[batch, sequence]' if in_text else '[batch]'}`",
        )
    flat, ids = (torch.cat([part.reshape(1, -1) for part in parts], 1) for parts in (labels, marks or labels))
    ids = (ids == 0).to(torch.int64) if marks and model.takes.padding else ids
    model.has_accumulated = True
    sequences = sum(part.shape[0] if part.dim() else 1 for part in labels)
    divisors = model.counters.labels(flat), model.counters.tokens_of(flat, ids)
    # The script may change parameters between its forward passes: each gathers weights again.
    with model.counting(*divisors, sequences, passes=1, skips=job.finite.skips) as counts:
        yield
        reads_values = job.checks.reads_values(model.seen, "accumulate", flat.device)
        complaint = counts.complaint(flat, reads_values=reads_values, numbered=model.draws)
        job.checks.require("end of job.accumulate", complaint)
        per_label = limits.tokens_per_label
        job.count_tokens(counts.num_labels * per_label, counts.global_num_labels * per_label // job.plan.sharers)
        if not job.finite.skips_loss(model, torch.as_tensor(counts.loss)):
            model.update_states()


def _require_tensors(name: str, parts: object, help: str) -> None:
    """Raises `JobError` unless `parts` is a sequence with a tensor for each micro-batch."""
    if not isinstance(parts, tuple | list):
        raise JobError("MOE0713", f"job.accumulate got {name} of class {type(parts).__name__}, not a tuple", help)
    for part in parts:
        if not isinstance(part, Tensor):
            raise JobError(
                "MOE0713", f"job.accumulate got a {type(part).__name__} in place of a tensor of {name}", help
            )
