"""`PlanModule` in one process."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from torch.utils.checkpoint import checkpoint

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.inputs.batches import LARGER


@pytest.fixture(scope="module")
def model():
    return reference(moe_spec())


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(0))


def test_logits_without_labels_and_the_loss_with_them(model):
    tokens = ids(2, 8)
    out = model(tokens)
    assert out.logits.shape == (2, 8, 32)
    assert out.loss is None
    both = model(tokens, tokens)
    assert both.loss.shape == ()
    assert torch.equal(both.logits, out.logits)


def test_a_fresh_model_is_about_as_good_as_chance_plus_balance(model):
    assert model(ids(8, 8), ids(8, 8)).loss.item() == pytest.approx(3.466 + 2 * (0.01 + 1e-3 * 4.3), rel=0.02)


def test_in_evaluation_the_loss_is_the_cross_entropy_alone():
    model = reference(moe_spec(balance="[switch_loss(0.5)]"), seed=1)
    tokens, labels = ids(2, 8), ids(2, 8).roll(1, 1)
    trained, evaluated = (model.train(mode)(tokens, labels) for mode in (True, False))
    by_hand = torch.nn.functional.cross_entropy(evaluated.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(evaluated.loss, by_hand)
    torch.testing.assert_close(trained.loss, by_hand + trained.aux_loss)
    assert evaluated.aux_loss == trained.aux_loss > 0.4


def test_ignored_labels_do_not_count_and_none_at_all_is_no_division_by_zero():
    model = reference(moe_spec(balance="[]"))
    tokens, labels = ids(2, 8), ids(2, 8)
    labels[1] = -100
    assert model(tokens, labels).loss.item() == pytest.approx(model(tokens[:1], labels[:1]).loss.item(), rel=1e-5)
    assert model(tokens, torch.full_like(labels, -100)).loss.item() == 0.0


@pytest.mark.parametrize("sequence", [1, 3, 8])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_any_batch_and_sequence_up_to_the_context_runs_forward_and_backward(model, batch: int, sequence: int):
    model.zero_grad()
    tokens = ids(batch, sequence)
    model(tokens, tokens).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_expert_counts_add_up_to_every_choice(model):
    model(ids(4, 8))
    assert set(model.expert_counts) == {1, 2}
    assert all(counts.sum().item() == 4 * 8 * 2 for counts in model.expert_counts.values())


def test_layers_that_are_computed_again_count_their_choices_once(model):
    """Counts are results of the forward pass; nothing accumulates over backward passes or evaluation."""
    tokens = ids(4, 8)
    again = copy.deepcopy(model)
    for layer in again.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss = again(tokens, tokens).loss
    before = {layer: counts.clone() for layer, counts in again.expert_counts.items()}
    loss.backward()
    assert before.keys() == again.expert_counts.keys()
    assert all(torch.equal(again.expert_counts[layer], counts) for layer, counts in before.items())
    assert not list(again.buffers())


def test_causal_what_follows_changes_nothing_before(model):
    tokens = ids(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


BAD = {
    "a wrong dtype": (lambda: (ids(2, 8).int(), None), "tokens are torch.int32"),
    "floats": (lambda: (ids(2, 8).float(), None), "tokens are torch.float32"),
    "a flat batch": (lambda: (ids(8), None), r"tokens have shape \[8\]"),
    "an id too high": (lambda: (ids(2, 8) + 32, None), "vocabulary is 0 to 31"),
    "an id too low": (lambda: (ids(2, 8) - 40, None), "contain the id -"),
    "a label too high": (lambda: (ids(2, 8), ids(2, 8) + 32), "labels contain the id"),
    "a label below the ignored one": (lambda: (ids(2, 8), ids(2, 8) - 300), "labels contain the id -"),
    "labels of another shape": (lambda: (ids(2, 8), ids(2, 7)), r"labels have shape \[2, 7\], and tokens \[2, 8\]"),
    "a sequence beyond the context": (lambda: (ids(2, 9), None), "the model's context is 8"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_in_words(model, fault: str):
    make, words = BAD[fault]
    with pytest.raises(JobError, match=words) as refused:
        model(*make())
    assert refused.value.diagnostics[0].code == "MOE0702"


HELPS = {
    "an id too high": f"`vocab` in the file is the tokenizer's number of ids; {LARGER}",
    "a sequence beyond the context": "cut them, `tokens[:, :8]`, or compile the file with a longer `context`",
    "labels of another shape": "tokens may be `ids[:, :-1]` and labels `ids[:, 1:]`",
}


@pytest.mark.parametrize("fault", HELPS)
def test_bad_input_has_a_way_out(model, fault: str):
    with pytest.raises(JobError) as refused:
        model(*BAD[fault][0]())
    assert refused.value.diagnostics[0].help == HELPS[fault]


def test_names_are_those_of_the_plan(model):
    plan = moe_plan()
    assert dict(model.named_parameters()).keys() == plan.parameters.keys() == model.state_dict().keys()


def test_one_process_needs_no_torchrun():
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        losses = []
        for _ in range(20):
            losses.append(job.step(model, ids(4, 8), ids(4, 8)).item())
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05


def test_a_world_of_another_size_is_refused_with_the_command_to_use():
    with (
        pytest.raises(JobError, match=r"MOE0701.*the plan is for 4 ranks, but this script was started") as refused,
        moec.launch(moe_plan(ranks=4), device="cpu"),
    ):
        pytest.fail("the job started")
    assert "torchrun --standalone --nproc-per-node 4 train.py" in refused.value.diagnostics[0].help


@pytest.mark.parametrize("backend", ["nonsense", "triton"])
def test_a_backend_that_cannot_be_had_is_refused_before_the_job_starts(monkeypatch, backend: str):
    monkeypatch.setenv("MOEC_BACKEND", backend)
    with (
        pytest.raises(JobError, match=f"MOE0707.*MOEC_BACKEND.*{backend}") as refused,
        moec.launch(moe_plan(ranks=1, ep=1), device="cpu"),
    ):
        pytest.fail("the job started")
    assert refused.value.diagnostics[0].help.startswith("unset it")


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ({"timeout": 0}, "timeout must be a number of seconds above 0, not 0"),
        ({"check_replicas": -1}, "check_replicas must be a number of steps, or 0 for never, not -1"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda' .*, not 'tpu'"),
    ],
)
def test_a_job_refuses_what_it_cannot_be_told(argument: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        moec.launch(moe_plan(ranks=1, ep=1), **argument)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_job_on_a_gpu_needs_one() -> None:
    with pytest.raises(ValueError, match="torch finds no GPU"):
        moec.launch(moe_plan(ranks=1, ep=1), device="cuda")
