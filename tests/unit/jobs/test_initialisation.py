"""New parameters: the same values for any sharding."""

import pytest
import torch
from support.plans import moe_plan, moe_spec

from moec.passes.ir import Layout, Mesh, Shard, local_slices
from moec.runtime.host.reference import reference
from moec.runtime.weights.shards import initial_shard


@pytest.mark.parametrize(("ranks", "ep"), [(4, 1), (4, 2), (4, 4), (8, 2)])
def test_every_rank_starts_with_its_part_of_the_unsharded_start(ranks: int, ep: int, monkeypatch):
    # Blocks that do not align with shards.
    monkeypatch.setattr("moec.runtime.weights.shards.CPU_CHUNK", 3 * 2 * 16 * 16)
    monkeypatch.setattr("moec.runtime.weights.shards.SMALL", 0)
    plan = moe_plan(ranks=ranks, ep=ep)
    whole = dict(reference(plan.spec, seed=5).named_parameters())
    assert whole.keys() == plan.parameters.keys()
    for name, data in plan.parameters.items():
        mesh = plan.meshes[data.mesh]
        index = [local_slices(data.shape, data.master, mesh, rank) for rank in range(ranks)]
        for rank in range(ranks):
            shard = initial_shard(name, data, mesh, rank, seed=5)
            torch.testing.assert_close(shard, whole[name].detach()[index[rank]], rtol=0, atol=0)


def test_parameters_and_seeds_differ_from_each_other():
    first, second = (dict(reference(moe_spec(), seed=seed).named_parameters()) for seed in (0, 1))
    assert not torch.equal(first["head.weight"], second["head.weight"])
    assert not torch.equal(first["head.weight"], first["embedding.weight"])
    experts = first["layers.1.moe.experts.up.weight"]
    assert len({row.sum().item() for row in experts}) == len(experts)


def test_the_start_has_the_spread_that_the_plan_states():
    big = moe_spec(dim=128, experts=8, expert="swiglu(256)")
    parameters = dict(reference(big).named_parameters())
    assert parameters["layers.1.moe.experts.up.weight"].std().item() == pytest.approx(0.02, rel=0.01)
    assert torch.equal(parameters["norm.weight"], torch.ones(128))


def test_an_outer_axis_cuts_before_an_inner_one():
    mesh = Mesh("dense", (("dp", 2), ("tp", 3)))
    layout = Layout.of({"dp": Shard(0), "tp": Shard(0)})
    assert [local_slices((12,), layout, mesh, rank)[0].start for rank in range(6)] == [0, 2, 4, 6, 8, 10]


def test_weights_are_drawn_in_fp32_whatever_the_dtype():
    narrow, wide = (dict(reference(moe_spec(dtype=dtype), seed=5).named_parameters()) for dtype in ("bf16", "fp32"))
    for name, drawn in wide.items():
        assert torch.equal(narrow[name], drawn)
    assert not torch.equal(narrow["head.weight"], narrow["head.weight"].bfloat16())
