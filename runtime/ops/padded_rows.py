"""Experts with a capacity: queues, rows in places, and their weighted sums.

A group's choices queue at their experts, all first choices before all second ones, tokens in order (GShard, Lepikhin et
al. 2020, algorithm 1); a choice beyond the capacity is dropped. `groups` is 0 where every sequence is a group, else the
number of equal groups that these sequences form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.passes.ir import ops as o
from moec.passes.ir.operator_schema import schema_of
from moec.runtime.backends import select
from moec.runtime.backends.torch.torch_padded import places_of
from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate, save_inputs
from moec.runtime.ops.rows import compose_permuted, permuted_inputs

# ---- queues ------------------------------------------------------------------------------------------


def _check_count_queues(experts: Tensor, num_experts: int) -> None:
    check(
        experts.dim() == 3 and experts.dtype == torch.int64,
        lambda: f"moec::count_queues: experts must be int64 [B, S, k], not {experts.dtype} {list(experts.shape)}",
    )


count_queues = define(
    schema_of(o.CountQueues),
    fake=lambda experts, num_experts: experts.new_empty((experts.shape[0], 1, experts.shape[2], num_experts)),
    check=_check_count_queues,
    gives_integers=True,
)
"""Counts each sequence's j-th choices by expert: experts [B, S, k] int64, −1 for none -> [B, 1, k, E] int64."""


def _check_queue_starts(counts: Tensor, groups: int) -> None:
    check(counts.dim() == 4, lambda: f"moec::queue_starts: counts must be [B, P, k, E], not {list(counts.shape)}")
    check(
        not groups or counts.shape[0] % groups == 0,
        lambda: f"moec::queue_starts: {counts.shape[0]} sequences are not {groups} equal shares",
    )


queue_starts = define(
    schema_of(o.QueueStarts),
    fake=lambda counts, groups: counts.new_empty(counts.shape),
    check=_check_queue_starts,
    gives_integers=True,
)
"""The queue index of the first choice of each of a sequence's P pieces: counts [B, P, k, E] int64 -> the same shape."""

# ---- capacities ----------------------------------------------------------------------------------------

CapacityArguments = tuple[int, int, int, int, int]
"""groups, spread, parts, whole and least, the arguments of `places_of`."""


def check_groups(operator: str, x: Tensor, groups: int) -> None:
    """Requires that the sequences of x [B, …] form `groups` equal groups."""
    check(not groups or x.shape[0] % groups == 0, lambda: f"moec::{operator}: {x.shape[0]} sequences")


def capacity_in_force(training: Tensor | None, *attributes: int) -> CapacityArguments:
    """Selects a capacity's attributes: in evaluation (`training` is 0) the factor is `eval_parts / eval_whole`."""
    parts, whole, eval_parts, eval_whole, least, groups, spread = attributes
    if training is not None and not int(training):
        parts, whole = eval_parts, eval_whole
    return groups, spread, parts, whole, least


# ---- permute_padded ----------------------------------------------------------------------------------


def _check_permute_padded(x: Tensor, experts: Tensor, starts: Tensor, *options: Any) -> None:
    check(
        x.dim() == 3 and experts.dim() == 3 and x.shape[:2] == experts.shape[:2] and experts.dtype == torch.int64,
        lambda: (
            "moec::permute_padded: x must be [B, S, D] and experts int64 [B, S, k], not "
            f"{list(x.shape)} and {experts.dtype} {list(experts.shape)}"
        ),
    )
    check(
        starts.dim() == 4 and starts.shape[:3] == (x.shape[0], 1, experts.shape[2]),
        lambda: f"moec::permute_padded: starts must be [{x.shape[0]}, 1, {experts.shape[2]}, E], not {starts.shape}",
    )
    check_groups("permute_padded", x, options[-2])


def _fake_permute_padded(
    x: Tensor, experts: Tensor, starts: Tensor, training: Tensor | None, *attributes: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = starts.shape[3]
    places: int | torch.SymInt
    if training is None:
        capacity = capacity_in_force(None, *attributes)
        _, places = places_of(x.shape[0], x.shape[1], experts.shape[2], num_experts, *capacity)
    else:
        places = torch.library.get_ctx().new_dynamic_size()  # depends on the value of `training`
    rows = x.new_empty((num_experts, places, x.shape[2]))
    return rows, experts.new_empty((1, num_experts)), experts.new_empty(experts.shape)


def _permute_padded(
    x: Tensor, experts: Tensor, starts: Tensor, training: Tensor | None, *attributes: int
) -> tuple[Tensor, Tensor, Tensor]:
    permuted: tuple[Tensor, Tensor, Tensor] = select(x.device.type).permute_padded(
        x, experts, starts, *capacity_in_force(training, *attributes)
    )
    return permuted


permute_padded = define(
    schema_of(o.PermutePadded),
    fake=_fake_permute_padded,
    check=_check_permute_padded,
    kernel=_permute_padded,
)
"""A copy of each token per choice that is not dropped, in the places of its expert.

x [B, S, D], experts [B, S, k] int64 (−1 for none), starts [B, 1, k, E] int64 (`queue_starts`) ->
  - rows [E, N, D]: each expert's rows in token order, then zeros; N is `places_of`'s;
  - counts [1, E] int64: the rows of each expert, without the zeros;
  - positions [B, S, k] int64: the row (of E·N) that choice j of token t became, −1 where it was dropped or was −1.
"""


def _check_backward(grad: Tensor, positions: Tensor) -> None:
    check(grad.dim() == 3, lambda: f"moec::permute_padded_backward: grad must be [E, N, D], not {list(grad.shape)}")


permute_padded_backward = define(
    "permute_padded_backward(Tensor grad, Tensor positions) -> Tensor",
    fake=lambda grad, positions: grad.new_empty((*positions.shape[:2], grad.shape[2])),
    check=_check_backward,
)


def _check_keep_choices(experts: Tensor, starts: Tensor, *options: Any) -> None:
    check(
        experts.dim() == 3 and starts.dim() == 4 and starts.shape[:3] == (experts.shape[0], 1, experts.shape[2]),
        lambda: (
            "moec::keep_choices: experts must be [B, S, k] and starts [B, 1, k, E], not "
            f"{list(experts.shape)} and {list(starts.shape)}"
        ),
    )
    check_groups("keep_choices", experts, options[-2])


def _keep_choices(experts: Tensor, starts: Tensor, training: Tensor | None, *attributes: int) -> Tensor:
    kept: Tensor = select(experts.device.type).keep_choices(experts, starts, *capacity_in_force(training, *attributes))
    return kept


keep_choices = define(
    schema_of(o.KeepChoices),
    fake=lambda experts, starts, training, *attributes: experts.new_empty(experts.shape),
    check=_check_keep_choices,
    kernel=_keep_choices,
    gives_integers=True,
)
"""Sets the choices that `permute_padded` would drop to −1: experts [B, S, k] int64 -> [B, S, k] int64."""


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, counts, positions = output
    ctx.mark_non_differentiable(counts, positions)
    ctx.save_for_backward(positions)


def _differentiate_permute(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return permute_padded_backward(grad, positions), *(None for _ in ctx.needs_input_grad[1:])


differentiate(
    permute_padded,
    setup=_setup_permute,
    backward=_differentiate_permute,
    composition=compose_permuted,
    saved_inputs=permuted_inputs,
)

largest_load = define(
    schema_of(o.LargestLoad),
    fake=lambda experts, num_experts: experts.new_empty(()),
    check=_check_count_queues,
    gives_integers=True,
)
"""The rows of the busiest expert: experts [B, S, k] int64, −1 for none -> int64 scalar."""


def _check_permute_dynamic(x: Tensor, experts: Tensor, places: Tensor, num_experts: int) -> None:
    check(
        x.dim() == 3 and experts.dim() == 3 and x.shape[:2] == experts.shape[:2] and experts.dtype == torch.int64,
        lambda: (
            "moec::permute_dynamic: x must be [B, S, D] and experts int64 [B, S, k], not "
            f"{list(x.shape)} and {experts.dtype} {list(experts.shape)}"
        ),
    )
    check(places.dim() == 0, lambda: f"moec::permute_dynamic: places must be a scalar, not {list(places.shape)}")


def _fake_permute_dynamic(
    x: Tensor, experts: Tensor, places: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((num_experts, torch.library.get_ctx().new_dynamic_size(), x.shape[2]))
    return rows, experts.new_empty((1, num_experts)), experts.new_empty(experts.shape)


permute_dynamic = define(
    schema_of(o.PermuteDynamic),
    fake=_fake_permute_dynamic,
    check=_check_permute_dynamic,
)
"""`permute_padded` with `places` per expert (int64 scalar, the largest `largest_load` of all ranks).

Drops only choices of expert −1 (`keep_choices`). Copies one number to the host.
"""


differentiate(
    permute_dynamic,
    setup=_setup_permute,
    backward=_differentiate_permute,
    composition=compose_permuted,
    saved_inputs=permuted_inputs,
)

even_counts = define(
    "even_counts(Tensor rows) -> Tensor",
    fake=lambda rows: rows.new_empty((1, rows.shape[0]), dtype=torch.int64),
    check=lambda rows: None,
    kernel=lambda rows: rows.new_full((1, rows.shape[0]), rows.shape[1], dtype=torch.int64),
    gives_integers=True,
)
"""The counts of all padded rows, empty ones too: rows [E, N, D] -> [1, E] int64, each N."""

# ---- combine_padded ----------------------------------------------------------------------------------


def _check_combine(rows: Tensor, positions: Tensor, weights: Tensor) -> None:
    check(
        rows.dim() == 3 and positions.dim() == 3 and positions.shape == weights.shape,
        lambda: (
            "moec::combine_padded: rows must be [E, N, D], positions and weights [B, S, k], not "
            f"{list(rows.shape)}, {list(positions.shape)} and {list(weights.shape)}"
        ),
    )


combine_padded = define(
    schema_of(o.CombinePadded),
    fake=lambda rows, positions, weights: rows.new_empty((*positions.shape[:2], rows.shape[2])),
    check=_check_combine,
)
"""Each token's weighted sum of its rows: rows [E, N, D], positions [B, S, k] int64, weights [B, S, k] -> [B, S, D].

A dropped choice (−1) adds nothing, and the other weights are not renormalized.
"""

combine_padded_backward = define(
    "combine_padded_backward(Tensor grad, Tensor rows, Tensor positions, Tensor weights) -> (Tensor, Tensor)",
    fake=lambda grad, rows, positions, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    check=lambda grad, rows, positions, weights: _check_combine(rows, positions, weights),
)


def _differentiate_combine(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    grad_rows, grad_weights = combine_padded_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


differentiate(
    combine_padded,
    setup=save_inputs,
    backward=_differentiate_combine,
    composition=lambda inputs, outputs: (compositions.combined(*inputs),),
    saved_inputs=lambda ctx, grad: (ctx.saved_tensors, ()),
)
