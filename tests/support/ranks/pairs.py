"""Jobs of two ranks side by side in one call of the pool: their waits overlap."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from support.ranks.gloo_pool import GlooPool


def in_pairs(gloo: GlooPool, function: Callable[..., Any], cases: list[Any]) -> dict[Any, list[Any]]:
    """What `function(case)` returned on both ranks of a job, for each case."""
    found = gloo.run(2 * len(cases), _as_one_of_two, function, cases, initialize=False)
    return {case: found[2 * number : 2 * number + 2] for number, case in enumerate(cases)}


def _as_one_of_two(function: Callable[..., Any], cases: list[Any]) -> Any:
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    own["TORCHELASTIC_RESTART_COUNT"] = str(pair)  # jobs of different attempts do not meet in the store
    with patch.dict(os.environ, own):
        return function(cases[pair])
