"""Diagnostics of checkpoints, as `page_events.py` has the others: each function causes one in an empty folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.plans import moe_plan

import moec
from moec.grammar.diagnostics import Diagnostic, DiagnosticError

CHECKPOINT = Path("checkpoints", "100")


def raised(act: Callable[[], object]) -> Sequence[Diagnostic]:
    with pytest.raises(DiagnosticError) as error:
        act()
    return error.value.diagnostics


@contextmanager
def job_and_model(**options: Any) -> Iterator[tuple[Any, Any]]:
    with moec.launch(moe_plan(ranks=1, ep=1, **options), device="cpu") as job:
        yield job, job.build()


def saved(**extras: Any) -> None:
    with job_and_model() as (job, model):
        job.save(CHECKPOINT, model, job.optimizer(model), **extras)


def no_checkpoint() -> Sequence[Diagnostic]:
    with job_and_model() as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model))


def flipped_byte() -> Sequence[Diagnostic]:
    saved()
    shard = CHECKPOINT / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with job_and_model() as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model, job.optimizer(model)))


def newer_format() -> Sequence[Diagnostic]:
    saved()
    head = CHECKPOINT / "checkpoint.json"
    head.write_bytes(head.read_bytes().replace(b'"format":2', b'"format":3'))
    with job_and_model() as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model))


def existing_name() -> Sequence[Diagnostic]:
    saved()
    return raised(saved)


def below_a_file() -> Sequence[Diagnostic]:
    Path("checkpoints").write_text("buy bread")
    return raised(saved)


def other_model() -> Sequence[Diagnostic]:
    saved()
    with job_and_model(experts=4) as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model))


def other_optimizer() -> Sequence[Diagnostic]:
    import torch

    saved()
    with job_and_model() as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model, torch.optim.SGD(model.parameters(), lr=0.1)))


def foreign_parameter() -> Sequence[Diagnostic]:
    import torch

    with job_and_model() as (job, model):
        optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(3))], lr=0.1)
        return raised(lambda: job.save(CHECKPOINT, model, optimizer))


def unknown_type() -> Sequence[Diagnostic]:
    with job_and_model() as (job, model):
        return raised(lambda: job.save(CHECKPOINT, model, config={"data": Path("texts")}))


def missing_extra() -> Sequence[Diagnostic]:
    saved(epoch=3)
    with job_and_model() as (job, model):
        return raised(lambda: job.load(CHECKPOINT, model, progress={}))


def no_plan_for_the_ranks() -> Sequence[Diagnostic]:
    moe_plan(ranks=2, ep=2).save(Path("two.plan"))
    moe_plan(ranks=4, ep=4).save(Path("four.plan"))
    return raised(lambda: moec.load_for(3, "two.plan", "four.plan"))


def other_paths() -> Sequence[Diagnostic]:
    from moec.runtime.checkpoint.saving import same_calls
    from moec.runtime.ranks.checks import _difference, _Report

    reports = [_Report("job.save", None, same_calls(path, None, None)) for path in ("checkpoints/0", "checkpoints/1")]
    return _difference(reports, len(reports)).error().diagnostics


def failing_copy() -> Sequence[Diagnostic]:
    from unittest import mock

    from moec.runtime.checkpoint import content

    failing = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with job_and_model() as (job, model), mock.patch.object(content, "host_copies", failing):
        saving = job.save(CHECKPOINT, model)
        return raised(saving.wait)


CHECKPOINT_EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {
    "MOE0800": no_checkpoint,
    "MOE0801": flipped_byte,
    "MOE0802": newer_format,
    "MOE0803": existing_name,
    "MOE0804": below_a_file,
    "MOE0805": other_model,
    "MOE0806": other_optimizer,
    "MOE0807": foreign_parameter,
    "MOE0808": unknown_type,
    "MOE0809": missing_extra,
    "MOE0811": other_paths,
    "MOE0812": failing_copy,
    "MOE0810": no_plan_for_the_ranks,
}
