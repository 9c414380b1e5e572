"""`moec.layer` in one process, without any process group."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.plans import layer_plan, layer_text, moe_plan, moe_text
from support.verified import require_equal
from torch import Tensor

import moec
from moec.runtime.errors import JobError

ALONE = layer_text(ranks=None)


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def by_hand(layer: moec.MoeLayer, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """y and the switch loss of one sequence of top-2 swiglu experts, from the papers, expert by expert."""
    weights = dict(layer.named_parameters())
    p_TE = F.softmax(F.linear(x_TD, weights["gate.weight"]), -1)
    best, chosen = p_TE.topk(2)
    best = best / best.sum(-1, keepdim=True)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(p_TE.shape[1]):
        gate, up = (F.linear(x_TD, w) for w in weights["experts.up.weight"][expert])
        out = F.linear(F.silu(gate) * up, weights["experts.down.weight"][expert])
        y_TD = y_TD + out * (best * (chosen == expert)).sum(-1, keepdim=True)
    f = F.one_hot(chosen, p_TE.shape[1]).sum((0, 1)) / chosen.numel()
    return y_TD, p_TE.shape[1] * (f * p_TE.mean(0)).sum()


def test_it_is_the_mixture_of_the_papers_and_nothing_around_it():
    layer = moec.layer(layer_text(ranks=None, balance="[switch_loss(0.01)]"))
    x = x_of(9, 16)
    y, (wanted, balance) = layer(x), by_hand(layer, x)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(layer.aux_loss, 0.01 * balance)
    assert layer.expert_counts.sum() == 18


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (2, 3, 4, 16), (0, 16), (2, 0, 16)])
def test_any_leading_dims(shape: tuple[int, ...]):
    layer, x = moec.layer(ALONE), x_of(*shape)
    y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    (y.sum() + layer.aux_loss).backward()
    assert torch.isfinite(x.grad).all()
    # Without a capacity y of a token depends on no other token, so leading dims do not matter.
    torch.testing.assert_close(y.reshape(-1, 16), layer(x.detach().reshape(-1, 16)))


def test_vectors_without_a_batch_are_one_sequence_and_more_dims_are_batches():
    text = layer_text(ranks=None, balance="[switch_loss(1.0)]", beside="group = sequence")
    layer, x = moec.layer(text), x_of(6, 5, 16).detach()
    layer(x.reshape(2, 3, 5, 16))
    several = layer.aux_loss.item()
    layer(x)
    assert layer.aux_loss.item() == several
    layer(x[0])
    one = layer.aux_loss.item()
    layer(x[:1])
    assert layer.aux_loss.item() == one != several


def test_parameters_are_fp32_plain_and_named_without_their_place_in_a_model():
    layer = moec.layer(layer_text(ranks=None, dtype="bf16", beside="shared = gelu(8)"))
    names = ["gate.weight", "experts.up.weight", "experts.down.weight", "shared.up.weight", "shared.down.weight"]
    assert {name: (type(p), p.dtype) for name, p in layer.named_parameters()} == dict.fromkeys(
        names, (torch.nn.Parameter, torch.float32)
    )
    assert [p.data_ptr() for p in layer.expert_parameters()] == [
        layer.get_parameter(f"experts.{part}.weight").data_ptr() for part in ("up", "down")
    ]


def test_a_router_that_stays_fp32_is_not_rounded():
    text = layer_text(ranks=None, dtype="bf16")
    rounds, keeps = moec.layer(text), moec.layer(text.replace("moe {", "keep_in_fp32 = [routers]\n  moe {"))
    exact = moec.reference(text, dtype=torch.float64)
    nearly_one = 1 + 2**-10 * torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    for layer in (rounds, keeps, exact):
        layer.get_parameter("gate.weight").data.copy_(nearly_one)  # in bf16 every expert is as good as another
    x = x_of(2, 64, 16)
    y, wanted = keeps(x), exact(x.double()).float()
    assert (y - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert (rounds(x) - wanted).abs().max() > 0.1 * wanted.abs().max()
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in keeps.parameters())
    require_equal(layer_plan(dtype="bf16", ranks=2))  # in float64, bf16 and float32
    rounds.bfloat16()
    rounds(x)
    with pytest.raises(JobError, match=r"MOE0711.*gate\.weight has been rounded before it reaches the layer"):
        keeps.bfloat16()(x)


def test_logits_of_a_router_in_the_layers_dtype_are_those_of_a_linear_layer_in_it():
    """As Tutel's gate without `fp32_gate` and Megatron's without `--moe-router-dtype` compute them."""
    text = layer_text(ranks=2, dtype="bf16", balance="[z_loss(1)]")
    rounds = text.replace("moe {", "router_dtype = model\n  moe {")
    x, found = x_of(64, 16), []
    for each, computed in ((text, torch.float32), (rounds, torch.bfloat16)):
        layer = moec.reference(each, seed=1)
        layer.get_parameter("gate.weight").data.mul_(50)
        layer(x)
        logits = F.linear(*(v.bfloat16().to(computed) for v in (x, layer.get_parameter("gate.weight")))).float()
        torch.testing.assert_close(layer.aux_loss, logits.logsumexp(-1).square().mean(), rtol=1e-6, atol=0)
        found.append(layer.aux_loss.item())
    assert abs(found[0] / found[1] - 1) > 1e-4
    require_equal(moec.compile(rounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_computes_in_its_own_dtype_and_gives_that_of_x(dtype: torch.dtype):
    layer, x = moec.layer(layer_text(ranks=None, dtype="bf16")), x_of(4, 16, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y.to(torch.bfloat16), layer(x.to(torch.bfloat16)))
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_a_process_alone_has_every_expert():
    assert moec.layer(ALONE).local_experts == moec.reference(ALONE).local_experts == range(8)


def test_autocast_changes_nothing_inside():
    layer, x = moec.layer(ALONE), x_of(4, 16)
    expected, expected_aux = layer(x), layer.aux_loss
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer.aux_loss, expected_aux)


def test_in_evaluation_experts_have_the_capacity_for_evaluation():
    layer = moec.layer(layer_text(ranks=None, gate="topk(1)", beside="capacity = factor(0.25, eval = 8.0)"))
    x = x_of(16, 16)
    layer(x)
    assert layer.expert_counts.sum() < 16
    layer.eval()(x)
    assert layer.expert_counts.sum() == 16


def test_a_copy_computes_the_same_and_learns_by_itself():
    layer, x = moec.layer(ALONE), x_of(4, 16)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.aux_loss is None
    assert torch.equal(twin(x), y)
    twin(x).sum().backward()
    assert all(p.grad is None for p in layer.parameters())


def test_layers_of_one_seed_start_alike_and_of_two_seeds_do_not():
    one, same, other = (moec.layer(ALONE, seed=seed).get_parameter("experts.up.weight") for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_frozen_experts_have_no_gradient_and_the_gate_still_has():
    layer = moec.layer(ALONE)
    for parameter in layer.expert_parameters():
        parameter.requires_grad_(False)
    layer(x_of(4, 16)).sum().backward()
    assert all(p.grad is None for p in layer.expert_parameters())
    assert layer.get_parameter("gate.weight").grad is not None


def test_a_layer_without_balance_has_no_aux_loss():
    layer = moec.layer(layer_text(ranks=None, balance="[]"))
    layer(x_of(4, 16))
    assert layer.aux_loss is None


def test_a_state_dict_loads_into_the_unsharded_layer_and_back():
    layer, whole = moec.layer(ALONE, seed=1), moec.reference(ALONE, seed=2)
    whole.load_state_dict(layer.state_dict())
    x = x_of(4, 16)
    assert torch.equal(whole(x), layer(x))
    moec.layer(ALONE).load_state_dict(whole.state_dict())


def test_a_cluster_in_the_file_is_not_the_process_group(tmp_path: Path):
    file = tmp_path / "ffn.moe"
    file.write_text(layer_text(ranks=4) + "train { batch = 3; sequence = 8 }\n")
    assert moec.layer(str(file)).get_parameter("experts.up.weight").shape[0] == 8


def test_a_plan_serves_as_well_if_it_is_for_as_many_ranks(tmp_path: Path):
    folder = layer_plan(ranks=1).save(tmp_path / "ffn.plan")
    x = x_of(4, 16)
    expected = moec.layer(ALONE)(x)
    assert torch.equal(moec.layer(folder)(x), expected)
    assert torch.equal(moec.layer(moec.load(folder))(x), expected)
    with pytest.raises(moec.DiagnosticError, match=r"MOE0701.*for 4 ranks, but the layer's process group has 1"):
        moec.layer(layer_plan(ranks=4))


def test_on_meta_nothing_is_allocated_and_torchs_default_device_is_the_default():
    assert next(moec.layer(ALONE, device="meta").parameters()).is_meta
    with torch.device("meta"):
        assert next(moec.layer(ALONE).parameters()).is_meta


@pytest.mark.parametrize("x", [torch.ones(4, 15), torch.ones(()), torch.ones(4, 16, dtype=torch.int64)])
def test_an_x_that_is_no_vectors_of_this_width_is_refused(x: Tensor):
    with pytest.raises(moec.DiagnosticError, match=r"MOE0702.*must be floating, \[…, 16\]"):
        moec.layer(ALONE)(x)


def test_router_logits_that_are_nan_are_refused_by_name():
    with pytest.raises(moec.DiagnosticError, match=r"MOE0708.*layer 0 \(<text>:6"):
        moec.layer(ALONE)(torch.full((2, 16), torch.nan))


@pytest.mark.parametrize("row", [0, 8, 16])
def test_a_nan_in_any_part_of_the_attention_router_is_refused_by_name(row: int):
    """Fused attention on CPU gives 0 for a query that is NaN."""
    layer = moec.layer(layer_text(ranks=None, gate="attention_router(2)"))
    weight = layer.get_parameter("gate.weight")
    assert weight.shape == (3 * 8, 16)
    with torch.no_grad():
        weight[row] = torch.nan
    with pytest.raises(moec.DiagnosticError, match="MOE0708"):
        layer(torch.ones(2, 16))


def test_a_model_is_no_layer_and_a_layer_is_not_launched():
    with pytest.raises(moec.DiagnosticError, match="MOE0721"):
        moec.layer(moe_text(ranks=1, ep=1))
    with pytest.raises(moec.DiagnosticError, match="MOE0721"):
        moec.layer(moe_plan(ranks=1, ep=1))
    with pytest.raises(moec.DiagnosticError, match="MOE0721"):
        moec.launch(layer_plan())
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', not 'avg'"):
        moec.layer(ALONE, reduction="avg")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_host_may_convert_a_layer(dtype: torch.dtype):
    """A host such as `fully_shard` with a mixed-precision policy converts the parameters of its modules."""
    for layer in (moec.layer(ALONE), moec.reference(ALONE)):
        layer.to(dtype)(x_of(3, 16, dtype=dtype)).sum().backward()
        assert all(parameter.grad.dtype == dtype for parameter in layer.parameters())
