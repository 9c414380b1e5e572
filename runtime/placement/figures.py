"""What metrics say of the experts of a layer: where they are, and what that does to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from moec.passes.guests.assignment import quotas_of, slot_numbers
from moec.runtime.placement.place import Place


def layer_figures(place: Place, table: Tensor, counts: Any) -> dict[str, float]:
    """Guests of a layer, the bytes that all ranks send of them in a step, experts whose home is not their first, and
    rows of the busiest rank over the mean: of first homes without guests, and as they were split. `counts` [experts]:
    rows, of all groups together."""
    slots, shares = table.numpy()
    at_home, numbers = slots[:, : place.own], slot_numbers(slots, place.shape.experts)
    guests = int((numbers >= 0).sum()) - place.shape.experts
    first = np.arange(place.shape.ranks)[:, None]
    return {
        "guests": guests,
        "guest_bytes": guests * len(place.groups) * place.bytes,
        "moved": int((at_home // place.own != first).sum()),
        "home_rows": _over_mean(counts.reshape(-1, place.own).sum(1)),
        "rows": _over_mean(quotas_of(counts, shares, numbers).sum(0)),
    }


def _over_mean(rows: Any) -> float:
    """The largest of some numbers of rows over their mean; 1 without rows."""
    return float(rows.max() / rows.mean()) if rows.any() else 1.0
