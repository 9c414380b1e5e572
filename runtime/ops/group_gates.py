"""Operators of gates that choose for all tokens of a routing group at once."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops.gating.group_gate_ops import BalancedAssignment, ChooseTokens
from moec.runtime.ops.padded_rows import check_groups
from moec.runtime.ops.registry import check, define


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
