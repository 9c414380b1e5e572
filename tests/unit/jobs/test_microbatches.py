"""`microbatches`: a step is that of the whole batch, in `moec verify` and in a job; faults in it are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_plan
from support.verified import require_equal

import moec
from moec.passes.ir import Program, Role
from moec.passes.ir.interface import COUNTS
from moec.passes.ir.ops import Route
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.cluster.stage_values import StageValues
from moec.runtime.verify.verification import verify

ONE = {"ranks": 1, "ep": 1}
GROUPS = {
    "sequence": {"ep": 2, "beside": "capacity = factor(0.75)"},
    "batch": {"ep": 2, "tp": 2, "beside": "capacity = factor(0.75); group = batch"},
    "rank": {"ep": 4, "beside": "capacity = factor(0.75); group = rank"},
    "batch, jitter": {
        "ep": 2, "gate": "topk(2, jitter = 0.2, noise = 0.5)", "beside": "capacity = dynamic(max = 0.8); group = batch"
    },
    "states": {"ep": 4, "tp": 2, "gate": "topk(2, bias = online(0.01))", "model": "embedding = tokens(padding = 3)"},
}  # fmt: skip
WORDS = ("none", "experts", "layer")


FAST = {("sequence", "experts"), ("batch", "none"), ("rank", "layer"), ("batch, jitter", "layer"), ("states", "layer")}
CASES = [
    pytest.param(group, word, marks=() if (group, word) in FAST else pytest.mark.slow)
    for group in GROUPS
    for word in WORDS
]


@pytest.mark.parametrize(("group", "word"), CASES)
def test_a_plan_with_micro_batches_equals_the_unsharded_step(group: str, word: str) -> None:
    plan = moe_plan(ranks=4, batch=16, microbatches=4, recompute=word, **GROUPS[group])
    require_equal(plan)


# ---- faults --------------------------------------------------------------------------------------------------


def counts_of_each_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Losses divided by the labels of their micro-batch, as am#3359 and tt#2206 had it."""
    loss = Lockstep.loss
    patch.setattr(Lockstep, "loss", lambda self, logits, labels, valid=None: loss(self, logits, labels))


def groups_of_the_whole_batch(patch: pytest.MonkeyPatch) -> None:
    """Capacities over all micro-batches together."""
    patch.setattr(
        Program, "routing_groups", lambda self, group: {"sequence": 0, "batch": 1, "rank": self.data_ranks}[group]
    )


def the_last_loads_alone(patch: pytest.MonkeyPatch) -> None:
    """The loads of the last micro-batch in place of the sum of all (mg#7197)."""

    def last(self: StageValues) -> dict[Role, dict[int, Any]]:
        outputs = self._outputs[-1][max(self._outputs[-1])]
        return {role: {key[1]: rows for key, rows in outputs.items() if key[0] == role} for role in COUNTS}

    patch.setattr(StageValues, "counts", property(last))


@pytest.mark.parametrize(
    ("fault", "group"),
    [
        (counts_of_each_micro_batch, "sequence"),
        (groups_of_the_whole_batch, "batch"),
        (groups_of_the_whole_batch, "rank"),
        (the_last_loads_alone, "states"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_a_fault_between_micro_batches_is_found(fault: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moe_plan(ranks=4, batch=16, microbatches=2, **GROUPS[group])
    fault(monkeypatch)
    assert not verify(plan, float32=False).ok


def test_the_first_wrong_op_of_a_plan_with_micro_batches_is_named() -> None:
    plan = moe_plan(ranks=2, ep=2, microbatches=2, recompute="layer")
    wrong = tuple(
        replace(block, ops=tuple(replace(op, normalize=False) if isinstance(op, Route) else op for op in block.ops))
        for block in plan.program.blocks
    )
    report = verify(replace(plan, program=replace(plan.program, blocks=wrong)), float32=False)
    assert report.first_difference is not None
    assert (report.first_difference.layer, report.first_difference.op) == ("layers.1", "route")


def test_another_number_of_micro_batches_is_named() -> None:
    plan = moe_plan(ranks=2, ep=2, microbatches=2)
    report = verify(replace(plan, program=replace(plan.program, microbatches=4)), float32=False)
    assert not report.ok
    assert "microbatches = 4 instead of 2" in str(report.first_difference)


# ---- jobs ----------------------------------------------------------------------------------------------------


def passes_of(model: PlanModule) -> list[int]:
    """Collects the sequences of each forward pass."""
    found: list[int] = []
    model.register_forward_pre_hook(lambda module, given: found.append(len(given[0])))
    return found


def test_a_step_takes_the_plans_micro_batches_and_a_number_in_the_call_replaces_it() -> None:
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    with moec.launch(moe_plan(**ONE, microbatches=4), device="cpu") as job:
        model = job.build()
        sizes = passes_of(model)
        job.step(model, tokens, tokens)
        assert sizes == [2, 2, 2, 2]
        sizes.clear()
        job.step(model, tokens, tokens, microbatches=1)
        assert sizes == [8]
        with pytest.raises(
            JobError, match=r"MOE0713.*3 sequences cannot be cut into 4 micro-batches: `microbatches=…`"
        ):
            job.step(model, tokens[:3], tokens[:3])
        sizes.clear()
        with job.accumulate(model, tokens):
            model(tokens, tokens).loss.backward()
            with pytest.raises(JobError, match="one step at a time"):
                job.step(model, tokens, tokens)
        assert sizes == [8]


@pytest.mark.parametrize("word", some(WORDS, ["none", "layer"]))
def test_gradients_do_not_depend_on_the_number_of_micro_batches(word: str) -> None:
    """Neither the loss's scale nor the balance terms' (am#3359), nor gradients that are there already (tt#1732)."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(32, (8, 8), generator=generator) for _ in range(2))
    labels[:5, 2:] = -100  # micro-batches have unequal numbers of valid labels
    found = []
    for number in (1, 2, 8):
        with moec.launch(moe_plan(**ONE, microbatches=number, recompute=word), device="cpu") as job:
            model = job.build(seed=1)
            job.step(model, tokens[:1], labels[:1], microbatches=1)
            job.step(model, tokens, labels)
            found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        for gradient, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_layers_read_parameters_in_every_pass_also_where_only_data_changes() -> None:
    """Weight noise by `.data`, which changes no version, in bf16: another strength in each micro-batch."""
    with moec.launch(moe_plan(**ONE, dtype="bf16", batch=4), device="cpu") as job:
        tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
        gradients = []
        for parts in (tokens.chunk(4), None):
            model, passes = job.build(seed=1), iter(range(4))
            masters = {p: p.detach().clone() for p in model.layers[1].parameters()}

            def scale(*_: object) -> None:
                factor = 1 + next(passes) / 2  # noqa: B023 - of this turn
                for parameter, master in masters.items():  # noqa: B023
                    parameter.data.copy_(factor * master)

            model.layers[1].register_forward_pre_hook(scale)
            if parts is None:
                job.step(model, tokens, tokens, microbatches=4)
            else:
                with job.accumulate(model, *parts):
                    for part in parts:
                        model(part, part).loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
