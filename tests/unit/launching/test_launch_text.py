"""`moec launch`: the command, the Slurm script and the Kubernetes manifest of a plan, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.plans import moe_plan, moe_text

import moec
from moec import entry
from moec.codegen.launch_command import start_command
from moec.commands.launching.launch import label, make_launch
from moec.commands.launching.launch_kubernetes import kubernetes_text, manifest
from moec.commands.launching.launch_slurm import slurm_script
from moec.grammar.diagnostics import DiagnosticError

AWKWARD = [
    "a b.py",
    "$HOME",
    "it's",
    "$(rm)",
    "no",
    "1e3",
    ": -",
    "#x",
    "ä😀",
    "a\nb",
    "",
    "\x7f",
    "a\x85b\u2028c\ufeff\x9f",
]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `moec launch` in a folder with the plan `a plan`, for 8 ranks; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    moe_plan(ranks=8, batch=8).save("a plan")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moec", "launch", *arguments])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command


def test_the_command_is_printed_and_nothing_is_started(run):
    assert run("a plan") == (0, "torchrun --standalone --nproc-per-node 8 train.py\n", "")


def test_unknown_options_after_the_script_are_the_scripts(run):
    _, out, _ = run("a plan", "t.py", "--lr", "3", "-x", "--max-restarts", "2", "--", "--name", "n")
    assert out == "torchrun --standalone --nproc-per-node 8 --max-restarts 2 t.py --lr 3 -x --name n\n"


@pytest.mark.parametrize("word", ["-hidden", "-xh", "-h5", "-hidden=5"])
def test_short_options_of_the_script_are_not_split(run, word):
    code, out, _ = run("a plan", "t.py", word, "5")
    assert (code, out) == (0, f"torchrun --standalone --nproc-per-node 8 t.py {word} 5\n")


def test_h_alone_is_help(run):
    code, out, _ = run("-h")
    assert code == 0
    assert out.startswith("Usage: moec launch")
    assert "-h, --help" in out


def test_several_nodes_say_what_is_missing(run):
    _, out, _ = run("a plan", "--nodes", "2")
    comment, command = out.splitlines()
    assert comment == "# 2 nodes × 4 ranks: run this on every node, with HOST set to the first node's name or address"
    assert command.endswith('--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$HOST:29500" train.py')
    _, out, _ = run("a plan", "--nodes", "2", "--host", "n1", "--port", "7000")
    assert "--rdzv-endpoint n1:7000 " in out
    _, out, _ = run("a plan", "--nodes", "2", "--host", "h;$(id)")
    assert "--rdzv-endpoint 'h;$(id):29500' " in out


@pytest.mark.parametrize("way", [(), ("--slurm",), ("--k8s",)])
def test_json_has_the_command_and_the_text(run, way):
    code, out, err = run("a plan", "--json", "--per-node", "2", *way)
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert (document["nodes"], document["processes_per_node"]) == (4, 2)
    assert document["argv"][:3] == ["torchrun", "--nnodes", "4"]
    assert document["environment"] == {"HOST": "the first node's name or address"}
    text = {"--slurm": slurm_script, "--k8s": kubernetes_text}
    assert [document[key] is not None for key in ("slurm", "k8s")] == ["--slurm" in way, "--k8s" in way]
    if way:
        launch = make_launch(moec.load("a plan"), Path("a plan"), (), per_node=2)
        assert document[way[0].strip("-")] == text[way[0]](launch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a plan", "--slrum"), "no option --slrum"),
        (("a plan", "--name", "x"), "--name is not for --torchrun"),
        (("a plan", "--slurm", "--image", "x"), "--image is not for --slurm"),
        (("a plan", "--k8s", "--run"), "--run is not for --k8s"),
        (("a plan", "--slurm", "--k8s"), "--slurm and --k8s are two ways"),
        (("a plan", "--run", "--json"), "leave out --json"),
        (("a plan", "--logs", "x"), "--logs needs --run"),
        (("a plan", "--per-node", "8", "--port", "1234"), "--host and --port are for several nodes"),
        (("a plan", "--per-node", "8", "--host", "a"), "--host and --port are for several nodes"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_a_file_in_place_of_a_plan_is_told_how_it_becomes_one(run):
    Path("first.moe").write_text(moe_text(ranks=8, batch=8))
    code, out, err = run("first.moe")
    assert (code, out) == (1, "")
    assert "`first.moe` is a `.moe` file, and `moec launch` wants a plan" in err
    assert "`moec compile first.moe`, then `moec launch first.plan`" in err


@pytest.mark.parametrize("sizes", [{"per_node": 3}, {"nodes": 3}, {"nodes": 2, "per_node": 2}, {"per_node": 16}])
def test_nodes_that_do_not_make_the_ranks_are_refused(sizes):
    with pytest.raises(DiagnosticError, match="MOE0917"):
        make_launch(moe_plan(ranks=8, batch=8), Path("p"), (), **sizes)


def test_a_rack_of_unknown_machines_is_asked_about():
    text = moe_text(ranks=8, batch=8).replace('level "node"', 'level "rack"')
    plan = moec.compile(text)
    with pytest.raises(DiagnosticError, match=r"MOE0917.*innermost level of cluster .* is 'rack'"):
        make_launch(plan, Path("p"), ())
    assert make_launch(plan, Path("p"), (), per_node=4).sizes == "2 nodes × 4 ranks"
    with pytest.raises(DiagnosticError) as refused:
        make_launch(plan, Path("p"), (), per_node=3)
    assert refused.value.diagnostics[0].help == "`--per-node 2` alone fits"
    assert start_command(plan, Path("a plan")) == "moec launch 'a plan' --per-node N train.py"


def test_a_job_of_slurm_on_one_node_meets_at_a_port_of_its_own():
    script = slurm_script(make_launch(moe_plan(ranks=8, batch=8), Path("p"), ()))
    assert '--nnodes 1 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id' in script


def test_bash_reads_the_slurm_script_and_its_arguments(tmp_path):
    """The script runs with a `srun` that shows its words, and a `scontrol` that knows two nodes."""
    launch = make_launch(moe_plan(ranks=8, batch=8), Path("a\nplan"), AWKWARD, nodes=2, max_restarts=3, name="It is")
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(launch), encoding="utf-8")
    shown = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['OMP_NUM_THREADS']]))"
    for name, body in {
        "srun": f'exec "{sys.executable}" -c "{shown}" "$@"',
        "scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
    }.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{body}\n")
        tool.chmod(0o755)
    of_slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1234", "SLURM_CPUS_ON_NODE": "64"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **of_slurm}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    words, threads = json.loads(done.stdout)
    assert words[:3] == ["--cpus-per-task=64", "--kill-on-bad-exit=1", "torchrun"]
    given = dict(zip(words[3:-1:2], words[4::2], strict=False))
    assert given["--nnodes"] == "2"
    assert (given["--rdzv-backend"], given["--log-dir"], given["--tee"]) == ("c10d", "it-is-logs/1234", "3")
    assert given["--nproc-per-node"] == "4"
    assert given["--rdzv-endpoint"] == "n1:29734"
    assert given["--rdzv-id"] == "1234"
    assert given["--max-restarts"] == "3"
    assert words[-len(AWKWARD) :] == AWKWARD
    assert threads == "16"
    options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--job-name=it-is"} <= set(options)
    assert not any("gpus" in option for option in options)  # the plan's devices are CPUs


def gpu_plan():
    text = moe_text(ranks=8, batch=8, dtype="bf16").replace("device = cpu", "device = h100")
    return moec.compile('use "devices/h100"\n' + text)


def test_gpus_are_asked_for():
    launch = make_launch(gpu_plan(), Path("p"), (), nodes=2)
    assert "#SBATCH --gpus-per-node=4\n" in slurm_script(launch)
    replicas = manifest(launch)["spec"]["pytorchReplicaSpecs"]
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_the_manifest_is_yaml_of_the_operator(nodes):
    path = Path("p\x7f\x85q")
    launch = make_launch(moe_plan(ranks=8, batch=8), path, AWKWARD, nodes=nodes, name="My_Model.2")
    document = yaml.safe_load(kubernetes_text(launch))
    assert document == manifest(launch)
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert document["metadata"]["name"] == "my-model-2"
    assert document["spec"]["nprocPerNode"] == str(8 // nodes)
    assert document["spec"]["runPolicy"]["backoffLimit"] == 3 * nodes
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert {kind: spec["replicas"] for kind, spec in replicas.items()} == (
        {"Master": 1, "Worker": nodes - 1} if nodes > 1 else {"Master": 1}
    )
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    assert container["image"] == "YOUR-IMAGE"
    assert [word.replace("$$", "$") for word in container["command"][-len(AWKWARD) :]] == AWKWARD
    assert ("$(MASTER_ADDR):$(MASTER_PORT)" in container["command"]) == (nodes > 1)


@pytest.mark.parametrize("name", ["Mixtral 8x7B", "7b", "---", "ä", "x" * 200, "a." * 30])
def test_names_are_labels_of_kubernetes(name):
    made = label(name)
    assert made == made.lower()
    assert len(made) <= 45
    assert made[0].isalpha()
    assert made[-1].isalnum()
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
