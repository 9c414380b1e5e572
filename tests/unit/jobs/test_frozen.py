"""Parts that `train { frozen = … }` names: no gradient, no master, no state; everything else trains as it did."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from support.combinations import diagonals
from support.one_rank_jobs import OPTIMIZERS, TOKENS, take_steps
from support.plans import layer_text, moe_plan
from torch import nn

import moec
from moec.codegen.folder import PlanError
from moec.codegen.plan import Plan
from moec.driver import load
from moec.passes.cost.totals import costs_of, tally
from moec.passes.cost.weight_traffic import sendings
from moec.passes.cost.weights import weight_bytes
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload
from moec.runtime.errors import JobError
from moec.runtime.verify.verification import verify

BASE = "embedding, attention, norms, ffn, shared, head"
TRAINED = {f"layers.{n}.moe.{part}.weight" for n in (1, 2) for part in ("gate", "experts.up", "experts.down")}
LORA = {"expert": "lora(3, alpha = 6)", "beside": "shared = swiglu(12)"}


def plan_of(frozen: str = BASE, optimizer: str = "adamw(lr = 1e-2)", **options: object) -> Plan:
    words = f"{optimizer}; frozen = [{frozen}]" if frozen else optimizer
    return moe_plan(**{"ranks": 1, "ep": 1, **LORA, "optimizer": words, **options})


@pytest.mark.parametrize(("optimizer", "dtype"), diagonals(list(OPTIMIZERS), ["fp32", "bf16"]))
def test_a_frozen_base_is_not_changed_and_the_rest_trains_as_with_parameters_frozen_by_hand(optimizer: str, dtype: str):
    with (
        moec.launch(plan_of(optimizer=OPTIMIZERS[optimizer], dtype=dtype), device="cpu") as job,
        moec.launch(plan_of("", OPTIMIZERS[optimizer], dtype=dtype), device="cpu") as other,
    ):
        model, by_hand = job.build(seed=1), other.build(seed=1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, parameter in by_hand.named_parameters():
            parameter.requires_grad_(name in TRAINED)
        optimizers = job.optimizer(model), other.optimizer(by_hand)
        for _ in range(2):
            assert take_steps(job, model, optimizers[0], 1) == take_steps(other, by_hand, optimizers[1], 1)
    computed = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for name, parameter in model.named_parameters():
        trains = name in TRAINED
        assert parameter.requires_grad == trains, name
        assert parameter.dtype == (torch.float32 if trains else computed), name
        assert torch.equal(parameter, before[name]) != trains, name
        assert torch.equal(parameter, by_hand.get_parameter(name).to(parameter.dtype)), name
    updated = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
    assert updated == {id(model.get_parameter(name)) for name in TRAINED}


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"recompute": "layer"}, {"recompute": "experts"}], ids=str)
def test_micro_batches_and_recomputation_change_no_gradient_beside_frozen_parts(options: dict[str, object]):
    found = []
    for given in ({}, options):
        with moec.launch(plan_of(**given), device="cpu") as job:
            model = job.build(seed=1)
            for n in (1, 2):  # the matrix that starts at zeros gives the one before it no gradient
                up = model.get_parameter(f"layers.{n}.moe.experts.up.weight")
                nn.init.normal_(up, generator=torch.Generator().manual_seed(n))
            job.step(model, TOKENS, TOKENS)
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == TRAINED
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_gradient_for_a_frozen_parameter_is_refused():
    with moec.launch(plan_of(), device="cpu") as job:
        model = job.build(seed=1)
        model.get_parameter("layers.1.moe.shared.up.weight").requires_grad_(True)
        with pytest.raises(JobError, match=r"MOE0713.*moe.shared.up.weight .*but the plan freezes it"):
            job.step(model, TOKENS, TOKENS)


# ---- the plan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
def test_only_zero_3_cuts_a_frozen_parameter_and_no_rank_sums_its_gradient(zero: int):
    plan = plan_of(ranks=4, tp=2, ep=2, zero=zero)
    for name, parameter in plan.parameters.items():
        assert parameter.frozen == (name not in TRAINED)
        if parameter.frozen:
            assert parameter.sum_over == ()
            assert parameter.gathered == ("per use" if zero == 3 else "never"), name
            assert parameter.weight == parameter.gradient == parameter.optimizer_state
        else:
            assert parameter.gathered == ("never", "per step", "per step", "per use")[zero], name
            assert parameter.scattered_per_pass == (zero > 1), name


@pytest.mark.parametrize("zero", range(4))
def test_a_frozen_parameter_costs_its_weight_alone(zero: int):
    """Per rank: 2 bytes of bf16 an element, cut by tp and by ZeRO 3; no gradient is sent, and ZeRO 3 gathers."""
    frozen, trained = (plan_of(words, ranks=4, tp=2, ep=2, zero=zero, dtype="bf16") for words in (BASE, ""))
    cost = costs_of(frozen.program, Workload.of(frozen.spec, frozen.program))["layers[1..2]"]
    frozen_bytes = weight_bytes(cost, frozen.spec, 1, in_pipeline=False)["@moe.shared.up.weight"]
    elements = 2 * 12 * 16 / 2
    assert frozen_bytes.masters == 2 * elements / (2 if zero == 3 else 1)
    assert frozen_bytes.compute_copies == frozen_bytes.regathered == (2 * elements if zero == 3 else 0)
    present = {f.name for f in fields(frozen_bytes) if getattr(frozen_bytes, f.name)}
    assert present == {"masters", *(("compute_copies", "regathered", "gather_buffers") if zero == 3 else ())}
    sent = list(sendings(cost.block, cost.workload, 1, cost.saved_parameters()))
    gradients = [s for s in sent if s.of == "gradients" and s.axis in ("dp", "tp")]
    router = 8 * 16 * 4
    assert sum(s.backward for s in gradients) <= 2 * 2 * router, "more than the router's gradient is sent"
    gathered = [s for s in sent if s.of == "weights" and s.axis == "dp"]
    assert bool(gathered) == (zero > 0)
    less, more = (tally(plan.program, plan.spec) for plan in (frozen, trained))
    assert less.state_bytes < more.state_bytes / 2
    assert less.flops_per_token < more.flops_per_token
    assert less.activation_bytes < more.activation_bytes


def test_a_dense_layer_with_a_frozen_weight_has_two_products_instead_of_three():
    frozen, trained = (
        costs_of(program, Workload.of(plan.spec, program))["layers[0]"]
        for plan in (plan_of(), plan_of(""))
        for program in (plan.program,)
    )
    for (op, less), (_, more) in zip(frozen.costs, trained.costs, strict=True):
        if op.mnemonic == "linear":
            assert more.work.backward.flops == 2 * more.work.forward.flops
            assert less.work.backward.flops == less.work.forward.flops == more.work.forward.flops


def test_the_text_of_a_program_says_what_is_frozen(tmp_path: Path):
    plan = plan_of(ranks=4, tp=2, ep=2, zero=3)
    assert load(plan.save(tmp_path / "a.plan")).program == plan.program
    other = replace(plan, program=plan_of("", ranks=4, tp=2, ep=2, zero=3).program)
    with pytest.raises(PlanError, match=r"MOE0601.*its parameter .* is not that of the Spec"):
        load(other.save(tmp_path / "b.plan"))


# ---- moec verify -----------------------------------------------------------------------------------------


def thawed(program: Program, name: str) -> Program:
    """The Program with one frozen parameter that trains, without the sum of its gradient."""
    blocks = (
        replace(b, parameters=tuple(replace(p, frozen=p.frozen and p.name != name) for p in b.parameters))
        for b in program.blocks
    )
    return replace(program, blocks=tuple(blocks))


def test_verify_finds_a_plan_that_trains_what_the_file_freezes():
    plan = plan_of(ranks=2, tp=1, ep=2)
    assert verify(plan).ok
    report = verify(replace(plan, program=thawed(plan.program, "ffn_norm.weight")))
    assert not report.ok
    assert "ffn_norm.weight" in report.worst


def test_verify_sees_through_frozen_layers_which_op_is_wrong():
    """The experts' second matrix starts at zeros, and would hide everything before it."""
    plan = plan_of(ranks=2, tp=1, ep=2)
    blocks = []
    for block in plan.program.blocks:
        ops = [replace(op, factor=op.factor * 2) if op.mnemonic == "scale" else op for op in block.ops]
        blocks.append(replace(block, ops=tuple(ops)))
    report = verify(replace(plan, program=replace(plan.program, blocks=tuple(blocks))))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "scale"


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*computes something else. keep_in_fp32")
def test_a_checkpoint_loads_where_other_parts_are_frozen(tmp_path: Path):
    """A base trained in bf16 has fp32 masters; frozen it is kept as layers compute with it."""
    plans = {"trains": plan_of("", dtype="bf16"), "frozen": plan_of(dtype="bf16")}
    plans["keeps"] = plan_of("gate", dtype="bf16", model="keep_in_fp32 = [routers]")
    loads = [("trains", "frozen"), ("frozen", "trains"), ("frozen", "frozen"), ("frozen", "keeps"), ("keeps", "frozen")]
    for saved, loaded in loads:
        path = tmp_path / f"{saved} {loaded}"
        with moec.launch(plans[saved], device="cpu") as job:
            model = job.build(seed=1)
            job.save(path, model).wait()
            expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        with moec.launch(plans[loaded], device="cpu") as job:
            model = job.build(seed=2)
            job.load(path, model)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


def test_resumed_training_with_a_frozen_base_goes_on_as_if_it_had_not_stopped(tmp_path: Path):
    losses = []
    for stops in (False, True):
        with moec.launch(plan_of(dtype="bf16"), device="cpu") as job:
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            first = take_steps(job, model, optimizer, 2)
            if stops:
                job.save(tmp_path / "2", model, optimizer).wait()
                model = job.build(seed=3)
                optimizer = job.optimizer(model)
                job.load(tmp_path / "2", model, optimizer)
            losses.append(first + take_steps(job, model, optimizer, 2))
    assert losses[0] == losses[1]


def test_a_dense_model_is_loaded_into_the_frozen_base_of_its_mixture():
    with moec.launch(moe_plan(ranks=1, ep=1, mixtures=(), depth=2, **LORA), device="cpu") as job:
        dense = {name: p.detach().clone() for name, p in job.build(seed=5).named_parameters()}
    base = {name: p for name, p in dense.items() if "moe.gate" not in name and "moe.experts" not in name}
    with moec.launch(plan_of(depth=2, dtype="bf16"), device="cpu") as job:
        model = job.build(seed=1)
        missing, unexpected = model.load_state_dict(base, strict=False)
        assert {name for name in missing if "moe.gate" not in name and "moe.experts" not in name} == set()
        assert unexpected == []
        for name, whole in base.items():
            assert torch.equal(model.get_parameter(name), whole.bfloat16())
        take_steps(job, model, job.optimizer(model), 1)


# ---- a layer by itself -------------------------------------------------------------------------------------


def test_a_layer_file_freezes_its_shared_feed_forward_and_gives_x_its_gradient(tmp_path: Path):
    words = "train { batch = 2; sequence = 4; frozen = [shared] }"
    file = tmp_path / "ffn.moe"
    file.write_text(layer_text(ranks=None, expert="lora(2)", beside="shared = swiglu(6)", dtype="bf16", tail=words))
    layer = moec.layer(file, seed=0)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad == ("shared" not in name)
        assert (parameter.grad is None) == ("shared" in name), name


@pytest.mark.parametrize("trains", [False, True])
def test_a_hook_of_a_layer_freezes_or_unfreezes_a_parameter_in_the_same_pass(trains: bool):
    with moec.launch(moe_plan(ranks=1, ep=1, dtype="bf16"), device="cpu") as job:
        model = job.build(seed=1)
        parameter = model.get_parameter("layers.1.moe.gate.weight").requires_grad_(not trains)
        model.layers[1].register_forward_pre_hook(lambda *_: setattr(parameter, "requires_grad", trains))
        model(TOKENS).logits.sum().backward()
        assert (parameter.grad is not None) == trains
