"""Routing replay: a plan takes the experts that another plan's rollout chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_moe import PlainModel
from plain_weights import plain_state_dict
from support.forced_routes import force, random_routes
from support.plans import moe_plan, moe_spec, moe_text
from support.verified import require_equal
from support.ways_to_run import gradients, require_every_way_alike
from support.wrong_plans import change_every
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError, InternalError
from moec.passes.ir import Program, local_slices
from moec.passes.ir.ops import Replay, StackRoutes, TakeRoutes
from moec.passes.ir.verifier import check_program
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.cluster.virtual_step import VirtualStep
from moec.runtime.verify.unsharded import states_of
from moec.runtime.verify.verification import verify

REPLAY = "adamw(lr = 1e-3); replay = true"
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
TOKENS, LABELS = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(5))


def replaying(**options: Any) -> Plan:
    return moe_plan(optimizer=REPLAY, **options)


def by_rank(plan: Plan, whole: Tensor) -> list[Tensor]:
    """The sequences of each rank."""
    return [whole.chunk(plan.data_size)[plan.data_rank(rank)] for rank in range(plan.world_size)]


def run(plan: Plan, model: Any, routes: Tensor, *, training: bool) -> tuple[VirtualStep, Tensor]:
    """Runs the batch on all ranks; gives the step and the global routes."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    cluster = VirtualCluster(plan, parameters, states_of(model), training=training)
    given, wanted = by_rank(plan, TOKENS), by_rank(plan, LABELS)
    step = cluster.step(given, wanted, extra_inputs={"routes": by_rank(plan, routes)})
    step.run()
    assert step.stage_values.routes is not None
    first = {plan.data_rank(rank): part for rank, part in enumerate(step.stage_values.routes)}
    for rank, part in enumerate(step.stage_values.routes):
        assert torch.equal(part, first[plan.data_rank(rank)])
    return step, torch.cat([first[index] for index in range(plan.data_size)])


def perturbed(spec: Any, by: float) -> Any:
    """The unsharded model in float64, its parameters off by normal numbers of this size."""
    model, generator = reference(spec, dtype=torch.float64), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_rollout_over_ep_4_trains_a_plan_of_tp_2_and_ep_2(sequence_parallel: bool) -> None:
    """Choices are the rollout's everywhere, and gradients those of the handwritten model with forced choices."""
    rollout, training = replaying(ep=4), replaying(ep=2, tp=2, sequence_parallel=sequence_parallel)
    free = torch.full((8, 8, 2, 2), -2)
    _, routes = run(rollout, perturbed(rollout.spec, 0.0), free, training=False)
    model = perturbed(training.spec, 0.1)
    _, unforced = run(training, model, free, training=True)
    assert (unforced != routes).any(), "the perturbed model chooses alike, so that the test shows nothing"
    step, replayed = run(training, model, routes, training=True)
    assert torch.equal(replayed, routes)
    plain = PlainModel(training.spec, torch.float64)
    plain.load_state_dict(plain_state_dict(dict(model.named_parameters())))
    _, loss = force(plain, routes)(TOKENS, LABELS)
    for of_rank in step.losses[0]:
        torch.testing.assert_close(of_rank.detach(), loss.detach(), **TIGHT)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    output = model(TOKENS, LABELS, routes=routes)
    output.loss.backward()
    for name, parameter in plain_state_dict({n: p.grad for n, p in model.named_parameters()}).items():
        torch.testing.assert_close(parameter, expected[name], **TIGHT)
    for name, parts in step.gradients.items():
        data, whole = training.parameters[name], model.get_parameter(name).grad
        for rank, part in enumerate(parts):
            index = local_slices(data.shape, data.master, training.meshes[data.mesh], rank)
            torch.testing.assert_close(part, whole[index], **TIGHT)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "ep": 2, "microbatches": 2, "recompute": "layer"},
        {"ep": 4, "recompute": "experts", "beside": "capacity = factor(0.75)"},
        {"tp": 2, "ep": 4, "zero": 3, "sequence_parallel": False, "beside": "capacity = dynamic(max = 0.8)"},
        {"ep": 2, "gate": "topk(2, score = sigmoid, bias = online(0.01), jitter = 0.1)", "beside": "group = batch"},
        {"tp": 2, "ep": 2, "model": "embedding = tokens(padding = 0, separator = 3)", "dtype": "bf16"},
        pytest.param(
            {"mixtures": ((8, 2), (4, 4)), "beside": "capacity = dynamic(); residual = gelu(8)"}, marks=pytest.mark.slow
        ),
    ],
    ids=["microbatches", "capacity", "zero", "online", "padding", "two meshes"],
)  # fmt: skip
def test_plans_equal_the_unsharded_model(options: dict[str, Any]) -> None:
    require_equal(replaying(**options), float32=False)


# ---- faults ------------------------------------------------------------------------------------------------


def test_routes_of_another_layer_are_found() -> None:
    plan = change_every(replaying(ep=2), TakeRoutes, lambda op: replace(op, mixture=1 - op.mixture))
    report = verify(plan, float32=False)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "replay"  # the first whose numbers are no whole ones


def test_choices_given_in_another_order_are_found() -> None:
    plan = change_every(replaying(ep=2), StackRoutes, lambda op: replace(op, operands=op.operands[::-1]))
    report = verify(plan, float32=False)
    assert not report.ok
    assert "routes" in report.worst or report.first_difference.op == "stack_routes"


def test_more_choices_than_places_are_refused() -> None:
    plan = change_every(replaying(ep=2), StackRoutes, lambda op: replace(op, most=op.most - 1))
    with pytest.raises(InternalError, match="has too few places"):
        check_program(plan.program)


def test_a_program_that_replays_what_no_gate_chose_is_refused() -> None:
    program: Program = replaying(ep=2).program

    def swapped(op: Replay) -> Replay:
        return replace(op, operands=(op.operands[0], op.operands[2], op.operands[2]))

    plan = change_every(replaying(ep=2), Replay, swapped)
    check_program(program)
    with pytest.raises(InternalError, match="no gate chose"):
        check_program(plan.program)


def test_padding_does_not_shift_routes() -> None:
    """slime#1052: a rollout without padding was laid over a padded batch, and tokens got their neighbours' routes."""
    spec = moe_spec(ranks=1, ep=1, optimizer=REPLAY, model="embedding = tokens(padding = 0)")
    model = perturbed(spec, 0.0)
    tokens = TOKENS[:2].clamp_min(1)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), tokens, torch.zeros(2, 2, dtype=torch.int64)], 1)[:, :8]
    chosen = model(padded).routes
    assert (chosen[:, :3] == -1).all()
    assert (chosen[:, 3:] >= 0).all()
    other = perturbed(spec, 0.2)
    assert torch.equal(other(padded, routes=chosen).routes, chosen)
    # Routes of padding change nothing, whatever they are.
    filled = chosen.clone()
    filled[:, :3] = random_routes((2, 3), [8, 8], [2, 2])
    expected, found = (other(padded, padded, routes=routes) for routes in (chosen, filled))
    assert torch.equal(found.routes, chosen)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


# ---- jobs --------------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> Iterator[Job]:
    with moec.launch(replaying(ranks=1, ep=1), device="cpu") as launched:
        yield launched


def test_steps_micro_batches_custom_losses_and_accumulation_hand_routes_through(job: Job) -> None:
    model, routes = job.build(seed=1), random_routes((8, 8), [8, 8], [2, 2])
    require_every_way_alike(job, model, TOKENS, LABELS, routes=routes)
    job.step(model, TOKENS, LABELS, routes=routes)
    replayed = gradients(model)
    job.step(model, TOKENS, LABELS)
    free = gradients(model)
    assert any((free[name] - replayed[name]).abs().max() > 1e-4 for name in replayed)


def test_a_step_without_routes_is_that_of_a_plan_without_replay(job: Job) -> None:
    model = job.build(seed=1)
    loss = job.step(model, TOKENS, LABELS)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as other:
        usual = other.build(seed=1)
        assert usual(TOKENS).routes is None
        torch.testing.assert_close(loss, other.step(usual, TOKENS, LABELS))
        for name, parameter in usual.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_a_compiled_model_replays(job: Job) -> None:
    model, routes = job.build(seed=1), random_routes((8, 8), [8, 8], [2, 2])
    expected = model(TOKENS, LABELS, routes=routes).loss
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(TOKENS, LABELS, routes=routes).loss, expected)


@pytest.mark.parametrize("gate", ["topk(2)", "topk(2, bias = online(1e-3))"])
def test_sequence_loss_counts_the_best_scores_whatever_choices_are_given(gate: str) -> None:
    terms = []
    for balance in ("[sequence_loss(1.0)]", "[switch_loss(1.0)]"):
        model = reference(moe_spec(optimizer=REPLAY, gate=gate, balance=balance, depth=2), seed=1, dtype=torch.float64)
        routes = model(TOKENS).routes
        terms.append([model(TOKENS, routes=given).aux_loss.item() for given in (routes, (routes + 1) % 8)])
    (own, of_others), (counted, counted_others) = terms
    assert of_others == pytest.approx(own, rel=1e-12)
    assert counted_others != pytest.approx(counted, rel=1e-3)


def test_biases_move_by_the_counts_of_given_choices() -> None:
    gate = "topk(2, score = sigmoid, bias = online(0.5))"
    with moec.launch(replaying(ranks=1, ep=1, gate=gate, balance="[]"), device="cpu") as job:
        model = job.build(seed=1)
        routes = torch.tensor([0, 1]).expand(8, 8, 2, 2)
        job.step(model, TOKENS, LABELS, routes=routes)
        bias = model.get_buffer("layers.1.moe.gate.bias")
        assert torch.equal(bias, torch.tensor([-0.5, -0.5, *[0.5] * 6]))


GOOD = random_routes((8, 8), [8, 8], [2, 2])
WRONG = {
    "dtype": (GOOD.int(), "torch.int32"),
    "shape": (GOOD[:, 1:], "have shape"),
    "k": (GOOD[..., :1], "have shape"),
    "mixtures": (GOOD[:, :, :1], "have shape"),
    "no tensor": (GOOD.tolist(), "class list"),
    "too large": (GOOD.masked_fill(GOOD == 3, 8), "have expert 8"),
    "too small": (GOOD.masked_fill(GOOD == 3, -2), "have expert -2"),
    "twice": (torch.zeros_like(GOOD), "one expert twice"),
    "its place": (
        GOOD.clone().index_put_(tuple(torch.tensor([5, 2, 1, 1])[:, None]), torch.tensor(9)),
        r"routes of mixture 1 \(layer 2\) have expert 9 in sequence 5, at token 2; experts are 0 to 7",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_routes_are_one_error_before_anything_is_computed(job: Job, name: str) -> None:
    model, (routes, words) = job.build(seed=1), WRONG[name]
    for act in (
        lambda: model(TOKENS, LABELS, routes=routes),
        lambda: job.step(model, TOKENS, LABELS, routes=routes),
    ):
        with pytest.raises(JobError, match=words) as error:
            act()
        assert error.value.diagnostics[0].code == "MOE0726"


def test_layers_with_fewer_choices_have_none_beyond_them() -> None:
    text = moe_text(ranks=1, ep=1, optimizer=REPLAY)
    text = text.replace("\n}\ncluster", "\n  layers 2 { moe { gate = switch() } }\n}\ncluster", 1)
    model = reference(load_text(text, name="a.moe").unwrap(), seed=1)
    chosen = model(TOKENS).routes
    assert chosen.shape == (8, 8, 2, 2)
    assert (chosen[:, :, 0] >= 0).all()
    assert (chosen[:, :, 1, 0] >= 0).all()
    assert (chosen[:, :, 1, 1] == -1).all()
    assert torch.equal(model(TOKENS, routes=chosen).routes, chosen)
    beyond = torch.zeros_like(chosen, dtype=torch.bool)
    beyond[1, 2, 1, 1] = True
    for wrong, at in (
        (GOOD, "sequence 0, at token 0"),
        (chosen.masked_fill(beyond, -2), "sequence 1, at token 2"),
        (chosen.masked_fill(beyond, -7), "sequence 1, at token 2"),
    ):
        with pytest.raises(JobError, match=rf"mixture 1 \(layer 2\) have more than its 1 choices in {at}: the others"):
            model(TOKENS, routes=wrong)


def test_a_plan_without_replay_takes_no_routes() -> None:
    with (
        moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job,
        pytest.raises(JobError, match="cannot take any") as e,
    ):
        job.step(job.build(), TOKENS, LABELS, routes=GOOD)
    assert "replay = true" in e.value.diagnostics[0].help


@pytest.mark.parametrize("gate", ["hash(2)"])
def test_gates_whose_weights_do_not_follow_from_scores_are_refused(gate: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        replaying(gate=gate, balance="[]")
    assert [d.code for d in error.value.diagnostics] == ["MOE0370"]
