"""Queues of whole routing groups in an order of priorities.

With priorities of tokens all first choices of a group come before all second ones; among the j-th choices, the token
with the highest priority first, equal ones in token order. `groups` is 0 where every sequence is a group, else the
number of equal groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops.gating.queue_ops import KeepBest, KeepFirst, Reroute
from moec.runtime.backends import select
from moec.runtime.ops.padded_rows import capacity_in_force, check_groups
from moec.runtime.ops.registry import check, define


def _check_keep_first(experts: Tensor, priorities: Tensor, training: Tensor | None, *attributes: int) -> None:
    check(
        experts.dim() == 3 and priorities.shape == experts.shape[:2],
        lambda: (
            "moec::keep_first: experts must be [B, S, k] and priorities [B, S], not "
            f"{list(experts.shape)} and {list(priorities.shape)}"
        ),
    )
    check_groups("keep_first", experts, attributes[-1])


def _keep_kernel(name: str) -> Callable[..., Tensor]:
    def keep(experts: Tensor, priorities: Tensor | None, training: Tensor | None, *attributes: int) -> Tensor:
        *factors, num_experts, groups = attributes
        arguments = capacity_in_force(training, *factors, groups, 1)
        kept: Tensor = getattr(select(experts.device.type), name)(experts, priorities, num_experts, *arguments)
        return kept

    return keep


keep_first = define(
    schema_of(KeepFirst),
    fake=lambda experts, priorities, training, *attributes: experts.new_empty(experts.shape),
    check=_check_keep_first,
    kernel=_keep_kernel("keep_first"),
    gives_integers=True,
)
"""Sets the choices beyond a capacity to −1: experts [B, S, k] int64, −1 for none, priorities [B, S] -> [B, S, k].

The sequences form whole routing groups. Not differentiated.
"""


def _check_keep_best(experts: Tensor, priorities: Tensor | None, training: Tensor | None, *attributes: int) -> None:
    check(
        experts.dim() == 3 and (priorities is None or priorities.shape == experts.shape),
        lambda: (
            "moec::keep_best: experts and priorities must be [B, S, k], not "
            f"{list(experts.shape)} and {None if priorities is None else list(priorities.shape)}"
        ),
    )
    check_groups("keep_best", experts, attributes[-1])


keep_best = define(
    schema_of(KeepBest),
    fake=lambda experts, priorities, training, *attributes: experts.new_empty(experts.shape),
    check=_check_keep_best,
    kernel=_keep_kernel("keep_best"),
    gives_integers=True,
)
"""Sets the choices beyond a capacity to −1: experts [B, S, k] int64, −1 for none, priorities of that shape or None.

Each expert keeps the choices of a group with the highest priorities; equal ones, and all without any, token by token.
The sequences form whole routing groups. Not differentiated.
"""


def _check_reroute(logits: Tensor, experts: Tensor, priorities: Tensor | None, *options: Any) -> None:
    check(
        logits.dim() == 3 and experts.dim() == 3 and logits.shape[:2] == experts.shape[:2],
        lambda: (
            "moec::reroute: logits must be [B, S, E] and experts [B, S, k], not "
            f"{list(logits.shape)} and {list(experts.shape)}"
        ),
    )
    check(
        priorities is None or priorities.shape == experts.shape[:2], lambda: "moec::reroute: priorities must be [B, S]"
    )
    check_groups("reroute", experts, options[-1])


def _reroute(
    logits: Tensor,
    experts: Tensor,
    priorities: Tensor | None,
    bias: Tensor | None,
    training: Tensor | None,
    *attributes: Any,
) -> tuple[Tensor, Tensor]:
    *factors, score, groups = attributes
    capacity = capacity_in_force(training, *factors, groups, 1)
    backend = select(experts.device.type)
    rerouted: tuple[Tensor, Tensor] = backend.reroute(logits, experts, priorities, bias, score, *capacity)
    return rerouted


reroute = define(
    schema_of(Reroute),
    fake=lambda logits, experts, *options: (experts.new_empty(experts.shape), experts.new_empty(experts.shape)),
    check=_check_reroute,
    kernel=_reroute,
    gives_integers=True,
)
"""Gives the choices beyond a capacity to the next best experts with room: see `Reroute`.

logits [B, S, E], experts [B, S, k] int64, −1 for none, priorities [B, S] or None, bias [E] or None -> the choices
[B, S, k], −1 where there was no room, and the same with the first expert of these. Not differentiated.
"""
