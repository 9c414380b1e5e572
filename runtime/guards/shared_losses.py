"""Compares custom losses of ranks that share sequences, which compute the same one: else gradients are of others."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from moec.runtime.guards.guard import Guard, LossComputed
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.watch import collective

TOLERANCE = 1e-4
"""Relative: sums of one loss may differ in their last bits, where a kernel adds in any order."""


def unlike_in_group(computed: LossComputed) -> Complaint | None:
    """Why the losses of ranks that share this one's sequences are not equal, or None. A collective of these ranks."""
    loss = computed.summed
    value = math.nan if loss is None else float(loss.detach())
    is_number, number = not math.isnan(value), 0.0 if math.isnan(value) else value
    device = "cpu" if loss is None else loss.device
    # MAX of −is_number is below 0 only if every rank has a number; −MAX of −number is the least number.
    maxima = torch.tensor([loss is None, is_number, -is_number, number, -number], dtype=torch.float64, device=device)
    with collective("all_reduce", computed.group, "a custom loss") as peers:
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=peers)
    lacks_loss, any_number, all_numbers = maxima[0] > 0, maxima[1] > 0, maxima[2] < 0
    high, low = float(maxima[3]), -float(maxima[4])
    if lacks_loss or not any_number or (all_numbers and math.isclose(low, high, rel_tol=TOLERANCE)):
        return None
    range_text = f"from {low:g} to {high:g}" if all_numbers else "NaN on some, and a number on others,"
    return Complaint(
        "MOE0713",
        f"the custom loss is {value:g} here, and {range_text} of the ranks with the same `job.data_rank`",
        "these ranks compute one loss of the same tokens: draw its random numbers from a generator that they seed "
        "alike, as by `job.data_rank` and the step",
    )


GUARD = Guard(
    event=LossComputed, look=unlike_in_group, when=lambda loss: loss.group_size > 1, code="MOE0713",
    agreed=True, waits=True,
)  # fmt: skip
