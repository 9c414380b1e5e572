"""The rows of every expert in the last forward pass, over all ranks, and the choices that were dropped. Of attention
heads, the choices of every group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import Role
from moec.passes.ir.interface import COUNTS
from moec.passes.ir.mixture_values import choices_per_token
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import MustMatch
from moec.runtime.ranks.groups import PIPELINE, STAGE
from moec.runtime.ranks.watch import collective

if TYPE_CHECKING:
    from moec.runtime.job.job_figures import JobFigures

OTHER_LAYERS = "ranks have counted the rows of {least} to {most} experts: run the model on every rank, or on none"


@dataclass(frozen=True, slots=True)
class Loads:
    """`experts`: layer → rows per expert, int64 `[experts]` on the CPU. `heads`: layer → choices of each group of
    attention heads, likewise. `tokens`: all ranks', without padding. `made`: layer → all ranks' choices, of layers
    where a token may make fewer than k. `also`: other counts, all ranks'.
    """

    experts: dict[int, Tensor]
    heads: dict[int, Tensor]
    tokens: int
    made: dict[int, int] = field(default_factory=dict)
    also: tuple[int, ...] = ()

    def drop_rates(self, plan: Plan) -> dict[int, float]:
        """Layer → fraction of the choices that a capacity dropped, 0 to 1; 0 without a capacity that drops."""
        blocks = {layer.number: plan.program.body(layer) for layer in plan.program.layers}
        rates = dict.fromkeys(self.experts, 0.0)
        for layer, load in self.experts.items():
            moe = plan.spec.subject.mixtures[layer]
            made = self.made.get(layer, self.tokens * choices_per_token(blocks[layer]))
            if moe is not None and moe.drops and made:
                rates[layer] = 1 - int(load.sum()) / made
        return rates


def last_pass_loads(job: JobFigures, model: PlanModule, site: str, also: Sequence[int] = ()) -> Loads:
    """The loads of the last forward pass, by an agreement of the ranks and an all_reduce. `site` names the call.

    `also`: counts of this rank's sequences, which are added over the data ranks. Raises `JobError` on every rank if one
    makes another call, or has not run the model.
    """
    counts_by_kind = [model.expert_counts, model.head_counts, model.choices_made]
    num_counted = sum(counts.numel() for by_layer in counts_by_kind for counts in by_layer.values())
    if job.plan.pipeline > 1:
        counts_by_kind = [
            _of_all_layers(job, by_layer, role) for by_layer, role in zip(counts_by_kind, COUNTS, strict=True)
        ]
    local_counts = [by_layer[layer] for by_layer in counts_by_kind for layer in sorted(by_layer)]
    sizes = [counts.numel() for counts in local_counts]
    same_layers = MustMatch("MOE0713", OTHER_LAYERS, (num_counted,), in_stage=True)
    (tokens,) = job.checks.require(site, None, same_layers, counts=(int(model.num_tokens),))
    counts = torch.cat([*local_counts, torch.tensor(also, dtype=torch.int64, device=job.device_type)])
    groups = [STAGE, PIPELINE] if job.plan.pipeline > 1 else [STAGE] if job.world_size > 1 else []
    for group in groups if counts.numel() else ():
        with collective("all_reduce", job.number + group, site) as peers:
            dist.all_reduce(counts, group=peers)
    *global_counts, also_of_all = torch.split(counts.cpu(), [*sizes, len(also)])
    summed, readers = iter(global_counts), job.plan.readers
    experts, heads, made = ({layer: next(summed) for layer in sorted(by_layer)} for by_layer in counts_by_kind)
    choices_made = {layer: int(total) for layer, total in made.items()}
    return Loads(
        experts, heads, tokens // readers, choices_made, tuple(total // readers for total in also_of_all.tolist())
    )


def _of_all_layers(job: JobFigures, counts: Mapping[int, Tensor], role: Role) -> dict[int, Tensor]:
    """Counts of this rank's layers, with zeros for those of other stages."""
    program, zeros = job.plan.program, dict[int, Tensor]()
    for layer in program.layers:
        value = program.body(layer).output(role)
        if value is not None and isinstance(width := value.shape[-1], int):
            zeros[layer.number] = torch.zeros(width, dtype=torch.int64, device=job.device_type)
    return zeros | dict(counts)
