"""Plans whose gate has another option than the file says are found."""

from __future__ import annotations

from typing import Any

import pytest
from faults import change_op
from models import moe_plan

from moec.runtime.verify.verification import verify

BODY = "layers[1..2]"
GATE = "topk(2, score = sigmoid, scale = 2.5, groups = 4, keep_groups = 2)"
FAULTS: dict[str, dict[str, Any]] = {
    "another scale": {"scale": 2.4},
    "more groups kept": {"keep_groups": 3},
    "no groups": {"groups": 1, "keep_groups": 1},
    "another score of groups": {"group_score": "max"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_option_of_route_is_found(fault: str) -> None:
    plan = moe_plan(ep=2, tp=2, gate=GATE)
    (route,) = (op for op in plan.program.block(BODY).ops if op.mnemonic == "route")
    assert not verify(change_op(plan, BODY, route.results[0].name, **FAULTS[fault]), float32=False).ok
