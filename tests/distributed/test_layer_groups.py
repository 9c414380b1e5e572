"""`moec.layer` in other process groups than those that it was made in: refused on every rank, before a collective."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.plans import layer_text
from support.ranks.foreign_cells import code_of
from support.ranks.gloo_pool import GlooPool
from support.ranks.hosts import Transformer, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import moec

TEXT, X = layer_text(ranks=None), torch.ones(2, 3, 16)


def begin(folder: str, name: str, *, alone: bool = False) -> None:
    """A new default group of both ranks, or of this one alone; the last one is destroyed."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    store = dist.FileStore(str(Path(folder, name)), 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    dist.barrier()  # the other rank may end its group before this one has connected to it


def in_one_group_after_another(folder: str) -> dict[str, str]:
    """The codes of forward passes, by what came between the layer and them."""
    early, used = moec.layer(TEXT), moec.layer(TEXT)
    used(X)
    begin(folder, "alone", alone=True)
    of_one = moec.layer(TEXT)
    found = {"early, a group of one": code_of(lambda: early(X)), "of one, in it": code_of(lambda: of_one(X))}
    begin(folder, "first")
    found["early"] = code_of(lambda: early(X))
    found["early, used before"] = code_of(lambda: used(X))
    found["early, in evaluation"] = code_of(lambda: copy.deepcopy(early).eval()(X))
    found["of one, then two"] = code_of(lambda: of_one(X))
    layer = moec.layer(TEXT)
    found["late"] = code_of(lambda: layer(X))
    begin(folder, "second")
    found["destroyed and made anew"] = code_of(lambda: layer(X))
    begin(folder, "smaller", alone=True)
    found["smaller"] = code_of(lambda: layer(X))
    dist.destroy_process_group()
    found["none"] = code_of(lambda: layer(X))
    plan = moec.compile(TEXT, world_size=2)
    with pytest.raises(moec.DiagnosticError) as caught:
        moec.layer(plan)
    found["a plan of two, no group"] = caught.value.diagnostics[0].help.partition(",")[0]
    return found


def test_a_layer_runs_in_the_groups_that_it_was_made_in_alone(gloo: GlooPool, tmp_path: Path) -> None:
    for found in gloo.run(2, in_one_group_after_another, str(tmp_path), initialize=False):
        assert found == {
            "early, a group of one": "none",
            "of one, in it": "none",
            "early": "MOE0745",
            "early, used before": "MOE0745",
            "early, in evaluation": "MOE0745",
            "of one, then two": "MOE0745",
            "late": "none",
            "destroyed and made anew": "MOE0709",
            "smaller": "MOE0709",
            "none": "MOE0709",
            "a plan of two, no group": "make the layer after `torch.distributed.init_process_group`",
        }


def of_one_rank_in_hosts() -> dict[str, str]:
    """Layers of one rank in hosts of two: the codes of forward, and whether replicas agree."""
    groups = [dist.new_group([rank]) for rank in range(2)]

    def model() -> Transformer:
        return Transformer(lambda number: moec.layer(TEXT, groups[dist.get_rank()], seed=number))

    ignoring, sharding = model(), model()
    names = moec.expert_parameters(ignoring)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, names)
    found = {"ignored by DDP": code_of(lambda: DistributedDataParallel(ignoring)(X))}
    experts = set(moec.expert_parameters(sharding).values())
    fully_shard(sharding, ignored_params=experts)
    found["ignored by fully_shard"] = code_of(lambda: sharding(X))
    managed = model()
    hosted = DistributedDataParallel(managed)
    x, wanted = (part.chunk(2)[dist.get_rank()] for part in batch(2))
    ((hosted(x) - wanted).square().mean() + managed.aux_loss()).backward()
    squares = [parameter.grad.square().sum() for parameter in managed.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(managed.parameters(), 0.1)
    assert torch.allclose(norm, torch.stack(squares).sum().sqrt())
    norms = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(norms, norm)
    found["managed by DDP"] = "equal" if torch.equal(*norms) else f"{norms}"
    found["managed by fully_shard"] = code_of(lambda: fully_shard(model())(X))
    return found


def test_a_layer_of_one_rank_is_refused_in_hosts_that_leave_its_experts_out(gloo: GlooPool) -> None:
    for found in gloo.run(2, of_one_rank_in_hosts):
        assert found == {
            "ignored by DDP": "MOE0711",
            "ignored by fully_shard": "MOE0711",
            "managed by DDP": "equal",
            "managed by fully_shard": "none",
        }


def in_fsdp_over_others() -> list[str]:
    """The codes of layers over two ranks in `fully_shard` over four, and over the same two."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "member"))
    codes = []
    for span in (init_device_mesh("cpu", (4,)), halves["member"]):
        model = Transformer(lambda number: moec.layer(TEXT, groups[rank // 2], seed=number))
        experts = set(moec.expert_parameters(model).values())
        fully_shard(model, mesh=span, ignored_params=experts)
        codes.append(code_of(lambda model=model: model(X)))
    return codes


def test_fully_shard_over_other_ranks_than_the_layers_is_refused(gloo: GlooPool) -> None:
    assert gloo.run(4, in_fsdp_over_others) == [["MOE0711", "none"]] * 4


def in_sharded_data_parallel() -> list[str]:
    """The codes of FSDP around a model, before its first forward pass and after it; then without the experts."""
    codes = []
    for runs_before, ignores in ((False, False), (True, False), (False, True)):
        model = Transformer(lambda number: moec.layer(TEXT, seed=number))
        if runs_before:
            model(X)
        ignored = list(moec.expert_parameters(model).values()) if ignores else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the CPU, and of what torch deprecates
            hosted = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=True, ignored_states=ignored
            )
            codes.append(code_of(lambda hosted=hosted: hosted(X)))
    return codes


def test_the_older_fsdp_is_refused(gloo: GlooPool) -> None:
    assert gloo.run(2, in_sharded_data_parallel) == [["MOE0711"] * 3] * 2


def norms_of_a_copy() -> list[float]:
    """The norm that torch takes of a model, of its copy, and that moec takes; of two orders."""
    model: nn.Module = Transformer(lambda number: moec.layer(layer_text(ranks=None, dim=16), seed=number))
    model(X)
    copied = copy.deepcopy(model)
    found = []
    for each in (model, copied):
        each.zero_grad()
        (each(X * (1 + dist.get_rank())).square().sum() + each.aux_loss()).backward()
        for name, parameter in each.named_parameters():
            if name not in moec.expert_parameters(each):
                dist.all_reduce(parameter.grad)
        found.append(float(torch.nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None])))
    found.append(float(moec.clip_grad_norm_(copied, 1e9)))
    gradients = [parameter.grad for parameter in copied.parameters() if parameter.grad is not None]
    largest = torch.stack([gradient.abs().max() for gradient in gradients]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found.append(float(torch.nn.utils.get_total_norm(gradients, float("inf")) - largest))
    return found


def test_torch_counts_the_experts_of_copies_and_in_any_norm(gloo: GlooPool) -> None:
    for norm, copied, by_moec, largest in gloo.run(2, norms_of_a_copy):
        assert norm == copied == pytest.approx(by_moec, rel=1e-6)
        assert largest == 0
