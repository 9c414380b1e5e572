"""The rows of every expert in the last forward pass, over all ranks, and the choices that were dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import choices_per_token
from moec.runtime.job.groups import ALL_RANKS
from moec.runtime.job.module import PlanModule
from moec.runtime.job.watch import collective

if TYPE_CHECKING:
    from moec.runtime.job.job import Job


def of_experts(job: Job, model: PlanModule) -> dict[int, Tensor]:
    """Layer → rows per expert, int64 `[experts]` on the CPU: one all_reduce."""
    layers = sorted(model.expert_counts)
    if not layers:
        return {}
    counts = torch.cat([model.expert_counts[layer] for layer in layers])
    _sum_over_all(job, counts, "expert loads")
    sizes = [model.expert_counts[layer].numel() for layer in layers]
    return dict(zip(layers, torch.split(counts.cpu(), sizes), strict=True))


def drop_rates(job: Job, model: PlanModule, loads: dict[int, Tensor]) -> dict[int, float]:
    """Layer → fraction of the choices that a capacity dropped, 0 to 1: one all_reduce. `loads`: of `of_experts`."""
    tokens = torch.as_tensor(model.num_tokens, device=next(model.parameters()).device).clone()
    _sum_over_all(job, tokens, "drop rates")
    total = int(tokens) // job.plan.meshes["dense"].size("tp")  # the ranks of a tp group count the same tokens
    program = job.plan.program
    choices = {call.layer: choices_per_token(program.block(call.block)) for call in layer_calls(program)}
    kept = {layer: int(load.sum()) / choices[layer] for layer, load in loads.items()}
    return {layer: 1 - rows / total if total else 0.0 for layer, rows in kept.items()}


def _sum_over_all(job: Job, counts: Tensor, what: str) -> None:
    if job.world_size > 1:
        with collective("all_reduce", job.number + ALL_RANKS, what) as peers:
            dist.all_reduce(counts, group=peers)
