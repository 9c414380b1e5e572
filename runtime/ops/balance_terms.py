"""`count_choices` and `switch_loss`, which keep the choices of experts balanced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.backends.torch import torch_routing
from moec.runtime.ops.registry import check, define, differentiate, save_inputs

# ---- count_choices -----------------------------------------------------------------------------------


def _check_count_choices(experts: Tensor, num_experts: int, groups: int) -> None:
    check(
        experts.dim() == 3 and experts.dtype == torch.int64,
        lambda: f"moec::count_choices: experts must be int64 [B, S, k], not {experts.dtype} {list(experts.shape)}",
    )
    check(
        not groups or experts.shape[0] % groups == 0,
        lambda: f"moec::count_choices: {experts.shape[0]} sequences are not {groups} equal shares",
    )


count_choices = define(
    schema_of(o.CountChoices),
    fake=lambda experts, num_experts, groups: experts.new_empty((groups or experts.shape[0], num_experts)),
    check=_check_count_choices,
    gives_integers=True,
)
"""How often each group's tokens chose each expert: experts [B, S, k] int64, −1 for none -> [G, E] int64.

`groups` is 0 where every sequence is a group, else the number of equal groups that these sequences form.
"""

# ---- switch_loss -------------------------------------------------------------------------------------


def _check_switch_loss(probabilities: Tensor, choices: Tensor) -> None:
    check(
        probabilities.dim() == 3
        and choices.dim() == 2
        and choices.shape[1] == probabilities.shape[2]
        and probabilities.shape[0] % max(choices.shape[0], 1) == 0,
        lambda: (
            "moec::switch_loss: probabilities must be [B, S, E] and choices [G, E], not "
            f"{list(probabilities.shape)} and {list(choices.shape)}"
        ),
    )


switch_loss = define(
    "switch_loss(Tensor probabilities, Tensor choices) -> Tensor",
    fake=lambda probabilities, choices: probabilities.new_empty(()),
    check=_check_switch_loss,
)
"""Sum over groups of S · E · Σᵢ fᵢ·Pᵢ (Fedus et al. 2021, eq. 4): a scalar in the probabilities' dtype.

probabilities [B, S, E]; choices [G, E] int64, of whole groups (`count_choices`) of B / G sequences each. fᵢ is the
fraction of a group's choices that expert i got, Pᵢ its mean probability over the group's S tokens. S · Pᵢ is a sum over
tokens, so a part of a group's tokens gives that part's term. Padding, with probabilities 0 and choices −1, is then not
among the S tokens. Divided by the global number of tokens, the sum is the token-weighted mean over groups, 1 when
balanced. 0 if there are no tokens.
"""


switch_loss_backward = define(
    "switch_loss_backward(Tensor grad, Tensor probabilities, Tensor choices) -> Tensor",
    fake=lambda grad, probabilities, choices: probabilities.new_empty(probabilities.shape),
    check=lambda grad, probabilities, choices: _check_switch_loss(probabilities, choices),
)


def _differentiate_switch_loss(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    probabilities, choices = ctx.saved_tensors
    return switch_loss_backward(grad, probabilities, choices), None


differentiate(
    switch_loss,
    setup=save_inputs,
    backward=_differentiate_switch_loss,
    composition=lambda inputs, outputs: (torch_routing.switch_loss(*inputs),),
    saved_inputs=lambda ctx, grad: (ctx.saved_tensors, ()),
)
