"""Programs of pipeline stages print, read back, keep the rules and equal the unsharded model in `verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans import moe_spec
from support.staged_plans import staged_plan
from support.verified import require_equal

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError, Program
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.cluster.recorded import PerRank
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.verification import verify

MODELS = {
    "zero 3, tp, online biases": {"zero": 3, "tp": 2, "gate": "topk(2, bias = online(0.01))"},
    "micro-batches, zero 1, random gates": {"zero": 1, "microbatches": 2, "gate": "topk(2, jitter = 0.2)"},
    "padding, two balance terms": {
        "model": "embedding = tokens(padding = 0)", "balance": "[switch_loss(0.1), z_loss(0.01)]"
    },
    "replay, a term over all layers": {
        "cp": 2, "microbatches": 2, "optimizer": "sgd(lr = 0.1); replay = true",
        "balance": "[switch_loss(0.1, over = model), z_loss(0.01)]",
    },
    "recomputed, without balance": {"recompute": "layer", "balance": "[]"},
}  # fmt: skip


def staged(**options: object) -> Plan:
    return staged_plan(moe_spec(**{"ranks": 4, "ep": 2, "batch": 16, "depth": 4, **options}))


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_equal_the_unsharded_model(name: str):
    plan = staged(**MODELS[name])
    check_program(plan.program)
    assert parse_program(print_program(plan.program)) == plan.program
    assert plan.world_size == 8
    assert plan.groups["dp"][-1][-1] == 7
    require_equal(plan, float32=False)


def halved_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    back = StageValues.differentiated

    def halved(self: StageValues, stage: int, microbatch: int) -> tuple[PerRank, PerRank]:
        outputs, gradients = back(self, stage, microbatch)
        return outputs, [gradient / 2 for gradient in gradients]

    monkeypatch.setattr(StageValues, "differentiated", halved)


def no_gradient_of_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = StageValues.receive_gradients

    def of_stream_alone(self: StageValues, stage: int, microbatch: int) -> None:
        receive(self, stage, microbatch)
        del self._gradients[stage, microbatch]["balance"]

    monkeypatch.setattr(StageValues, "receive_gradients", of_stream_alone)


def other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    send = StageValues.send

    def shifted(self: StageValues, stage: int, microbatch: int) -> None:
        send(self, stage, microbatch)
        sent = self.sent[stage, microbatch]
        sent["residual"] = sent["residual"][1:] + sent["residual"][:1]

    monkeypatch.setattr(StageValues, "send", shifted)


@pytest.mark.parametrize("fault", [halved_gradients, no_gradient_of_balance, other_rank])
def test_what_stages_hand_on_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
):
    plan = staged()
    fault(monkeypatch)
    assert not verify(plan, float32=False).ok


TEXTS = {
    "another stage's ranks": ("stage 1 on ranks 4..7", "stage 1 on ranks 0..3", "no ranks run exactly the stage 0"),
    "too many ranks": ("stage 1 on ranks 4..7", "stage 1 on ranks 4..8", "stage 1 has 4 ranks, from a multiple"),
    "ranks left out": ("stage 1 on ranks 4..7", "stage 1 on ranks 8..11", "of it up to 4 on"),
    "a stage left out": ('  stage 0 on ranks 0..3 runs "forward"\n', "", "stage 0 is wanted"),
    "no block": ('runs "forward[1]"', 'runs "forward[2]"', "there is no block"),
    "gradients before they are sent": (
        "    send 0 of 0\n    receive_gradients 0 of 0\n", "    receive_gradients 0 of 0\n    send 0 of 0\n",
        "`receive_gradients 0 of 0` stands before `send 0 of 0`",
    ),
    "a loss of the first stage": ("    send 0 of 0\n", "    send 0 of 0\n    loss of 0\n", "this stage has no `loss`"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TEXTS)
def test_a_wrong_stage_is_refused_at_its_line(fault: str):
    text = print_program(staged().program)
    old, new, words = TEXTS[fault]
    assert old in text
    with pytest.raises(IrError, match=words):
        parse_program(text.replace(old, new, 1))


def without_balance(program: Program) -> Program:
    block = program.block("forward[1]")
    changed = replace(block, inputs=tuple(value for value in block.inputs if value.role != "balance"))
    return replace(program, blocks=tuple(changed if b.name == block.name else b for b in program.blocks))


def both_run_forward(program: Program) -> Program:
    one, other = program.stages
    return replace(program, stages=(one, replace(other, forward=one.forward)))


@pytest.mark.parametrize("change", [without_balance, both_run_forward])
def test_stages_that_do_not_fit_each_other_are_refused(change: Callable[[Program], Program]):
    with pytest.raises(InternalError):
        check_program(change(staged().program))


def test_ranks_of_a_stage_share_the_batch_as_those_of_the_first_do():
    plan = staged(tp=2)
    assert [plan.stages_of(rank) for rank in (3, 4, 7)] == [(0,), (1,), (1,)]
    assert [plan.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert plan.sharing_ranks(2) == (2, 3)
    assert plan.sharing_ranks(7) == (6, 7)
