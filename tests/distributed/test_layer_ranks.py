"""`moec.layer` over a process group: its errors, its group, and ranks that differ."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.plans import layer_text
from support.ranks.gloo_pool import GlooPool
from support.ranks.hosts import Transformer, in_ddp, in_fsdp, layers_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moec
from moec.passes.ir import local_slices
from moec.runtime.weights.masters import local_part


def refusal(act: Any, *arguments: Any) -> str:
    """The error that `act` raises."""
    with pytest.raises(moec.DiagnosticError) as caught:
        act(*arguments)
    return f"{caught.value}\n{caught.value.diagnostics[0].help}"


def own_part(layer: moec.moec.MoeLayer, name: str, whole: Tensor) -> Tensor:
    plan = layer._home.plan
    data = plan.parameters[f"layers.0.moe.{name}"]
    return whole[local_slices(data.shape, data.layout, plan.meshes[data.mesh], layer._home.rank)]


BIASED = layer_text(ranks=None, gate="topk(2, score = sigmoid, normalize = true, bias = online(0.01))")


def steps_with_biases() -> list[Tensor]:
    """The biases after each of three steps, of which the first has two micro-batches."""
    layer, rank = moec.layer(BIASED), dist.get_rank()
    optimizer, found = torch.optim.SGD(layer.parameters(), lr=0.1), []
    for step in range(3):
        for part in range(2 if step == 0 else 1):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            layer(torch.randn(5, 16, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moec.end_step(layer)
        found.append(layer.get_buffer("gate.bias").clone())
    return found


def forgotten_step() -> str:
    layer = moec.layer(BIASED)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return refusal(layer, torch.ones(2, 16))


# ---- as a rank -----------------------------------------------------------------------------------------


def made_with(options: dict[str, Any]) -> str:
    return refusal(moec.layer, layer_text(ranks=None, **options))


def made_with_seed_of_rank() -> str:
    return refusal(lambda: moec.layer(layer_text(ranks=None), seed=dist.get_rank() % 2))


def uneven(dtype: str) -> dict[str, float]:
    """Ranks with other numbers of tokens, one without any: errors of y, of x's gradient and of all others."""
    rank, text = dist.get_rank(), layer_text(ranks=None, dtype=dtype)
    sizes = [7, 0, 3, 12]
    layer, whole = moec.layer(text, reduction="sum"), moec.reference(text)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(sizes), 16, generator=generator).to(layer._weights.specs[0].dtype)
    target = torch.randn(sum(sizes), 16, generator=generator)
    mine = x.split(sizes)[rank].clone().requires_grad_()
    y = layer(mine)
    (y.float() * target.split(sizes)[rank]).sum().backward()
    x.requires_grad_()
    expected = whole(x)
    (expected.float() * target).sum().backward()
    gate = layer.get_parameter("gate.weight").grad
    dist.all_reduce(gate)
    pairs = {"y": (y, expected.split(sizes)[rank]), "x": (mine.grad, x.grad.split(sizes)[rank])}
    for name, parameter in layer.named_parameters():
        wanted = whole.get_parameter(name).grad
        pairs[name] = (gate, wanted) if name == "gate.weight" else (parameter.grad, own_part(layer, name, wanted))
    pairs = {name: (a.detach(), b.detach()) for name, (a, b) in pairs.items()}
    scale = {name: float(b.abs().max()) if b.numel() else 1.0 for name, (_, b) in pairs.items()}
    return {name: float((a - b).abs().max()) / scale[name] if a.numel() else 0.0 for name, (a, b) in pairs.items()}


def uneven_with_capacity() -> str:
    layer = moec.layer(layer_text(ranks=None, beside="capacity = factor(1.0)"))
    return refusal(layer, torch.ones(1 + dist.get_rank(), 16))


def wrong_on_one_rank(wrong: str) -> str:
    layer = moec.layer(layer_text(ranks=None))
    x = {"width": torch.ones(4, 15), "nan": torch.full((4, 16), torch.nan)}[wrong]
    return refusal(layer, x if dist.get_rank() == 1 else torch.ones(4, 16))


def share_an_expert(model: Transformer) -> None:
    """Its layers have one parameter of their experts in common, which then has two names."""
    one, other = layers_of(model)
    other.get_submodule("experts.up").weight = one.get_parameter("experts.up.weight")


def wrapped_whole(host: str) -> list[str]:
    """The error of forward in a host that manages experts, and in one that ignores them."""
    x, model = torch.ones(2, 3, 16), Transformer(lambda number: moec.layer(layer_text(ranks=None), seed=number))
    if host == "ddp":
        wrapped = DistributedDataParallel(model)
    elif host == "ddp, a parameter with two names":
        share_an_expert(model)
        wrapped, _ = in_ddp(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    said = refusal(wrapped, x)
    again = Transformer(lambda number: moec.layer(layer_text(ranks=None), seed=number))
    if names := re.search(r"`({n for .*?})`", said):
        share_an_expert(again)
        ignored = eval(names[1], {"model": again, "moec": moec})  # noqa: S307  the line of the message
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(again, ignored)
        told = DistributedDataParallel(again)
    else:
        told, _ = in_fsdp(again)
    return [said, str(told(x).shape)]


def over_two_groups() -> dict[str, Any]:
    """Ranks 0 and 2 share one layer, ranks 1 and 3 another."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    text = layer_text(ranks=None)
    layer = moec.layer(text, groups[rank % 2], seed=rank % 2)
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(9))
    y = layer(x[rank : rank + 1])
    whole = moec.reference(text, seed=rank % 2)
    other_group = refuses_foreign_group(text, groups[1 - rank % 2])
    return {
        "experts": (layer.local_experts, layer.get_parameter("experts.up.weight").shape[0]),
        "right": torch.allclose(y, whole(x[rank : rank + 1]), atol=1e-6),
        "other group": other_group,
    }


def refuses_foreign_group(text: str, group: Any) -> str:
    try:
        moec.layer(text, group)
    except ValueError as error:
        return str(error)
    return ""


def shared_groups() -> tuple[int, int]:
    """The process groups that a second and a third layer add."""
    from torch.distributed.distributed_c10d import _world

    counts = []
    for _ in range(3):
        moec.layer(layer_text(ranks=None, ep=2))(torch.ones(2, 16))
        counts.append(len(_world.pg_map))
    return counts[1] - counts[0], counts[2] - counts[1]


def used_and_dropped(backward: bool) -> bool:
    """Whether a layer is freed after a pass, whose graph its `aux_loss` keeps."""
    layer = moec.layer(layer_text(ranks=None, ep=2))
    y = layer(torch.ones(2, 16))
    assert layer.aux_loss is not None
    if backward:
        (y.sum() + layer.aux_loss).backward()
    dropped = ref(layer)
    del layer, y
    gc.collect()
    return dropped() is None


def late_gradients(drop: bool) -> dict[str, Tensor]:
    """This rank's gradients of a backward pass, also where the layer is gone before it."""
    layer = moec.layer(layer_text(ranks=None, ep=2), seed=1)
    parameters = dict(layer.named_parameters())
    loss = layer(torch.arange(32.0).view(2, 16) / 32).square().sum() + layer.aux_loss
    if drop:
        del layer
        gc.collect()
    loss.backward()
    return {name: local_part(parameter.grad) for name, parameter in parameters.items()}


def states() -> dict[str, Any]:
    rank, text = dist.get_rank(), layer_text(ranks=None, ep=2)
    layer, whole = moec.layer(text, seed=1), moec.reference(text, seed=2)
    layer.load_state_dict(whole.state_dict())
    unsigned = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    layer.load_state_dict(unsigned)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))
    own = layer.state_dict()
    with torch.device("meta"):
        moved = moec.layer(text)
    moved.to_empty(device="cpu").load_state_dict(whole.state_dict())
    parts = {name: local_part(tensor) for name, tensor in own.items()}
    copied = copy.deepcopy(layer)
    copied.load_state_dict(copy.deepcopy(own))
    foreign = layer.state_dict()
    foreign._metadata[""]["moec"] = {"ranks": 2, "rank": 1 - rank}
    return {
        "right": torch.allclose(copied(x), whole(x), atol=1e-6),
        "foreign": refusal(layer.load_state_dict, foreign),
        "parts": refusal(layer.load_state_dict, parts),
        "moved": all(torch.equal(local_part(tensor), parts[name]) for name, tensor in moved.state_dict().items()),
        "cloned": str(layer.load_state_dict({name: tensor.clone() for name, tensor in own.items()})),
    }


def after_its_group() -> str:
    layer = moec.layer(layer_text(ranks=None))
    layer(torch.ones(2, 16))
    dist.destroy_process_group()
    return refusal(layer, torch.ones(2, 16))


# ---- tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"ep": 3, "experts": 9}, "MOE0312"),
        ({"ep": 4, "experts": 6}, "MOE0311"),
        ({"tail": "parallel { dp = 2 }"}, "MOE0310"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_alike_on_every_rank(
    gloo: GlooPool, options: dict[str, Any], code: str
) -> None:
    said = gloo.run(4, made_with, options)
    assert len(set(said)) == 1
    assert code in said[0]


def test_biases_move_by_the_rows_of_all_ranks_and_a_forgotten_step_is_an_error_on_each(gloo: GlooPool) -> None:
    found = gloo.run(4, steps_with_biases)
    whole = moec.reference(BIASED)
    for part in range(2):
        x = [torch.randn(5, 16, generator=torch.Generator().manual_seed(10 * part + rank)) for rank in range(4)]
        whole(torch.stack(x))
    moec.end_step(whole)
    assert all(torch.equal(of_rank[0], whole.get_buffer("gate.bias")) for of_rank in found)
    assert whole.get_buffer("gate.bias").unique().numel() > 1
    for of_rank in found:
        assert all(torch.equal(a, b) for a, b in zip(of_rank, found[0], strict=True))
        assert not torch.equal(of_rank[1], of_rank[0])
    assert all("MOE0713" in said and "moec.end_step(model)" in said for said in gloo.run(4, forgotten_step))


def test_a_seed_that_differs_between_ranks_is_refused_on_every_rank(gloo: GlooPool) -> None:
    assert all("MOE0720" in said and "rank 0 and rank 1" in said for said in gloo.run(4, made_with_seed_of_rank))


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_ranks_may_have_other_numbers_of_tokens_or_none(gloo: GlooPool, dtype: str, bound: float) -> None:
    for errors in gloo.run(4, uneven, dtype):
        assert max(errors.values()) < bound, errors


def test_with_a_capacity_they_may_not(gloo: GlooPool) -> None:
    said = gloo.run(2, uneven_with_capacity)
    assert len(set(said)) == 1
    assert re.search(r"MOE0702.*shapes from \[1, 1\] to \[1, 2\]", said[0])


@pytest.mark.parametrize(("wrong", "code"), [("width", "MOE0702"), ("nan", "MOE0708")])
def test_one_ranks_bad_input_is_an_error_on_every_rank(gloo: GlooPool, wrong: str, code: str) -> None:
    said = gloo.run(2, wrong_on_one_rank, wrong)
    assert len(set(said)) == 1
    assert code in said[0]
    assert "rank 1: " in said[0]


@pytest.mark.parametrize("host", ["ddp", "ddp, a parameter with two names", "fsdp"])
def test_a_host_that_takes_over_the_experts_is_refused_before_it_computes(gloo: GlooPool, host: str) -> None:
    for said, told in gloo.run(2, wrapped_whole, host):
        assert "MOE0711" in said
        assert "moec.expert_parameters(model)" in said
        assert told == "torch.Size([2, 3, 16])"


def test_it_takes_the_group_that_it_is_given(gloo: GlooPool) -> None:
    for rank, found in enumerate(gloo.run(4, over_two_groups)):
        assert found["experts"] == (range(4, 8) if rank >= 2 else range(4), 4)
        assert found["right"]
        assert "is not one of them" in found["other group"]


def test_layers_share_their_process_groups(gloo: GlooPool) -> None:
    assert gloo.run(4, shared_groups) == [(0, 0)] * 4


@pytest.mark.parametrize("backward", [False, True])
def test_a_layer_that_is_dropped_is_freed(gloo: GlooPool, backward: bool) -> None:
    assert gloo.run(2, used_and_dropped, backward) == [True, True]


def test_a_layer_that_is_dropped_before_its_backward_pass_has_the_gradients_of_one_that_is_not(gloo: GlooPool) -> None:
    for kept, dropped in zip(*(gloo.run(2, late_gradients, drop) for drop in (False, True)), strict=True):
        torch.testing.assert_close(dropped, kept, rtol=0, atol=0)


def test_of_whole_tensors_a_rank_takes_its_part_and_of_parts_only_its_own(gloo: GlooPool) -> None:
    for found in gloo.run(2, states):
        assert found["right"]
        assert "MOE0712" in found["foreign"]
        assert "could be any rank's part" in found["parts"]
        assert found["moved"]
        assert found["cloned"] == "<All keys matched successfully>"


def test_after_its_process_group_it_says_so(gloo: GlooPool) -> None:
    assert all("MOE0709" in said for said in gloo.run(2, after_its_group))


def checkpointed(folder: str) -> list[bool]:
    """Whether torch's own checkpoint gives every rank its experts back."""
    import torch.distributed.checkpoint as dcp

    text = layer_text(ranks=None, ep=2)
    layer, other = moec.layer(text, seed=1), moec.layer(text, seed=2)
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    return [torch.equal(one, two) for one, two in zip(layer.parameters(), other.parameters(), strict=True)]


def test_torchs_checkpoint_keeps_the_experts_of_every_rank(gloo: GlooPool, tmp_path: Path) -> None:
    assert all(all(found) for found in gloo.run(4, checkpointed, str(tmp_path / "checkpoint")))


def resumed(folder: str, whole: bool) -> bool:
    """Whether steps after torch's own checkpoint of layer and optimizer are those without it, on this rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    def made(seed: int) -> tuple[moec.MoeLayer, torch.optim.Optimizer]:
        layer = moec.layer(layer_text(ranks=None, ep=2), seed=seed)
        return layer, torch.optim.AdamW(layer.expert_parameters(), lr=0.1)

    def step(layer: moec.MoeLayer, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.randn(5, 16, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
        optimizer.step()

    options = StateDictOptions(full_state_dict=whole)
    trained, other = copy.deepcopy((made(1), made(2)))  # copies are known too
    step(*trained)
    states = get_state_dict(*trained, options=options)
    if whole:
        states = copy.deepcopy(states)
    else:
        dcp.save(dict(zip("mo", states, strict=True)), checkpoint_id=folder)
        states = get_state_dict(*other)
        dcp.load(dict(zip("mo", states, strict=True)), checkpoint_id=folder)
    model, optimizer = states
    set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer, options=options)
    step(*trained)
    step(*other)
    return all(torch.equal(a, b) for a, b in zip(trained[0].parameters(), other[0].parameters(), strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_torchs_checkpoint_keeps_the_optimizers_state_of_every_ranks_experts(
    gloo: GlooPool, tmp_path: Path, whole: bool
) -> None:
    assert all(gloo.run(4, resumed, str(tmp_path / "checkpoint"), whole))


def factored() -> str:
    """What is said of a state that has another shape than its experts, and of an optimizer that gives its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    layer = moec.layer(layer_text(ranks=None))
    optimizer = torch.optim.Adafactor(layer.expert_parameters())
    itself = refusal(lambda: dcp.save({"optimizer": optimizer}, checkpoint_id="nowhere"))
    return refusal(get_optimizer_state_dict, layer, optimizer) + itself


def test_a_state_of_another_shape_than_its_experts_is_not_saved_as_if_it_were_all(gloo: GlooPool) -> None:
    for said in gloo.run(2, factored):
        assert re.search(r"MOE0746.*`row_var` .* of this rank's experts", said)
        assert "the optimizer itself gives this rank's states of experts" in said


def wrapped_late(host: str) -> str:
    """A host that wraps the model after a first forward pass and manages experts.

    As many hosts of another model have gone in the meantime.
    """
    others = [fully_shard(torch.nn.Linear(4, 4)) for _ in range(3)]
    x, model = torch.ones(2, 3, 16), Transformer(lambda number: moec.layer(layer_text(ranks=None), seed=number))
    model(x)
    others.clear()
    gc.collect()
    if host == "ddp":
        return refusal(DistributedDataParallel(model), x)
    for block in model.blocks:
        fully_shard(block)
    return refusal(fully_shard(model), x)


@pytest.mark.parametrize("host", ["ddp", "fsdp"])
def test_a_host_that_comes_late_is_refused_as_well(gloo: GlooPool, host: str) -> None:
    assert all("MOE0711" in said for said in gloo.run(4, wrapped_late, host))


def in_half_of_the_host() -> str:
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    model = Transformer(lambda number: moec.layer(layer_text(ranks=None), groups[rank // 2], seed=number))
    names = moec.expert_parameters(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return refusal(DistributedDataParallel(model), torch.ones(2, 3, 16))


def test_a_host_over_other_ranks_than_the_layers_is_refused(gloo: GlooPool) -> None:
    for said in gloo.run(4, in_half_of_the_host):
        assert "DistributedDataParallel spans the ranks [0, 1, 2, 3], but a layer in it spans" in said


def reentrant() -> str:
    from torch.utils.checkpoint import checkpoint

    layer = moec.layer(layer_text(ranks=None), seed=1)
    x = torch.ones(2, 3, 16, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=True)
    assert layer.aux_loss is not None
    return refusal(lambda: (y.sum() + layer.aux_loss).backward())


def test_a_checkpoint_that_loses_the_gradient_of_aux_loss_is_refused(gloo: GlooPool) -> None:
    assert all("MOE0711" in said and "use_reentrant=True" in said for said in gloo.run(2, reentrant))


def tied_norms() -> tuple[float, float]:
    """The gradient norm of two layers with tied experts."""
    model = torch.nn.ModuleList(moec.layer(layer_text(ranks=None, ep=1), seed=1) for _ in range(2))
    model[1].experts = model[0].experts
    sum(layer(torch.ones(2, 3, 16)).square().sum() for layer in model).backward()
    squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    return float(moec.clip_grad_norm_(model, 1e9)), squares**0.5


def test_experts_that_two_layers_share_count_once_in_the_norm(gloo: GlooPool) -> None:
    for norm, expected in gloo.run(1, tied_norms):
        assert norm == pytest.approx(expected, rel=1e-5)
