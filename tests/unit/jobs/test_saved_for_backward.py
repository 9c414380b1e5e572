"""A plan's mixtures save, of all tensors as large as rows, only the experts' input rows."""

from __future__ import annotations

import pytest
import torch
from support.plans import moe_plan
from torch import Tensor

from moec.runtime.host.reference import reference
from moec.runtime.verify.cluster.virtual import VirtualCluster

ROWS = ("rows", "rows.1", "y", "y.1", "weighted", "weighted.1")
"""Values of a mixture as large as one token per choice."""


@pytest.mark.parametrize("capacity", ["dropless", "factor(1.25)", "dynamic"])
@pytest.mark.parametrize("degrees", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 1}], ids=str)
def test_experts_outputs_are_not_kept(capacity: str, degrees: dict[str, int]) -> None:
    plan = moe_plan(ranks=4, beside=f"capacity = {capacity}; shared = swiglu(8)", **degrees)
    model = reference(plan.spec, seed=0, dtype=torch.float64)
    cluster = VirtualCluster(plan, {name: p.detach() for name, p in model.named_parameters()})
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    shares = [tokens.chunk(plan.data_size)[plan.data_rank(rank)] for rank in range(plan.world_size)]
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        cluster.lockstep.record()
        cluster.step(shares, shares).run(before="backward")
    nodes = cluster.lockstep.nodes or []
    of_rows = [(node.key, value) for node in nodes if node.key in ROWS for value in node.values]
    kept = {name for name, value in of_rows if value.data_ptr() in saved}
    assert kept == ({"rows.1"} if degrees["ep"] > 1 else set())
    assert ("weighted.1" in dict(of_rows)) == (degrees["ep"] > 1)
