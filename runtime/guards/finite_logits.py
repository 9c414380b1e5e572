"""The complaint about router logits that are NaN or infinite, at the end of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.runtime.ranks.checks import Complaint
from moec.runtime.unscored import which

NOT_FINITE = (
    "go on from the last weights that were finite, with a lower learning rate or with gradients clipped "
    "(`job.clip_grad_norm_`); if the batch is the cause, catch this error and skip the batch: no gradient was computed"
)


def unscored_complaint(noted: Sequence[Tensor], sites: Sequence[str]) -> Complaint | None:
    """Names the first router of `sites` that left tokens without scores. Waits for the device once."""
    if not noted or not torch.cat([bad.flatten() for bad in noted]).any():
        return None
    # A layer that the user replaced may route too: then there are more masks than sites.
    named = zip(sites if len(sites) == len(noted) else ["a layer"] * len(noted), noted, strict=True)
    site, bad = next((site, bad) for site, bad in named if bad.any())
    return Complaint("MOE0708", f"the router logits of {site} {which(bad)}", NOT_FINITE)
