"""Every optimizer of the file, on one rank."""

import io

import pytest
import torch
from support.one_rank_jobs import OPTIMIZERS, TOKENS, ending, job_and_model
from support.plans import moe_plan
from support.ranks.torch_optimizers import torch_optimizers
from support.verified import require_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import _muon

from moec.grammar.spec import optimizers as words
from moec.passes.cost.optimizers import KINDS, kind_of
from moec.runtime.errors import JobError
from moec.runtime.optimizers import muon
from moec.runtime.optimizers.optimizer import MAKERS

DECAYING = OPTIMIZERS | {
    "sgd": "sgd(lr = 0.1, momentum = 0.9, weight_decay = 0.1)",
    "lion": "lion(lr = 1e-3, weight_decay = 0.3)",
    "adafactor": "adafactor(weight_decay = 0.1)",
}


@pytest.mark.parametrize("optimizer", DECAYING)
def test_a_frozen_parameter_is_not_changed(optimizer: str):
    job, model = job_and_model(DECAYING[optimizer])
    with ending(job):
        frozen = {name: p for name, p in model.named_parameters() if "layers.1" in name or "embedding" in name}
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        update = job.optimizer(model)
        for _ in range(2):
            job.step(model, TOKENS, TOKENS)
            update.step()
            update.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in frozen), name


def test_every_optimizer_of_the_language_is_declared_and_made():
    kinds = set(words.OPTIMIZERS.values())
    assert set(KINDS) == set(MAKERS) == kinds
    assert {text.partition("(")[0] for text in OPTIMIZERS.values()} == set(words.OPTIMIZERS)
    assert all(hasattr(kind, name) for kind in kinds for name in kind.betas)


def test_muon_does_not_take_all_experts_for_one_matrix(monkeypatch):
    """xt#1582."""
    monkeypatch.setattr(muon, "compute_dtype", lambda device: torch.bfloat16)
    job, model = job_and_model("muon(lr = 0.1, weight_decay = 0.2)")
    update = job.optimizer(model)
    up = model.get_parameter("layers.1.moe.experts.up.weight")
    matrices = [nn.Parameter(matrix.clone()) for matrix in up.detach().flatten(0, 1)]
    of_torch = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.2)
    for step in range(3):
        # A gradient of one expert that is a thousand times another's: as one matrix, the small would hardly change.
        sizes = 10.0 ** torch.arange(8).sub(4).view(8, 1, 1, 1)
        up.grad = torch.randn(up.shape, generator=torch.Generator().manual_seed(step)) * sizes
        for matrix, gradient in zip(matrices, up.grad.flatten(0, 1), strict=True):
            matrix.grad = gradient.clone()
        update.step()
        of_torch.step()
    torch.testing.assert_close(up.detach().flatten(0, 1), torch.stack(matrices).detach(), rtol=1e-2, atol=1e-3)
    change = (up.detach().flatten(0, 1) - torch.stack(matrices).detach()).norm() / up.detach().norm()
    assert change < 1e-2


def test_lion_is_the_algorithm_of_its_paper():
    job, model = job_and_model("lion(lr = 1e-2, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.3)", bias="all")
    update = job.optimizer(model)
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    (of_paper,) = torch_optimizers(job.plan.spec.train.optimizer, copies)
    random = torch.Generator().manual_seed(3)
    for _ in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            copies[name].grad = parameter.grad.clone()
        update.step()
        of_paper.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, copies[name], rtol=0, atol=1e-6, msg=name)


def test_embeddings_head_routers_norms_and_biases_take_muons_adamw():
    job, model = job_and_model("muon(adamw = adamw(lr = 5e-3))", bias="all", beside="shared = swiglu(16, gated = true)")
    hidden, decayed, undecayed = job.optimizer(model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_adamw = {names[id(p)].removeprefix("layers.1.") for p in (*decayed["params"], *undecayed["params"])}
    of_muon = {names[id(p)].removeprefix("layers.1.") for p in hidden["params"]}
    assert {"embedding.weight", "head.weight", "moe.gate.weight", "moe.shared_gate.weight", "norm.weight"} <= of_adamw
    assert {"attention.q.bias", "attention_norm.weight"} <= of_adamw
    assert {"attention.q.weight", "attention.o.weight", "moe.experts.up.weight", "moe.experts.down.weight"} <= of_muon
    assert {"moe.shared.up.weight", "moe.shared.down.weight"} <= of_muon
    assert {group["lr"] for group in (decayed, undecayed)} == {5e-3}
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("optimizer", DECAYING)
def test_a_state_saved_without_pickle_of_classes_continues_bit_for_bit(optimizer: str):
    job, model = job_and_model(DECAYING[optimizer])
    with ending(job):
        update = job.optimizer(model)

        def train(steps: int) -> None:
            for _ in range(steps):
                job.step(model, TOKENS, TOKENS)
                update.step()
                update.zero_grad()

        train(2)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": update.state_dict()}, file)
        train(2)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        update = job.optimizer(model)
        update.load_state_dict(saved["optimizer"])
        train(2)
    for state in update.state_dict()["state"].values():
        assert all(isinstance(value, torch.Tensor | float | int) for value in state.values())
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize("optimizer", DECAYING)
def test_the_states_are_those_that_a_plan_counts(optimizer: str):
    job, model = job_and_model(DECAYING[optimizer], bias="all")
    with ending(job):
        update = job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        update.step()
    spec, datas = job.plan.spec.train.optimizer, job.plan.parameters
    for name, parameter in model.named_parameters():
        state = {key: value for key, value in update.state[parameter].items() if key != "step" and value is not None}
        sizes = {key: value.numel() for key, value in state.items()}
        assert sizes == kind_of(spec).states(spec, parameter.shape, datas[name].matrices), name


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_checkpoint_that_names_the_class_by_its_former_place_loads(monkeypatch, tmp_path, optimizer: str):
    job, model = job_and_model(DECAYING[optimizer])
    with ending(job):
        update, other = job.optimizer(model), job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        update.step()
        with monkeypatch.context() as patch:
            patch.setattr(type(update), "kind", f"moec.runtime.job.{optimizer}.{type(update).__name__}")
            job.save(tmp_path / "1", model, update).wait()
        job.load(tmp_path / "1", model, other)
    for parameter in model.parameters():
        assert other.state[parameter].keys() == update.state[parameter].keys() != set()


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_states_go_through_torchs_checkpoint_helpers(optimizer: str):
    job, model = job_and_model(DECAYING[optimizer])
    with ending(job):
        update, other = job.optimizer(model), job.optimizer(model)
        job.step(model, TOKENS, TOKENS)
        update.step()
        update.zero_grad()
        _, saved = get_state_dict(model, update)
        set_state_dict(model, other, model_state_dict=model.state_dict(), optim_state_dict=saved)
    for parameter in model.parameters():
        for name, value in update.state[parameter].items():
            assert torch.equal(other.state[parameter][name], value)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_parameter_that_the_plan_does_not_have_is_refused(optimizer: str):
    job, model = job_and_model(DECAYING[optimizer])
    update = job.optimizer(model)
    groups = len(update.param_groups)
    with pytest.raises(JobError, match=r"MOE0700.*a parameter that the plan does not have"):
        update.add_param_group({"params": nn.Parameter(torch.ones(2))})
    assert len(update.param_groups) == groups


def test_orthogonalized_is_the_iteration_of_torch_for_one_matrix():
    for shape in ((6, 10), (10, 6), (8, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        ours = muon.orthogonalized(matrix.bfloat16()[None], 5)[0]
        theirs = _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
        singular = torch.linalg.svdvals(muon.orthogonalized(matrix[None], 5)[0])
        assert 0.5 < singular.min() <= singular.max() < 1.3


def test_verify_takes_a_step_of_every_optimizer():
    for optimizer in ("sgd(lr = 1e-6)", "adafactor", "muon", "lion"):
        report = require_equal(moe_plan(optimizer=optimizer, tp=2, ep=2, dtype="bf16"))
        assert report.rounding.step < 0.02


def test_schedulers_cycle_the_momentum_of_muon_and_the_beta1_of_its_adamw():
    job, model = job_and_model("muon(adamw = adamw(lr = 1e-2))")
    with ending(job):
        optimizer = job.optimizer(model)
        assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.9, 0.9]
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, max_momentum=0.5)
        job.step(model, TOKENS, TOKENS)
        optimizer.step()
        for group, state in zip(optimizer.param_groups, ("momentum_buffer", "exp_avg", "exp_avg"), strict=True):
            parameter = group["params"][0]
            torch.testing.assert_close(optimizer.state[parameter][state], 0.5 * parameter.grad)
