"""Diagnostics without a `.moe` file: plans that cannot be read or written, and jobs that cannot run.

Each function causes one diagnostic and returns it, in an empty working folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from models import moe_plan

from moec.grammar.diagnostics import Diagnostic, DiagnosticError

PLAN = Path("tiny.plan")


def raised(act: Callable[[], object]) -> Sequence[Diagnostic]:
    with pytest.raises(DiagnosticError) as error:
        act()
    return error.value.diagnostics


def no_plan() -> Sequence[Diagnostic]:
    from moec.codegen.reading import read_plan

    return raised(lambda: read_plan(PLAN))


def edited_plan() -> Sequence[Diagnostic]:
    from moec.codegen.reading import read_plan

    moe_plan().save(PLAN)
    program = PLAN / "program.ir"
    program.write_bytes(program.read_bytes().replace(b"linear", b"system"))
    return raised(lambda: read_plan(PLAN))


def plan_of_another_format() -> Sequence[Diagnostic]:
    from moec.codegen.reading import read_plan

    moe_plan().save(PLAN)
    manifest = PLAN / "plan.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 2', b'"format": 3'))
    return raised(lambda: read_plan(PLAN))


def output_that_is_no_plan() -> Sequence[Diagnostic]:
    Path("notes").mkdir()
    Path("notes", "today.txt").write_text("buy bread")
    return raised(lambda: moe_plan().save(Path("notes")))


def output_below_a_file() -> Sequence[Diagnostic]:
    Path("notes").write_text("buy bread")
    return raised(lambda: moe_plan().save(Path("notes", "below", "tiny.plan")))


def saving() -> Sequence[Diagnostic]:
    from moec.runtime.job.job import Job

    return raised(lambda: Job(moe_plan()).save("checkpoint", None, None))  # type: ignore[arg-type]


def too_few_processes() -> Sequence[Diagnostic]:
    from moec.runtime.job.job import Job

    hook = sys.excepthook
    try:
        return raised(Job(moe_plan(ranks=4)).__enter__)
    finally:
        sys.excepthook = hook


def token_out_of_range() -> Sequence[Diagnostic]:
    import torch
    from models import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    return raised(lambda: model(torch.full((1, 4), 32)))


def too_large_to_verify() -> Sequence[Diagnostic]:
    from moec.runtime.verify.verification import verify

    return raised(lambda: verify(moe_plan(dim=8192, expert="swiglu(65_536)"), scale=False))


def drifted() -> Sequence[Diagnostic]:
    from moec.runtime.job.replicas import require_equal

    return raised(lambda: require_equal(moe_plan(), {"layers.0.attention.q.weight": [(1, 1), (1, 1), (1, 1), (2, 1)]}))


def killed() -> Sequence[Diagnostic]:
    from moec.runtime.errors import RankError
    from moec.runtime.job.verdict import Place, Position, judge

    rows = Place("all_to_all", "ep[0..1]", (0, 2), "layer 1 (tiny.moe:14:5)")
    loss = Place("all_reduce", "dp", (0, 1), "the model's loss (tiny.moe:3:3)")
    verdict = judge(
        {0: Position(True, rows, 0.4), 1: Position(True, loss, 0.1), 3: Position(False, loss, 0.1)}, 4, overdue=False
    )
    assert verdict is not None
    return RankError(verdict.text).diagnostics


def unknown_backend() -> Sequence[Diagnostic]:
    from moec.runtime.verify.verification import verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEC_BACKEND", "tritn")
        return raised(lambda: verify(moe_plan()))


def router_without_scores() -> Sequence[Diagnostic]:
    import torch
    from models import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    model.get_parameter("layers.1.moe.gate.weight").data[3] = torch.nan
    return raised(lambda: model(torch.zeros(2, 4, dtype=torch.int64)))


def model_after_its_job() -> Sequence[Diagnostic]:
    from moec.runtime.job.groups import resolve

    return raised(lambda: resolve("0/ep"))


def replaced_parameter() -> Sequence[Diagnostic]:
    import torch
    from models import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    model.get_submodule("head").weight = torch.nn.Parameter(torch.zeros(16, 16))
    return raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


def autocast() -> Sequence[Diagnostic]:
    import torch
    from models import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    with torch.autocast("cpu", torch.bfloat16):
        return raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


def foreign_state() -> Sequence[Diagnostic]:
    from models import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    state = model.state_dict()
    state._metadata[""]["moec"] = {"ranks": 4, "rank": 2}
    return raised(lambda: model.load_state_dict(state))


def nothing_to_learn() -> Sequence[Diagnostic]:
    import torch

    import moec

    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        return raised(lambda: job.step(job.build(), tokens, tokens, count=lambda labels: 0))


def model_of_another_job() -> Sequence[Diagnostic]:
    import moec

    plan = moe_plan(ranks=1, ep=1)
    with moec.launch(plan, device="cpu") as first, moec.launch(plan, device="cpu") as second:
        return raised(lambda: second.clip_grad_norm_(first.build(), 1.0))


def setting_out_of_range() -> Sequence[Diagnostic]:
    from models import moe_spec

    from moec.runtime.job.reference import reference

    return raised(lambda: reference(moe_spec(gate="topk(2, jitter = 0.1)")).set(step=-1))


def another_device() -> Sequence[Diagnostic]:
    from moec.driver import compile as compile_source
    from moec.runtime.tune.tuning import require_fit

    file = Path(__file__).parents[3] / "examples" / "mixtral_8x7b.moe"
    device = compile_source(file).spec.cluster.device
    return raised(lambda: require_fit(device, "cuda", "NVIDIA A100-SXM4-80GB"))


def starter_over_a_file() -> Sequence[Diagnostic]:
    from moec.commands.init import run

    Path("model.moe").write_text("# mine\n")
    return raised(lambda: run(Path("model.moe")))


def starter_in_no_folder() -> Sequence[Diagnostic]:
    from moec.commands.init import run

    return raised(lambda: run(Path("nowhere", "model.moe")))


def unknown_subject() -> Sequence[Diagnostic]:
    from moec.commands.explain import explain

    return raised(lambda: explain("topq"))


def other_layers() -> Sequence[Diagnostic]:
    from moec.runtime.job.layer_home import require_same_layer

    return raised(lambda: require_same_layer([7, 8], [0, 1]))


def launching_a_layer() -> Sequence[Diagnostic]:
    from models import layer_plan

    from moec.driver import launch

    return raised(lambda: launch(layer_plan()))


EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {
    "MOE0013": starter_over_a_file,
    "MOE0014": starter_in_no_folder,
    "MOE0015": unknown_subject,
    "MOE0600": no_plan,
    "MOE0601": edited_plan,
    "MOE0602": plan_of_another_format,
    "MOE0603": output_that_is_no_plan,
    "MOE0604": output_below_a_file,
    "MOE0700": saving,
    "MOE0701": too_few_processes,
    "MOE0702": token_out_of_range,
    "MOE0703": too_large_to_verify,
    "MOE0704": drifted,
    "MOE0705": killed,
    "MOE0706": another_device,
    "MOE0707": unknown_backend,
    "MOE0708": router_without_scores,
    "MOE0709": model_after_its_job,
    "MOE0710": replaced_parameter,
    "MOE0711": autocast,
    "MOE0712": foreign_state,
    "MOE0713": nothing_to_learn,
    "MOE0714": model_of_another_job,
    "MOE0715": setting_out_of_range,
    "MOE0720": other_layers,
    "MOE0721": launching_a_layer,
}
