"""What needs the whole model, of a model in pipeline stages: its hooks and `generate`. Hooks of all modules run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.plans import moe_spec
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches_of, own_part
from support.staged_plans import staged_plan
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError


def refusals(plan: Plan) -> dict[str, str]:
    """What a step says of each kind of hook of the whole model, and `generate` of a call that is wrong anyway."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        batch = own_part(job, *batches_of(plan.spec, 1)[0])
        registers: list[Callable[..., Any]] = [
            model.register_forward_pre_hook,
            model.register_forward_hook,
            model.register_full_backward_pre_hook,
            model.register_full_backward_hook,
        ]
        said = {}
        for register in registers:
            handle = register(lambda *_: None)
            with pytest.raises(DiagnosticError) as refused:
                job.step(model, *batch)
            said[register.__name__] = str(refused.value)
            handle.remove()
        with pytest.raises(DiagnosticError) as refused:
            model.generate(batch[0], 8)  # type: ignore[misc]
        return {**said, "generate": str(refused.value)}


def test_a_hook_of_the_whole_model_is_refused(gloo: GlooPool):
    plan = staged_plan(moe_spec(ranks=1, ep=1, batch=8, microbatches=2))
    for said in gloo.run(2, refusals, plan):
        assert len(said) == 5
        assert all("MOE0711" in text for text in said.values()), said


def modules_called(plan: Plan) -> tuple[set[str], int]:
    """The classes for which a hook of all modules runs in a step, and the FLOPs that torch's tool counts."""
    called = set[str]()
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        batch = own_part(job, *batches_of(plan.spec, 1)[0])
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.add(type(module).__name__))
        try:
            with FlopCounterMode(display=False) as counter:
                job.step(model, *batch)
        finally:
            handle.remove()
    return called, counter.get_total_flops()


def test_a_hook_of_all_modules_runs_for_layers(gloo: GlooPool):
    for called, flops in gloo.run(2, modules_called, staged_plan(moe_spec(ranks=1, ep=1, batch=8, microbatches=2))):
        assert "Block" in called
        assert "PlanModule" not in called
        assert flops > 0
