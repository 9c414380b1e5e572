"""Finds logits of routers and of sequences, and states, that are NaN or infinite."""

from __future__ import annotations

import torch

from moec.runtime.guards.guard import Guard, PassEnds, StatesRead, TokensChosen
from moec.runtime.ranks.checks import Complaint
from moec.runtime.unscored import describe_mask

NOT_FINITE = (
    "go on from the last weights that were finite, with a lower learning rate or with gradients clipped "
    "(`job.clip_grad_norm_`); if the batch is the cause, catch this error, `optimizer.zero_grad()`, and skip the batch"
)


def unscored(ended: PassEnds) -> Complaint | None:
    """Names the first router that left tokens without scores. Waits for the device once."""
    masks, names = ended.unscored, ended.routers
    if not masks or not torch.cat([bad.flatten() for bad in masks]).any():
        return None
    # A layer that the user replaced may route too: then there are more masks than routers.
    named = zip(names if len(names) == len(masks) else ["a layer"] * len(masks), masks, strict=True)
    name, bad = next((name, bad) for name, bad in named if bad.any())
    return Complaint("MOE0708", f"the router logits of {name} {describe_mask(bad)}", NOT_FINITE)


def bad_state(read: StatesRead) -> Complaint | None:
    """Names the first state that is NaN or infinite. Waits for the device once if all are finite."""
    finite = {name: state.isfinite().all() for name, state in read.states().items()}
    if not finite or torch.stack([*finite.values()]).all():
        return None
    name = next(name for name, is_finite in finite.items() if not is_finite)
    return Complaint("MOE0708", f"the state {name} is NaN or infinite", NOT_FINITE)


def no_token(chosen: TokensChosen) -> Complaint | None:
    """The complaint about sequences of which no token could be chosen."""
    bad = chosen.impossible
    if not bad.any():
        return None
    message = f"the logits of {int(bad.sum())} of {len(bad)} sequences are NaN or infinite, first sequence "
    return Complaint("MOE0743", f"{message}{int(bad.nonzero()[0])}", "go on from the last weights that were finite")


ROUTERS = Guard(event=PassEnds, look=unscored, code="MOE0708", agreed=True, waits=True)
STATES = Guard(event=StatesRead, look=bad_state, code="MOE0708", agreed=True, waits=True)
TOKENS = Guard(event=TokensChosen, look=no_token, code="MOE0743", agreed=True, waits=True)
