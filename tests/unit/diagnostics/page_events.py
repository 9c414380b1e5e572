"""Diagnostics without a `.moe` file: plans that cannot be read or written, and jobs that cannot run.

Each function causes one diagnostic and returns it, in an empty working folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_events import CHECKPOINT_EVENTS
from huggingface_events import HUGGINGFACE_EVENTS
from layer_events import LAYER_EVENTS
from plan_events import PLAN_EVENTS
from support.plans import layer_text, moe_plan, moe_spec, moe_text

import moec
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
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 5', b'"format": 4'))
    return raised(lambda: read_plan(PLAN))


def no_step() -> Sequence[Diagnostic]:
    from moec.commands.planning.plan import run

    text = moe_text(model="context = 8;")
    Path("model.moe").write_text("\n".join(line for line in text.splitlines() if not line.startswith("train")))
    return raised(lambda: run(Path("model.moe"), {}, "full"))


def no_values() -> Sequence[Diagnostic]:
    from moec.driver import check_text

    text = moe_text(ep=None).replace("parallel {\n", "parallel {\n  tp = auto\n  ep = [3]\n")
    return check_text(text, "tiny.moe", Path(), {})


def plan_of_another_model() -> Sequence[Diagnostic]:
    from moec.commands.planning.plan import run

    files = Path("wide.moe"), Path("tiny.moe")
    for file, dim in zip(files, (32, 16), strict=True):
        file.write_text(moe_text(dim=dim))
    return raised(lambda: run(files[0], {}, "full", None, files[1]))


def choice_that_changes_results() -> Sequence[Diagnostic]:
    from moec.passes.search.choose import choose

    spec = moe_spec(beside="group = batch")
    return raised(lambda: choose(spec.replace(parallel=spec.parallel.replace(pp="auto"))))


def output_that_is_no_plan() -> Sequence[Diagnostic]:
    Path("notes").mkdir()
    Path("notes", "today.txt").write_text("buy bread")
    return raised(lambda: moe_plan().save(Path("notes")))


def output_below_a_file() -> Sequence[Diagnostic]:
    Path("notes").write_text("buy bread")
    return raised(lambda: moe_plan().save(Path("notes", "below", "tiny.plan")))


def cuts_in_another_order() -> Sequence[Diagnostic]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from moec.passes.ir import Layout, Shard
    from moec.runtime.weights.shards import dtensor_placements

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=0)
    return raised(lambda: dtensor_placements(Layout.of({"tp": Shard(0), "dp": Shard(0)}), mesh))


def too_few_processes() -> Sequence[Diagnostic]:
    from moec.runtime.job.job import Job

    hook = sys.excepthook
    try:
        return raised(Job(moe_plan(ranks=4)).__enter__)
    finally:
        sys.excepthook = hook


def token_out_of_range() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    return raised(lambda: model(torch.full((1, 4), 32)))


def too_large_to_verify() -> Sequence[Diagnostic]:
    from moec.driver import compile as compile_source
    from moec.runtime.verify.verification import verify

    device = 'device "roomy" { kind = cpu; memory = 10TB; bandwidth = 10GB/s }\n'
    text = moe_text(dim=8192, expert="swiglu(65_536)").replace("device = cpu", "device = roomy")
    return raised(lambda: verify(compile_source(device + text), scale=False))


def routes_of_fewer_choices() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec(optimizer="adamw(); replay = true"))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    return raised(lambda: model(tokens, routes=torch.zeros(1, 4, 2, 1, dtype=torch.int64)))


def segments_that_descend() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec(model="embedding = tokens(segments = true)"))
    return raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64), segments=torch.tensor([[0, 1, 1, 0]])))


def padding_of_another_model() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model, tokens = reference(moe_spec()), torch.zeros(1, 4, dtype=torch.int64)
    return raised(lambda: model(tokens, padding=tokens == 0))


def drifted() -> Sequence[Diagnostic]:
    from moec.runtime.ranks.replicas import require_equal

    return raised(lambda: require_equal(moe_plan(), {"layers.0.attention.q.weight": [(1, 1), (1, 1), (1, 1), (2, 1)]}))


def killed() -> Sequence[Diagnostic]:
    from moec.runtime.errors import RankError
    from moec.runtime.ranks.verdict import Place, Position, judge

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
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    model.get_parameter("layers.1.moe.gate.weight").data[3] = torch.nan
    return raised(lambda: model(torch.zeros(2, 4, dtype=torch.int64)))


def model_after_its_job() -> Sequence[Diagnostic]:
    from moec.runtime.ranks.groups import resolve

    return raised(lambda: resolve("0/ep"))


def replaced_parameter() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    model.get_submodule("head").weight = torch.nn.Parameter(torch.zeros(16, 16))
    return raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


def autocast() -> Sequence[Diagnostic]:
    import torch
    from support.plans import moe_spec

    from moec.driver import reference

    model = reference(moe_spec())
    with torch.autocast("cpu", torch.bfloat16):
        return raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


def foreign_state() -> Sequence[Diagnostic]:
    from support.plans import moe_spec

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
    from support.plans import moe_spec

    from moec.runtime.host.reference import reference

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


def starter_from_an_unknown_model() -> Sequence[Diagnostic]:
    from moec.commands.init import run

    return raised(lambda: run(Path("model.moe"), "mixtral_8x7"))


def unknown_subject() -> Sequence[Diagnostic]:
    from moec.commands.explain import explain

    return raised(lambda: explain("routing_table"))


def norm_after_handing_over() -> Sequence[Diagnostic]:
    import torch

    import moec

    tokens = torch.zeros(8, 8, dtype=torch.int64)
    with moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build()
        job.step(model, tokens, tokens)
        job.clip_grad_norm_(model, 1.0, optimizer=job.optimizer(model))
        return raised(lambda: model.get_parameter("norm.weight").grad.norm())


def no_tensorboard() -> Sequence[Diagnostic]:
    import moec

    with pytest.MonkeyPatch.context() as patch, moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        return raised(lambda: job.metrics(tensorboard="runs/1"))


def log_in_no_folder() -> Sequence[Diagnostic]:
    import moec
    from moec.runtime import unwritten

    said: list[Diagnostic] = []
    with pytest.MonkeyPatch.context() as patch, moec.launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        patch.setattr(unwritten, "render", lambda diagnostics, style: said.extend(diagnostics) or "")
        with job.metrics("nowhere/run.jsonl"):
            return said


def other_layers() -> Sequence[Diagnostic]:
    from moec.runtime.host.layer_home import require_same_layer

    return raised(lambda: require_same_layer([7, 8], [0, 1]))


def parameter_changed_before_backward() -> Sequence[Diagnostic]:
    import torch

    from moec.runtime.weights.gathering import Gathering
    from moec.runtime.weights.regathering import RegatheredWeights

    part = torch.zeros(2)
    regathered = RegatheredWeights(lambda: Gathering((), ()), [part], "layer 1 (first.moe:8)", None)
    part.add_(1)
    return raised(lambda: regathered.weight(0))


def launching_a_layer() -> Sequence[Diagnostic]:
    from support.plans import layer_plan

    from moec.driver import launch

    return raised(lambda: launch(layer_plan()))


def gradient_that_is_nan() -> Sequence[Diagnostic]:
    import torch

    from moec.driver import launch

    with launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.arange(16).view(2, 8)
        job.step(model, tokens, tokens)
        model.get_parameter("norm.weight").grad[0] = torch.nan
        return raised(lambda: job.clip_grad_norm_(model, 1.0))


def save_in_a_step() -> Sequence[Diagnostic]:
    import torch

    from moec.driver import launch

    with launch(moe_plan(ranks=1, ep=1), device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.arange(16).view(2, 8)
        with job.accumulate(model, tokens):
            model(tokens, tokens).loss.backward()
            return raised(lambda: job.save("checkpoints/1", model))


def generate(*, model: str = "", beside: str = "", nan: bool = False, **options: object) -> Sequence[Diagnostic]:
    import torch

    from moec.driver import reference

    module = reference(moe_spec(ranks=1, ep=1, model=model, beside=beside))
    if nan:
        module.get_parameter("head.weight").data[3] = torch.nan
    prompts = torch.arange(12).view(2, 6)
    return raised(lambda: module.generate(prompts, **{"max_new_tokens": 2, **options}))


def choices_of_the_best() -> Sequence[Diagnostic]:
    return generate(top_k=40)


def generating_under_a_capacity() -> Sequence[Diagnostic]:
    return generate(beside="capacity = factor(1.25)")


def too_many_tokens() -> Sequence[Diagnostic]:
    return generate(max_new_tokens=100)


def logits_that_are_nan() -> Sequence[Diagnostic]:
    return generate(nan=True)


def gradient_of_generation() -> Sequence[Diagnostic]:
    import torch

    from moec.runtime import ops

    x, tables = torch.ones(1, 1, 1, 2, requires_grad=True), torch.ones(1, 1, 1, 1)
    return raised(lambda: ops.turn(x, tables, tables, 0, True))


def captured_on_cpu() -> Sequence[Diagnostic]:
    import torch

    from moec.driver import layer

    return raised(lambda: layer(layer_text(ranks=None)).capture(torch.ones(4, 16)))


def misspelt_command() -> Sequence[Diagnostic]:
    import click

    from moec.cli import app
    from moec.cli.usage import diagnostic

    with pytest.raises(click.UsageError) as error:
        app.main(["complie", "first.moe"], prog_name="moec", standalone_mode=False)
    return [diagnostic(error.value)]


def rank_without_a_word() -> Sequence[Diagnostic]:
    from moec.commands.launching.launch_run import failed

    return [failed(2, 3, "no data for rank 2", Path("logs/attempt_0/2/stderr.log"))]


def launched(*script: str, **options: Any) -> Sequence[Diagnostic]:
    from moec.commands.launching.launch import make_launch
    from moec.commands.launching.launch_run import run

    plan, path = moe_plan(ranks=8, batch=8), Path("tiny.plan")
    return raised(lambda: run(make_launch(plan, path, script, **options), None))


def ranks_of_several_nodes() -> Sequence[Diagnostic]:
    return launched(nodes=2)


def nodes_of_other_plans() -> Sequence[Diagnostic]:
    return launched(per_node=5)


def no_script() -> Sequence[Diagnostic]:
    return launched("trian.py")


def device_that_is_none() -> Sequence[Diagnostic]:
    return raised(lambda: moec.launch(moe_plan(ranks=1, ep=1), device="gpu"))


def file_for_a_plan() -> Sequence[Diagnostic]:
    Path("first.moe").write_text(moe_text(ranks=1, ep=1))
    return raised(lambda: moec.verify("first.moe"))


def build_before_the_job() -> Sequence[Diagnostic]:
    return raised(moec.launch(moe_plan(ranks=1, ep=1), device="cpu").build)


def choices_of_another_plan() -> Sequence[Diagnostic]:
    from moec.runtime.placement.choices import PlacementChoices

    path, plan = Path("choices.jsonl"), moe_plan(ep=2, adapt="replicate(4)")
    path.write_text('{"choices_of": "sha256:0123"}\n')
    complaint = PlacementChoices(path, plan).read()
    assert complaint is not None
    return complaint.error().diagnostics


def experts_of_an_unknown_state() -> Sequence[Diagnostic]:
    from moec.runtime.weights.movable import unmovable

    words = "an optimizer keeps `blocks`, a Tensor [64], of experts of layer 1 (model.moe:7)"
    return unmovable(words).diagnostics


EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {
    "MOE0013": starter_over_a_file,
    "MOE0014": starter_in_no_folder,
    "MOE0015": unknown_subject,
    "MOE0016": starter_from_an_unknown_model,
    "MOE0017": misspelt_command,
    "MOE0502": no_step,
    "MOE0503": choice_that_changes_results,
    "MOE0504": plan_of_another_model,
    "MOE0505": no_values,
    "MOE0600": no_plan,
    "MOE0601": edited_plan,
    "MOE0602": plan_of_another_format,
    "MOE0603": output_that_is_no_plan,
    "MOE0604": output_below_a_file,
    "MOE0700": cuts_in_another_order,
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
    "MOE0716": norm_after_handing_over,
    "MOE0717": no_tensorboard,
    "MOE0718": log_in_no_folder,
    "MOE0720": other_layers,
    "MOE0721": launching_a_layer,
    "MOE0722": parameter_changed_before_backward,
    "MOE0723": gradient_that_is_nan,
    "MOE0724": save_in_a_step,
    "MOE0726": routes_of_fewer_choices,
    "MOE0727": segments_that_descend,
    "MOE0728": padding_of_another_model,
    "MOE0729": gradient_of_generation,
    "MOE0740": choices_of_the_best,
    "MOE0741": generating_under_a_capacity,
    "MOE0742": too_many_tokens,
    "MOE0743": logits_that_are_nan,
    "MOE0744": captured_on_cpu,
    "MOE0750": device_that_is_none,
    "MOE0751": file_for_a_plan,
    "MOE0752": build_before_the_job,
    "MOE0753": choices_of_another_plan,
    "MOE0754": experts_of_an_unknown_state,
    **PLAN_EVENTS,
    **LAYER_EVENTS,
    **CHECKPOINT_EVENTS,
    **HUGGINGFACE_EVENTS,
    "MOE0915": rank_without_a_word,
    "MOE0916": ranks_of_several_nodes,
    "MOE0917": nodes_of_other_plans,
    "MOE0918": no_script,
}
