"""Every token goes to the same expert, the worst that a router can do; in Triton's interpreter as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import diagonals
from support.plans import moe_plan
from support.verified import require_equal

from moec.grammar.spec import Spec
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule
from moec.runtime.verify import inputs, unsharded

CAPACITIES = {
    "dropless": "",
    "factor": "capacity = factor(1.0)",
    "factor over the batch": "capacity = factor(1.0); group = batch",
    "dynamic": "capacity = dynamic()",
    "dynamic up to a factor": "capacity = dynamic(max = 1.0)",
}


DEGREES = [{"ranks": 2, "ep": 2}, {"ranks": 1, "ep": 1}, {"ranks": 2, "ep": 1}]


@pytest.mark.parametrize(("capacity", "degrees"), diagonals(list(CAPACITIES), DEGREES))
def test_a_plan_equals_the_unsharded_model_where_one_expert_is_chosen_by_all(
    capacity: str, degrees: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PlanModule] = []

    def undecided(spec: Spec, **options: Any) -> PlanModule:
        """Equal scores go to the lower index: expert 0."""
        model = reference(spec, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("moe.gate.weight"):
                torch.nn.init.zeros_(parameter)
                parameter.data[:, 0] = 1.0  # verify draws what is zeros alone
        made.append(model)
        return model

    monkeypatch.setattr(unsharded, "reference", undecided)
    plan = moe_plan(gate="topk(1)", experts=4, dim=8, expert="swiglu(4)", beside=CAPACITIES[capacity], **degrees)
    require_equal(plan)
    tokens = degrees["ranks"] * inputs.SEQUENCES_PER_RANK * plan.spec.train.sequence
    # A factor of 1 has as many places as evenly loaded experts would need.
    kept = tokens if capacity in ("dropless", "dynamic") else tokens // 4
    assert all(counts.tolist() == [kept, 0, 0, 0] for counts in made[0].expert_counts.values())
