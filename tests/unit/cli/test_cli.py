"""The command line: exit codes, streams, and what each command prints."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support.plans import layer_text, moe_text
from support.tables import each_row

from moec import cli, entry
from moec.commands.verify_document import VerifyDocument
from moec.passes.ir.texts.parse import parse_program

Outcome = tuple[int, str, str]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., Outcome]:
    """Runs `moec` in an empty folder with tiny.moe in it; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.moe").write_text(moe_text())

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["moec", *arguments])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command


def test_check_is_silent_about_a_right_file(run):
    assert run("check", "tiny.moe") == (0, "", "")


def test_check_shows_every_mistake_of_every_file_on_stderr(run):
    Path("bad.moe").write_text(moe_text(dp=3, batch=6))
    Path("worse.moe").write_text(moe_text().replace("vocab", "vocabb"))
    code, out, err = run("check", "bad.moe", "tiny.moe", "worse.moe", "--format", "concise")
    assert (code, out) == (1, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["bad.moe", "bad.moe", "worse.moe"]


def test_check_finds_what_only_the_degrees_reveal(run):
    Path("bad.moe").write_text(moe_text(experts=6, ep=4))
    code, _, err = run("check", "bad.moe")
    assert code == 1
    assert "error[MOE0311]" in err
    assert "--> bad.moe:19:8" in err
    assert "6 experts declared here (layers 1..2)" in err


def test_check_as_json(run):
    Path("bad.moe").write_text(moe_text(dp=3))
    code, out, err = run("check", "bad.moe", "--format=json")
    assert (code, err) == (1, "")
    assert "MOE0310" in json.dumps(json.loads(out))


@each_row("name", ["nothing.moe", "."])
def test_an_unreadable_file_is_a_diagnostic(run, name: str):
    code, out, err = run("check", name)
    assert (code, out) == (1, "")
    assert err.startswith("error[MOE000")


def test_compile_writes_a_plan_and_a_summary(run):
    code, out, err = run("compile", "tiny.moe", "-o", "out/my.plan")
    assert (code, err) == (0, "")
    assert "compiled tiny in" in out
    assert "dp 4 (default), edp 2, ep 2" in out
    assert "moec verify out/my.plan" in out
    assert Path("out/my.plan/plan.json").is_file()


def test_the_summary_shows_the_degrees_of_each_range(run):
    Path("pyramid.moe").write_text(moe_text(ranks=8, ep=8, mixtures=((8, 2), (16, None), (32, 4), (8, 2))))
    code, out, err = run("compile", "pyramid.moe")
    assert (code, err) == (0, "")
    assert out.splitlines()[4:8] == [
        "  degrees   dp 8 (default)",
        "            layers 1, 4: edp 4, ep 2",
        "            layer 2: edp 1, ep 8",
        "            layer 3: edp 2, ep 4",
    ]


def test_compile_names_the_plan_after_the_file(run):
    assert run("compile", "tiny.moe")[0] == 0
    assert Path("tiny.plan/plan.json").is_file()


def test_compile_of_a_wrong_file_writes_nothing(run):
    Path("bad.moe").write_text(moe_text(dp=3))
    code, out, err = run("compile", "bad.moe")
    assert (code, out) == (1, "")
    assert "MOE0310" in err
    assert not Path("bad.plan").exists()


def test_a_let_is_overridden_from_the_command_line(run):
    Path("let.moe").write_text("let n = 8\n" + moe_text().replace("experts = 8 *", "experts = n *"))
    assert run("compile", "let.moe", "--let", "n=16", "--emit=spec")[1].count("16 * swiglu(16)") == 1
    code, _, err = run("compile", "let.moe", "--let", "m=16")
    assert code == 1
    assert "MOE0213" in err


@each_row("stage", ["ast", "spec", "ir", "placed", "fx", "kernels"])
def test_emit_prints_the_artifact_alone_and_writes_no_plan(run, stage: str):
    code, out, err = run("compile", "tiny.moe", f"--emit={stage}")
    assert (code, err) == (0, "")
    assert out
    assert not Path("tiny.plan").exists()


def test_emitted_stages_are_what_they_say(run):
    spec = run("compile", "tiny.moe", "--emit=spec")[1]
    Path("again.moe").write_text(spec)
    assert run("compile", "again.moe", "--emit=spec")[1] == spec
    assert not parse_program(run("compile", "tiny.moe", "--emit=ir")[1]).meshes
    assert parse_program(run("compile", "tiny.moe", "--emit=placed")[1]).stages
    graphs = run("compile", "tiny.moe", "--emit=fx")[1]
    assert "torch.ops.moec.route.default(" in graphs
    ast.parse(graphs)
    assert "plain torch runs everything" in run("compile", "tiny.moe", "--emit=kernels")[1]


def test_inspect_shows_the_graphs_of_a_plan_and_the_source_of_its_kernels(run):
    assert run("compile", "tiny.moe", "-o", "tiny.plan")[0] == 0
    assert run("inspect", "tiny.plan", "--fx")[1] == run("compile", "tiny.moe", "--emit=fx")[1]
    on_gpus = Path("tiny.moe").read_text().replace("device = cpu", 'device = "h100"')
    Path("gpu.moe").write_text('use "devices/h100"\n' + on_gpus)
    assert run("compile", "gpu.moe")[0] == 0
    sources = run("inspect", "gpu.plan", "--kernels", "--source")[1]
    ast.parse(sources)
    assert sources == run("compile", "gpu.moe", "--emit=kernels")[1]
    assert "# ---- route_" in sources
    assert run("inspect", "gpu.plan", "--source")[0] == 2


@each_row(
    ("arguments", "said"),
    [
        (("tiny.plan", "--graph", "dot", "--rank", "0"), "--rank and --graph: one view at a time"),
        (("tiny.plan", "--fx", "--kernels"), "--kernels and --fx: one view at a time"),
        (("tiny.plan", "--let", "n=4"), "--let needs a file"),
        (("tiny.moe", "--fx"), "--fx needs a plan, not a file"),
    ],
)
def test_inspect_ignores_no_option(run, arguments: tuple[str, ...], said: str):
    assert run("compile", "tiny.moe", "-o", "tiny.plan")[0] == 0
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())


def test_stop_after_shows_the_program_so_far(run):
    shown = parse_program(run("compile", "tiny.moe", "--emit=ir", "--stop-after=place")[1])
    assert shown.meshes
    assert not shown.stages
    assert run("compile", "tiny.moe", "--stop-after=place")[0] == 2


def test_print_ir_after_and_time_passes_go_to_stderr(run):
    code, out, err = run("compile", "tiny.moe", "--print-ir-after=changed", "--time-passes")
    assert code == 0
    assert "// after communicate: 51 ops (+7)" in err
    assert all(f"ms  {name}" in err for name in ("lower", "place", "shard", "communicate", "partition"))
    assert "//" not in out
    assert run("compile", "tiny.moe", "--print-ir-after=shard")[2].count("// after") == 1


def test_verify_reports_and_exits_0(run):
    run("compile", "tiny.moe")
    code, out, err = run("verify", "tiny.plan")
    assert (code, err) == (0, "")
    assert "4 ranks, verified on a virtual cluster: the plan equals the unsharded model" in out


def test_verify_as_json_has_the_largest_difference_and_its_place(run):
    run("compile", "tiny.moe")
    code, out, _ = run("verify", "tiny.plan", "--json")
    report = json.loads(out)
    assert code == 0
    TypeAdapter(VerifyDocument).validate_json(out)
    assert (report["plan"], report["ok"], report["ranks"], report["scaled"]) == ("tiny.plan", True, 4, False)
    assert (report["widths"], report["first_difference"], report["float32"]) == ([], None, None)
    found = report["float64"]
    errors = found["max_output_error"], found["max_gradient_error"]
    assert found["largest_difference"]["error"] == max(errors) < found["bound"]
    assert found["largest_difference"]["rank"] in range(4)
    assert report["rounding"]["dtype"] == "fp32"


def test_verify_as_json_has_the_toy_widths_and_the_report_in_float32(run):
    Path("narrow.moe").write_text(moe_text(dtype="bf16"))
    run("compile", "narrow.moe")
    whole, toy = (json.loads(run("verify", "narrow.plan", "--json", *more)[1]) for more in ([], ["--scale"]))
    assert whole["float32"]["bound"] > whole["float32"]["max_gradient_error"] > 1e-9
    assert (toy["scaled"], toy["rounding"], toy["float32"]) == (True, None, None)
    assert all(width["toy"] < width["before"] for width in toy["widths"])


@each_row("command", ["verify", "load"])
def test_a_plan_that_cannot_be_trusted_is_refused(run, command: str):
    run("compile", "tiny.moe")
    program = Path("tiny.plan/program.ir")
    program.write_text(program.read_text().replace("softmax", "sigmoid"))
    code, out, err = run(command, "tiny.plan")
    assert (code, out) == (1, "")
    assert "error[MOE0601]" in err


@each_row(
    ("backend", "why"),
    [
        ("nonsense", "MOEC_BACKEND must be one of torch, triton, grouped_mm, quack, not 'nonsense'"),
        ("triton", "MOEC_BACKEND=triton: on CPU tensors Triton needs its interpreter, TRITON_INTERPRET=1"),
    ],
)
def test_verify_blames_no_plan_for_a_backend_that_cannot_be_had(run, monkeypatch, backend: str, why: str):
    run("compile", "tiny.moe")
    monkeypatch.setenv("MOEC_BACKEND", backend)
    code, out, err = run("verify", "tiny.plan")
    assert (code, out) == (1, "")
    assert err.startswith(f"error[MOE0707]: the kernels asked for cannot run here\n  {why}\nhelp: unset it")


def test_load_says_that_a_plan_is_valid(run):
    run("compile", "tiny.moe")
    assert run("load", "tiny.plan", "--trust-nothing") == (0, "tiny.plan: tiny, 4 ranks, 29 parameters, valid\n", "")


def test_no_plan_at_all_is_a_diagnostic(run):
    code, _, err = run("verify", "nothing.plan")
    assert code == 1
    assert "error[MOE0600]" in err


def test_a_folder_of_checkpoints_names_the_command_that_lists_them(run):
    Path("saved/4").mkdir(parents=True)
    Path("saved/4/checkpoint.json").write_text("{}")
    code, _, err = run("inspect", "saved")
    assert code == 1
    assert "this folder has checkpoints" in err
    assert "`moec checkpoint inspect saved`" in err


@pytest.mark.parametrize(
    ("file", "what", "way"),
    [
        ("config.json", "a folder of Hugging Face", "`moec import hf other` writes a `.moe` file"),
        ("checkpoint.json", "a checkpoint", "`moec checkpoint inspect other` shows it"),
    ],
)
def test_a_folder_of_another_kind_is_named_by_its_kind(run, file: str, what: str, way: str):
    Path("other").mkdir()
    Path("other", file).write_text("{}")
    code, _, err = run("verify", "other")
    assert code == 1
    assert f"`other` is {what}, and `moec verify` wants a plan" in err
    assert f"help: {way}" in err
    code, _, err = run("check", "other")
    assert code == 1
    assert f"this is {what}" in err
    assert f"help: {way}" in err


@each_row("name", cli.NOT_YET)
def test_commands_to_come_say_so(run, name: str):
    code, out, err = run(name, "anything", "--at", "all")
    assert (code, out) == (1, "")
    assert err.startswith(f"error[MOE0202]: not supported yet\n  `moec {name}` will {cli.NOT_YET[name]}\n")


@each_row(
    "arguments",
    [
        ["compile"],
        ["compile", "tiny.moe", "--emit=nothing"],
        ["compile", "tiny.moe", "--let", "x"],
        ["check", "tiny.moe", "--format=loud"],
        ["compile", "tiny.moe", "--print-ir-after=nothing"],
        ["frobnicate"],
        ["verify", "--nothing"],
    ],
)
def test_wrong_usage_exits_2(run, arguments: list[str]):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err


def test_a_bug_of_ours_exits_3_and_says_what_to_report(run, monkeypatch):
    def broken(path: Path, **lets: str) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("moec.driver.check", broken)
    code, _, err = run("check", "tiny.moe")
    assert code == 3
    assert "ZeroDivisionError: a bug" in err
    assert "This is a bug in moec. Please report it" in err


def test_version(run):
    import torch

    import moec

    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert out.startswith(f"moec {moec.__version__} (Python {sys.version.split()[0]}, torch {torch.__version__}")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["triton"] = sys.modules["numpy"] = None  # importing them now fails
from moec.entry import main
for command in sys.argv[1:]:
    sys.argv = ["moec", *command.split()]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code, command
"""
NO_TORCH = (
    "check tiny.moe", "compile tiny.moe", "load tiny.plan", "load tiny.plan --trust-nothing",
    "inspect tiny.moe --params", "inspect tiny.plan --params", "inspect tiny.plan --memory",
)  # fmt: skip


def test_commands_that_need_no_torch_work_without_it(run):
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *NO_TORCH], capture_output=True, text=True, timeout=60
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert Path("tiny.plan/plan.json").is_file()


def test_a_closed_pipe_is_no_bug(run):
    command = f"{sys.executable} -m moec compile tiny.moe --emit=placed | head -1"
    finished = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert finished.stdout == 'program "tiny" from "tiny.moe" {\n'
    assert finished.stderr == ""


@pytest.mark.parametrize("options", [[], ["--scale"]])
def test_verify_proves_the_plan_of_a_layer(run, options: list[str]):
    Path("ffn.moe").write_text(layer_text(ep=2))
    run("compile", "ffn.moe")
    code, out, err = run("verify", "ffn.plan", *options)
    assert (code, err) == (0, "")
    how = "verified at toy widths" if options else "verified"
    assert f"✓ ffn.plan: 4 ranks, {how} on a virtual cluster: the plan equals the unsharded layer" in out
    assert "y and aux_loss   gradients and one step" in out
    assert "model" not in out
    code, out, _ = run("verify", "ffn.plan", "--json", *options)
    assert (code, json.loads(out)["ok"]) == (0, True)


def test_a_layer_file_goes_through_every_command_that_needs_no_torch(run):
    Path("ffn.moe").write_text(layer_text(ep=2))
    assert run("check", "ffn.moe") == (0, "", "")
    code, out, err = run("compile", "ffn.moe")
    assert (code, err) == (0, "")
    assert "layer     8 experts, dim 16, fp32: " in out
    assert "degrees   dp 4 (default), edp 2, ep 2" in out
    assert out.endswith("next: `moec verify ffn.plan`, then `moec.layer('ffn.plan')` in your own model\n")
    assert run("load", "ffn.plan", "--trust-nothing")[0] == 0
    code, out, _ = run("inspect", "ffn.plan")
    assert code == 0
    assert "all_to_all %rows.1" in out
    assert "moe.experts.up.weight" in run("inspect", "ffn.plan", "--rank", "3")[1]
    assert 'layer "ffn":' in run("inspect", "ffn.moe")[1]
    assert run("compile", "ffn.moe", "--emit", "spec")[1].startswith('layer "ffn" {')
