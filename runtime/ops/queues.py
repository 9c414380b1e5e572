"""Operators that choose for all tokens of a routing group at once: queues in an order of priorities, and gates.

With priorities of tokens all first choices of a group come before all second ones; among the j-th choices, the token
with the highest priority first, equal ones in token order. `groups` is 0 where every sequence is a group, else the
number of equal groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops.gating.group_gate_ops import BalancedAssignment, ChooseTokens
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


# ---- gates of whole groups ----------------------------------------------------------------------------


def _check_group(operator: str, scores: Tensor, real: Tensor | None, groups: int) -> None:
    check(scores.dim() == 3, lambda: f"moec::{operator}: scores must be [B, S, E], not {list(scores.shape)}")
    check(
        real is None or real.shape == scores.shape[:2],
        lambda: f"moec::{operator}: real must be {list(scores.shape[:2])}",
    )
    check_groups(operator, scores, groups)


choose_tokens = define(
    schema_of(ChooseTokens),
    fake=lambda scores, real, parts, whole, groups: scores.new_empty(scores.shape, dtype=torch.int64),
    check=lambda scores, real, parts, whole, groups: _check_group("choose_tokens", scores, real, groups),
    gives_integers=True,
)
"""Each expert takes its best tokens of each group: scores [B, S, E], real int64 [B, S] or None -> int64 [B, S, E].

The result is e where expert e takes the token, else −1: see `ChooseTokens`. `groups` is 0 where every sequence is a
group, else the number of equal groups that these sequences form. Not differentiated.
"""


def _check_assignment(scores: Tensor, training: Tensor, real: Tensor | None, groups: int) -> None:
    _check_group("balanced_assignment", scores, real, groups)
    check(training.dim() == 0, lambda: f"moec::balanced_assignment: training must be a scalar, not {training.shape}")


balanced_assignment = define(
    schema_of(BalancedAssignment),
    fake=lambda scores, training, real, groups: scores.new_empty((*scores.shape[:2], 1), dtype=torch.int64),
    check=_check_assignment,
    gives_integers=True,
)
"""An expert for each token, as many tokens for each: scores [B, S, E], real int64 [B, S] or None -> int64 [B, S, 1].

With `training` 0, the best expert of each token: see `BalancedAssignment`. Copies the scores to the host. Not
differentiated.
"""
